"""What the Dockerfile promises, read from it: small, not root, pinned, and nothing of the machine that builds it.

That it builds and runs is shown by infra/image/build-offline.sh, which takes minutes and root.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from idletrain.cli.main import app
from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "infra" / "image"
DOCKERFILE, SCRIPT = IMAGE / "Dockerfile", IMAGE / "build-offline.sh"


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage and their arguments; what comes before the first stage is the first of them."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    matches: list[list[tuple[str, str]]] = [[]]
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            matches.append([])
        if word:
            matches[-1].append((word, " ".join(rest.split())))
    return matches


def arguments(stage: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for instruction, rest in stage if instruction == word]


def environment() -> dict[str, str]:
    """The variables of the last stage, which are those of the image."""
    pairs = (pair for rest in arguments(stages()[-1], "ENV") for pair in shlex.split(rest))
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def test_both_stages_stand_on_one_base_that_can_be_replaced() -> None:
    head, *built = stages()
    assert arguments(head, "ARG") == ["BASE=python:3.11-slim-bookworm"]
    assert [stage[0] for stage in built] == [("FROM", "${BASE} AS build"), ("FROM", "${BASE}")]


def test_the_image_runs_idletrain_as_a_user_without_rights() -> None:
    last = stages()[-1]
    assert json.loads(arguments(last, "ENTRYPOINT")[0]) == ["idletrain"]
    (user,) = arguments(last, "USER")
    assert re.fullmatch(r"[1-9]\d{4,}:[1-9]\d{4,}", user)  # numbers: hosts and clusters check them without a passwd
    after = [word for word, _ in last[last.index(("USER", user)) + 1 :]]
    assert after == ["WORKDIR", "ENTRYPOINT"]


def test_what_is_installed_is_pinned_and_comes_for_cpus_unless_asked() -> None:
    build = stages()[1]
    installs = [rest for rest in arguments(build, "RUN") if "pip install" in rest]
    assert len(installs) == 3
    assert "--require-hashes -r requirements.txt" in installs[0]
    assert "--constraint versions.txt -r more-requirements.txt" in installs[1]  # which a user writes
    assert "pip install --no-deps ./idletrain-*.whl" in installs[2]
    assert arguments(build, "ARG") == ["CUDA=cpu", "TORCH_INDEX=https://download.pytorch.org/whl/${CUDA}"]


def test_the_code_is_copied_after_what_it_needs_is_installed() -> None:
    """A change of the code builds one layer of a few hundred kilobytes, and not one of torch."""
    build = stages()[1]
    copied = [rest for word, rest in build if word == "COPY"]
    assert copied == ["requirements-${CUDA}.txt requirements.txt", "more-requirements.txt ./", "idletrain-*.whl ./"]
    steps = [word for word, _ in build if word in {"COPY", "RUN"}]
    assert steps == ["RUN", *("COPY", "RUN") * 3]


def test_its_own_packages_keep_their_versions_beside_those_of_a_user(tmp_path: Path) -> None:
    """The line that makes them pip's constraints leaves versions alone, also those with a build."""
    (command,) = [rest for rest in arguments(stages()[1], "RUN") if rest.startswith("sed ")]
    (tmp_path / "requirements.txt").write_text(
        "# written\na==1.0 --hash=sha256:ab\ntorch==2.9.0+cpu --hash=sha256:cd\n"
    )
    subprocess.run(["sh", "-c", command.partition(" && ")[0]], cwd=tmp_path, check=True)
    assert (tmp_path / "versions.txt").read_text() == "# written\na==1.0\ntorch==2.9.0+cpu\n"
    lines = (IMAGE / "more-requirements.txt").read_text().splitlines()
    assert all(line.startswith("#") for line in lines)


def test_all_that_the_build_copies_is_what_the_command_writes(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["infra", "image", "--to", str(tmp_path)])
    assert result.exit_code == 0, result.output
    copied = {name.replace("${CUDA}", "cpu") for rest in arguments(stages()[1], "COPY") for name in rest.split()[:-1]}
    assert all(len([*tmp_path.glob(name)]) == 1 for name in copied)
    assert (tmp_path / "Dockerfile").read_bytes() == DOCKERFILE.read_bytes()


def test_every_package_of_the_image_is_one_of_those_that_are_tested_and_has_the_hash_of_its_file() -> None:
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    text = (IMAGE / "requirements-cpu.txt").read_text()
    locked = [line for line in text.splitlines() if not line.startswith("#")]
    matches = {}
    for line in locked:
        match = re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert match, line
        matches[match[1]] = match[2].partition("+")[0]
    assert matches == {name: tested[name] for name in matches}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = {canonicalize_name(re.split(r"[<>=~\[]", spec)[0]) for spec in project["dependencies"]}
    assert direct | {"setuptools"} <= matches.keys()


def test_a_report_of_pip_becomes_one_line_a_package() -> None:
    spec = importlib.util.spec_from_file_location("lock", IMAGE / "lock.py")
    assert spec
    assert spec.loader
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    items = [
        {
            "metadata": {"name": name, "version": "1"},
            "download_info": {"archive_info": {"hashes": {"sha256": digit * 64}}},
        }
        for name, digit in (("PyYAML", "b"), ("annotated_types", "a"))
    ]
    assert lock.lines({"install": items}) == [
        f"annotated-types==1 --hash=sha256:{'a' * 64}",
        f"pyyaml==1 --hash=sha256:{'b' * 64}",
    ]


def test_the_last_stage_takes_the_environment_and_installs_nothing() -> None:
    last = stages()[-1]
    assert arguments(last, "COPY") == ["--from=build /opt/idletrain /opt/idletrain"]
    assert not [rest for rest in arguments(last, "RUN") if re.search(r"pip|apt|curl|wget", rest)]
    assert not re.search(r"\b(gcc|g\+\+|build-essential|make)\b", DOCKERFILE.read_text())
    assert environment()["PATH"].startswith("/opt/idletrain/bin:")


def test_processes_in_the_image_give_memory_back_as_workers_do() -> None:
    assert environment()["GLIBC_TUNABLES"] == WORKER_ENVIRONMENT["GLIBC_TUNABLES"]
    assert environment()["PYTHONDONTWRITEBYTECODE"] == "1"


def test_no_secret_can_be_given_to_the_build_or_lie_in_the_image() -> None:
    given = [rest for stage in stages() for word in ("ARG", "ENV") for rest in arguments(stage, word)]
    names = [pair.partition("=")[0] for rest in given for pair in shlex.split(rest)]
    assert {"BASE", "CUDA", "GLIBC_TUNABLES"} <= {*names}
    assert not [name for name in names if re.search("PASSWORD|SECRET|TOKEN|KEY|CREDENTIAL", name)]


def test_the_script_that_builds_without_a_registry_refuses_without_a_wheel_or_rights(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = shutil.copy(SCRIPT, tmp_path)

    def fault() -> str:
        done = subprocess.run(["bash", script], env=path, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 1
        return done.stderr

    assert "run the one that `idletrain infra image --to image` writes" in fault()
    (tmp_path / "idletrain-0-py3-none-any.whl").touch()
    assert "needs root; run this with sudo" in fault()
