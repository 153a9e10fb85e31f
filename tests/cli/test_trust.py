"""A run directory from a stranger runs no code of the stranger's, unless its receiver says so."""

from __future__ import annotations

import json
import os
import pickle
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
import yaml
from safetensors.torch import load_file

JOB = {
    "name": "sent",
    "model": {"factory": "own_factory:net"},
    "data": {"name": "digits"},
    "nodes": {"count": 1},
    "training": {"method": "ist", "subnets": 2, "local_steps": 2, "rounds": 3, "batch_size": 32},
}
FACTORY = """
import pathlib
from idletrain.nn.models import mlp

def net():
    pathlib.Path("called").touch()
    return mlp([64, 16, 16, 10], norm="batch")
"""
PLANT = "open({start!r} + __name__.split('.')[0], 'w').close()\n"
THIRD_PARTY = ("typer", "click", "rich", "yaml", "numpy", "torch", "dask", "distributed", "safetensors", "cloudpickle")
THIRD_PARTY += ("pydantic", "psutil", "boto3", "botocore", "moto", "jinja2", "tornado", "own_factory")
MODULE = (sys.executable, "-m", "idletrain")
SCRIPT = (sys.executable, "-P", "-c", "import sys; from idletrain.__main__ import main; sys.argv[0] = 'x'; main()")


