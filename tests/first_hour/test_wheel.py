"""What a new user does in the first hour, with the wheel alone, in an empty directory and a terminal."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "idletrain", "infra", "examples", "workflows")
PATIENCE_SECONDS = 120.0
INFO = "idletrain-0.1.0.dist-info"
LEFT_OUT = (f"{INFO}/top_level.txt", f"{INFO}/licenses/LICENSE")  # of pip's own wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, where Python finds them before those of the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name, **({"symlinks": True} if copy is shutil.copytree else {}))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", folder / "dist", folder], check=True)
    (wheel,) = (folder / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def empty(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.glob("*.egg-info"))


def terminal(*arguments: str, code: int = 0) -> str:
    """What a command shows in a terminal of 80 columns, until it has ended."""
    command = [sys.executable, "-m", "idletrain", *arguments]
    shown, status = pexpect.run(
        " ".join(command), timeout=PATIENCE_SECONDS, withexitstatus=True, encoding="utf-8",
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    assert status == code, shown
    assert "Traceback" not in shown
    return str(shown)


def test_the_wheel_has_what_a_user_needs_and_nothing_for_developers(installed: Path) -> None:
    folders = {path.name for path in installed.iterdir()}
    assert folders == {"idletrain", "idletrain-0.1.0.dist-info"}
    needed = ("py.typed", "cli/infra/aws/idletrain.yaml", "cli/infra/idle/crontab", "cli/infra/grafana/idletrain.json")
    assert all((installed / "idletrain" / path).is_file() for path in needed)
    about = email.message_from_string((installed / "idletrain-0.1.0.dist-info/METADATA").read_text())
    assert about["Author"]
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert (installed / "idletrain-0.1.0.dist-info/entry_points.txt").read_text().count("=") == 1


def test_the_wheel_s_code_is_what_runs(empty: Path, installed: Path) -> None:
    command = [sys.executable, "-c", "import idletrain; print(idletrain.__file__)"]
    assert subprocess.check_output(command, text=True).startswith(str(installed))


def test_from_an_empty_directory_to_a_network_of_one_s_own(empty: Path) -> None:
    assert "README.md says how to train it" in terminal("init", "--template", "tabular")
    job = yaml.safe_load(Path("job.yaml").read_text())
    job["training"] |= {"rounds": 3, "local_steps": 20, "evaluate_every": 1}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    name = job["name"]
    assert "done: all rounds" in terminal("launch", "job.yaml")
    assert name in terminal("runs")
    assert f"{name}: completed" in terminal("status", name)
    assert "round 3: " in terminal("evaluate", name)
    assert "report.html" in terminal("report", name)
    assert "the network after round 3" in terminal("export", name, "--to", "model.safetensors")
    assert Path("model.safetensors").stat().st_size > 0


@pytest.mark.parametrize("kind", ["aws", "grafana", "idle", "image"])
def test_what_prepares_accounts_and_machines_comes_along(kind: str, empty: Path) -> None:
    terminal("infra", kind, "--to", "mine")
    written = {path.name: path.read_bytes() for path in Path("mine").iterdir()}
    given = {path.name: path.read_bytes() for path in (ROOT / "infra" / kind).iterdir() if path.is_file()}
    assert {name: content for name, content in written.items() if not name.endswith(".whl")} == given
    refused = terminal("infra", kind, "--to", "mine", code=2)
    assert "already; name an empty folder" in " ".join(refused.split())  # in lines of whole words


def test_the_image_gets_the_very_wheel_that_is_installed(empty: Path, installed: Path) -> None:
    terminal("infra", "image", "--to", "image")
    (wheel,) = Path("image").glob("*.whl")
    content = wheel.read_bytes()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", "here"]
    subprocess.run([*install, str(wheel)], check=True)
    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path for path in files if not (Path("here") / path).is_file()} <= {*map(Path, LEFT_OUT)}
    code = [path for path in files if path.parts[0] == "idletrain"]
    assert code
    assert all((Path("here") / path).read_bytes() == (installed / path).read_bytes() for path in code)
    script = subprocess.run([Path("here/bin/idletrain"), "--version"], capture_output=True, text=True, check=True)
    assert "0.1.0" in script.stdout
    terminal("infra", "image", "--to", "again")
    assert (Path("again") / wheel.name).read_bytes() == content