def run(*arguments: str, cwd: Path, how: tuple[str, ...] = MODULE, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*how, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def forked(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The same of a process that had imported all before; for what does not depend on how modules are found."""
    return warm.run([*MODULE, *arguments], folder=cwd, environment={**os.environ, **env}, timeout=120)


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that its owner has trained there."""
    folder = tmp_path_factory.mktemp("sender")
    (folder / "own_factory.py").write_text(FACTORY)
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    done = run("launch", "job.yaml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def received(sender: Path, tmp_path: Path) -> Path:
    """The same directory where it has arrived; nothing of it was executed there."""
    folder = tmp_path / "received"
    shutil.copytree(sender, folder)
    (folder / "called").unlink()
    return folder


@pytest.fixture
def receiver(tmp_path: Path) -> dict[str, str]:
    """The receiver's own state directory."""
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def empty_entry() -> str:
    """A PYTHONPATH as `PYTHONPATH=$PYTHONPATH:more` often makes it: its empty entry is the working directory."""
    return os.pathsep + os.environ.get("PYTHONPATH", "")


def plant(folder: Path, *, path: str, place: Path) -> None:
    """Plant every module that Python has not loaded by itself when the command line begins, and that it would find."""
    loaded = place / "loaded.py"
    loaded.write_text("import sys\nprint(*sys.modules)\n")
    completed = subprocess.run(
        [sys.executable, "-m", "loaded"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    before = {name.split(".")[0] for name in completed.stdout.split()} | {"idletrain", "sitecustomize", "usercustomize"}
    before |= {"nt", "_winapi"}  # Windows' own, for which Python looks at its start on every system
    for name in (set(sys.stdlib_module_names) | set(THIRD_PARTY)) - before - set(sys.builtin_module_names):
        (folder / f"{name}.py").write_text(PLANT.format(start=f"{folder}/planted-"))


def planted(folder: Path) -> list[str]:
    """The planted modules that were imported."""
    return sorted(path.name for path in folder.glob("planted-*"))


@pytest.fixture(params=["python -m idletrain", "idletrain with an empty entry in PYTHONPATH"])
def how(request: pytest.FixtureRequest, received: Path, tmp_path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Starts of the command line in a directory where Python itself would import what was planted."""
    script = request.param.startswith("idletrain")
    path = empty_entry() if script else os.environ.get("PYTHONPATH", "")
    plant(received, path=path, place=tmp_path)
    options = ["-P"] if script else []
    python = run(*options, "-c", "import json, torch", cwd=received, how=(sys.executable,), PYTHONPATH=path)
    assert python.returncode == 0, python.stderr
    assert planted(received) == ["planted-json", "planted-torch"]
    for marker in received.glob("planted-*"):
        marker.unlink()
    return SCRIPT if script else MODULE, path


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("status", "sent"), 0),
        (("report", "sent"), 0),
        (("export", "sent", "--to", "mine.safetensors"), 0),
        (("evaluate", "sent"), 2),
        (("export", "sent", "--to", "mine.pt"), 2),
        (("logs", "sent", "--cloud", "sandbox"), 1),
        (("cost", "sent", "--cloud", "sandbox"), 1),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_commands_that_show_import_nothing_from_where_they_run(
    arguments: tuple[str, ...], code: int, how: tuple[tuple[str, ...], str], received: Path, receiver: dict[str, str]
) -> None:
    start, path = how
    done = run(*arguments, cwd=received, how=start, PYTHONPATH=path, HOME=receiver["XDG_STATE_HOME"], **receiver)
    assert planted(received) == []
    assert not (received / "called").exists()
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_network_is_exported_without_its_code_and_it_is_the_same(
    sender: Path, received: Path, receiver: dict[str, str], tmp_path: Path
) -> None:
    own, sent = tmp_path / "own.pt", tmp_path / "sent.safetensors"
    assert forked("export", "sent", "--to", str(own), cwd=sender).stdout == f"{own}: the network after round 3\n"
    (received / "own_factory.py").unlink()
    done = forked("export", "sent", "--to", str(sent), cwd=received, **receiver)
    assert done.stdout == f"{sent}: the network after round 3\n", done.stderr
    expected, actual = torch.load(own, weights_only=True), load_file(sent)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)
    assert any(name.endswith("running_mean") and value.abs().sum() > 0 for name, value in actual.items())


def test_a_run_of_one_s_own_is_evaluated_without_a_question(sender: Path) -> None:
    done = forked("evaluate", "sent", "--json", cwd=sender)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 3


@pytest.mark.parametrize("arguments", [("evaluate", "sent"), ("export", "sent", "--to", "mine.pt")])
def test_a_stranger_s_code_is_executed_only_by_those_who_say_so(
    arguments: tuple[str, ...], received: Path, receiver: dict[str, str]
) -> None:
    refused = forked(*arguments, cwd=received, **receiver)
    assert (refused.returncode, refused.stdout) == (2, "")
    why = "idletrain: runs/sent: you did not start this run here, and whoever did chose the code that this command "
    assert refused.stderr.startswith(f"{why}executes; add --trust if you trust them as you trust your own code")
    assert ("export to .safetensors" in refused.stderr) == (arguments[0] == "export")
    assert not (received / "called").exists()
    trusted = forked(*arguments, "--trust", cwd=received, **receiver)
    assert trusted.returncode == 0, trusted.stderr
    assert (received / "called").exists()


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_somebody_put_into_one_s_own_run_is_not_opened(sender: Path, tmp_path: Path) -> None:
    folder, marker = tmp_path / "returned", tmp_path / "unpickled"
    shutil.copytree(sender, folder)
    assert forked("evaluate", "sent", cwd=folder).returncode == 0  # it is one's own as long as nobody changes it
    content = pickle.dumps(Planted(marker))
    (folder / "runs/sent/program.pkl").write_bytes(content)
    for arguments in (("evaluate", "sent"), ("export", "sent", "--to", "x.pt")):
        assert "add --trust" in forked(*arguments, cwd=folder).stderr
    for arguments in (("status", "sent"), ("report", "sent"), ("export", "sent", "--to", "x.safetensors")):
        assert forked(*arguments, cwd=folder).returncode == 0
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()


def test_a_factory_that_somebody_wrote_into_one_s_own_run_is_not_called(sender: Path, tmp_path: Path) -> None:
    folder = tmp_path / "returned"
    shutil.copytree(sender, folder)
    file = folder / "runs/sent/job.json"
    job = json.loads(file.read_text())
    job["model"] = {"factory": "os:mkdir", "args": {"path": str(tmp_path / "called")}}
    file.write_text(json.dumps(job))
    assert "add --trust" in forked("evaluate", "sent", cwd=folder).stderr
    assert not (tmp_path / "called").exists()
    forked("evaluate", "sent", "--trust", cwd=folder)
    assert (tmp_path / "called").exists()


@pytest.mark.parametrize(("answer", "code"), [("n", 130), ("y", 0)])
def test_in_a_terminal_it_is_a_question(answer: str, code: int, received: Path, receiver: dict[str, str]) -> None:
    terminal, user = pty.openpty()
    with subprocess.Popen(
        [*MODULE, "evaluate", "sent", "--json"],
        cwd=received,
        env={**os.environ, **receiver},
        stdin=user,
        stdout=subprocess.PIPE,
        stderr=user,
    ) as process:
        os.close(user)
        shown = b""
        while b"Execute it? [y/N]" not in shown:
            shown += os.read(terminal, 1024)
        assert not (received / "called").exists()
        os.write(terminal, f"{answer}\n".encode())
        assert process.wait(120) == code
    os.close(terminal)
    assert b"you did not start this run here" in shown.replace(b"\r\n", b"")
    assert (received / "called").exists() == (answer == "y")


def test_a_report_replaces_a_link_and_not_what_it_leads_to(received: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (received / "runs/sent/report.html").symlink_to(precious)
    done = forked("report", "sent", cwd=received)
    assert done.returncode == 0, done.stderr
    assert precious.read_text() == "mine"
    assert "<html" in (received / "runs/sent/report.html").read_text()
