"""The command line: sentences and exit codes, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from safetensors.torch import load_file

from idletrain.cli import main as cli
from idletrain.cli.main import file_fault

GOOD = """
name: t
model: {factory: "idletrain.nn.models:mlp", args: {widths: [64, 16, 10]}}
data: {name: digits}
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "idletrain", *arguments]
    return warm.run(command, folder=cwd, timeout=120)


def error_lines(result: subprocess.CompletedProcess[str], code: int) -> list[str]:
    """The error's sentences."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr.splitlines()


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    assert error_lines(run("launch", "none.yaml", cwd=tmp_path), 2) == [
        "idletrain: none.yaml: cannot be read (No such file or directory); name an existing job file"
    ]


def test_every_fault_of_a_job_is_a_sentence_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD + "training: {rounds: 0, seeed: 1}\n")
    assert error_lines(run("launch", "job.yaml", cwd=tmp_path), 2) == [
        "idletrain: training.rounds: 0 should be greater than or equal to 1",
        "idletrain: training.seeed: is not a field of a job; did you mean seed?",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["job.yaml"]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD.replace("64", "63"))
    lines = error_lines(run("launch", "job.yaml", cwd=tmp_path), 2)
    assert lines[-1].startswith("idletrain: model: does not take inputs of shape [64]: ")
    assert [p.name for p in tmp_path.iterdir()] == ["job.yaml"]


def test_a_plan_is_printed_from_a_factory_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from idletrain.nn.models import mlp\n\ndef net():\n    return mlp([64, 16, 10])\n"
    )
    (tmp_path / "job.yaml").write_text(
        'name: t\nmodel: {factory: "mine:net"}\ndata: {name: digits}\n'
        "training: {method: ist, subnets: 4, local_steps: 5}\n"
    )
    result = run("plan", "job.yaml", "--nodes", "2", "--memory", "1GiB", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "neuron groups" in result.stdout
    assert "25.0%" in result.stdout
    assert " s a round on this fleet: " in result.stdout
    assert "this machine's pace" not in result.stdout  # one forecast, of the fleet
    assert re.search(r"^all 29 rounds take about \d.* on this fleet$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("launch",), "Missing argument 'JOB'"),
        (("launhc", "x"), "No such command 'launhc'"),
        (("launch", "job.yaml", "--churn", "often"), "should be a duration such as 15s, 10m or 4h"),
        (("launch", "job.yaml", "--nodes", "0"), "should be greater than or equal to 1"),
        (("launch", "job.yaml", "--churn", "0s"), "should be more than 0"),
        (("plan", "job.yaml", "--memory", "lots"), "should be a size such as 512MiB or 2GB"),
        (("plan", "job.yaml", "--memory", "0"), "should be more than 0"),
        (("infra",), "Missing argument 'kind'. Choose from: aws, "),
        (("init", "--template", "foo"), "Invalid value for '--template': 'foo' is not one of 'image'"),
    ],
)
def test_wrong_arguments_are_a_sentence(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = main(arguments, monkeypatch, capsys)
    assert code == 2
    assert sentence in err
    command = "" if arguments[0] == "launhc" else arguments[0]
    assert err.endswith(f"; see {f'idletrain {command}'.strip()} --help\n")
    assert len(err.splitlines()) == 1


def test_commands_of_which_none_was_named_are_listed_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = main(("schedule",), monkeypatch, capsys)
    assert (code, err) == (2, "")


def main(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Exit code and error output of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["idletrain", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "evaluate"])
def test_a_run_that_is_not_there_is_a_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = main((command, "nothing"), monkeypatch, capsys)
    assert (code, err) == (
        1,
        "idletrain: there is no run nothing in runs; there is none at all; of one in a cloud, add --cloud\n",
    )


def test_a_run_of_one_s_own_factory_is_shown_evaluated_and_exported_from_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bare = [entry for entry in sys.path if entry]  # as the installed script finds it
    (tmp_path / "own_factory.py").write_text(
        "from idletrain.nn.models import mlp\n\ndef net():\n    return mlp([64, 16, 10])\n"
    )
    (tmp_path / "job.yaml").write_text(
        'name: t\nmodel: {factory: "own_factory:net"}\ndata: {name: digits}\nnodes: {count: 1}\n'
        "training: {method: ist, subnets: 2, local_steps: 2, rounds: 2, batch_size: 32}\n"
    )
    monkeypatch.setattr(sys, "path", bare.copy())
    codes = [main(("launch", "job.yaml", "--json"), monkeypatch, capsys)[0]]
    sys.modules.pop("own_factory")
    messages = []
    export = ("export", "t", "--to", "t.safetensors")
    for command in (("status", "t", "--json"), ("evaluate", "t", "--json"), export, ("evaluate", "t")):
        monkeypatch.setattr(sys, "path", bare.copy())
        monkeypatch.setattr(sys, "argv", ["idletrain", *command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        codes.append(ended.value.code)
        messages.append(capsys.readouterr().out)
    assert codes == [None] * 5
    status, evaluated = (json.loads(line) for line in messages[:2])
    assert (status["status"], status["rounds"], evaluated["rounds"]) == ("completed", 2, 2)
    assert messages[2] == "t.safetensors: the network after round 2\n"
    calibration = (
        f"calibration error {evaluated['calibration_error']:.4f}, best temperature {evaluated['temperature']:.2f}"
    )
    assert calibration in messages[3]
    for field in ("accuracy", "calibration_error", "temperature"):
        assert evaluated[field] == pytest.approx(status[field])
    assert load_file(tmp_path / "t.safetensors")["1.weight"].shape == (16, 64)


def test_a_scheduler_that_cannot_be_reached_is_named_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("idletrain.cluster.contact.CONTACT_SECONDS", 1)
    (tmp_path / "job.yaml").write_text(GOOD)
    code, err = main(("launch", "job.yaml", "--scheduler", "tcp://127.0.0.1:1"), monkeypatch, capsys)
    assert code == 2
    assert "idletrain: --scheduler: tcp://127.0.0.1:1 cannot be reached (" in err
    assert [p.name for p in tmp_path.iterdir()] == ["job.yaml"]


def test_an_export_to_another_kind_of_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = main(("export", "nothing", "--to", "net.onnx"), monkeypatch, capsys)
    assert (code, err) == (2, "idletrain: --to: net.onnx should end in .safetensors or .pt, or name a directory\n")


@pytest.mark.parametrize("command", ["status", "launch", "evaluate"])
def test_a_name_that_no_file_can_have_is_no_bug(command: str, tmp_path: Path) -> None:
    done = warm.run([sys.executable, "-m", "idletrain", command, "x" * 300], folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("idletrain: ")
    assert done.stderr.endswith(": File name too long; name a shorter one\n")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "runs/t/lock"), "runs/t/lock: Permission denied; ask its"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room there"),
        (OSError(errno.EBADF, "Bad file descriptor"), ""),
        (ValueError("a bug"), ""),
    ],
)
def test_a_file_that_the_machine_refuses_is_told_with_what_helps(error: Exception, sentence: str) -> None:
    assert file_fault(error).startswith(sentence)
    assert bool(file_fault(error)) == bool(sentence)


def test_a_bug_is_exit_code_3_with_a_report_to_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_path: Path, _name: str | None) -> None:
        raise ZeroDivisionError("an invented bug")

    monkeypatch.setattr("idletrain.job_file.load_job", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, err = main(("launch", "job.yaml"), monkeypatch, capsys)
    assert code == 3
    (report,) = tmp_path.iterdir()
    assert err == f"idletrain: a bug, not your fault: ZeroDivisionError('an invented bug'); please send {report}\n"
    text = report.read_text()
    assert "Traceback" in text
    assert "'launch', 'job.yaml'" in text


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_path: Path, _name: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("idletrain.job_file.load_job", interrupted)
    assert main(("launch", "job.yaml"), monkeypatch, capsys)[0] == 130


def test_ctrl_c_in_the_middle_of_an_import_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_path: Path, _name: str | None) -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("idletrain.job_file.load_job", interrupted)
    assert main(("launch", "job.yaml"), monkeypatch, capsys) == (130, "")


def test_ctrl_c_while_the_command_line_is_imported_is_exit_code_130_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "idletrain", "--help"]
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_detaching_from_a_run_of_this_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    (line,) = error_lines(run("launch", "job.yaml", "--detach", cwd=tmp_path), 2)
    assert line == "idletrain: --detach: is for runs in a cloud (--spot); leave it out"


@pytest.mark.parametrize("option", [("--trace", "trace.csv"), ("--speed", "60")])
def test_what_only_the_rehearsal_cloud_does_is_refused_elsewhere(tmp_path: Path, option: tuple[str, str]) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    (line,) = error_lines(run("launch", "job.yaml", *option, cwd=tmp_path), 2)
    assert line == "idletrain: --trace, --speed: are for the rehearsal cloud (--cloud sandbox); leave them out"


def test_an_empty_name_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    (line,) = error_lines(run("launch", "job.yaml", "--name", "", cwd=tmp_path), 2)
    assert line == "idletrain: name: '' should be lower-case letters, digits and hyphens, at most 63"


def test_ctrl_c_while_python_executes_a_text_is_exit_code_130_and_no_signal(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD.replace("idletrain.nn.models:mlp", "mine:net"))
    (tmp_path / "mine.py").write_text("exec('raise KeyboardInterrupt')")  # as an import of a dataclass does
    assert run("plan", "job.yaml", cwd=tmp_path).returncode == 130


def imported_of(heavy: set[str], *arguments: str, cwd: Path) -> tuple[str, str]:
    """What a command prints, and which heavy modules it has imported."""
    program = (
        "import sys\n"
        "from idletrain.cli import main as cli\n"
        f"sys.argv = {['idletrain', *arguments]}\n"
        f"try:\n    cli.main()\nfinally:\n    print('HEAVY', sorted({heavy} & sys.modules.keys()))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    printed, _, imported = result.stdout.partition("HEAVY ")
    return printed, imported.strip()


def test_help_lists_the_commands_without_importing_what_is_heavy(tmp_path: Path) -> None:
    printed, imported = imported_of({"torch", "distributed", "numpy", "boto3", "pydantic"}, "--help", cwd=tmp_path)
    assert imported == "[]"
    for command in ("launch", "plan", "status", "evaluate", "export", "worker", "fabric"):
        assert command in printed


def test_reading_a_job_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    program = (
        "import sys, pathlib, idletrain.job_file\n"
        "idletrain.job_file.load_job(pathlib.Path('job.yaml'))\n"
        "assert not {'torch', 'distributed', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


RECORDS = (
    '{"v": 2, "t": 1.0, "s": 0.0, "kind": "run_started", "run": "night", "subnets": 2, "rounds": 3, "target": null,'
    ' "parameters": 9, "resumed_at": 0, "run_dir": "runs/night", "dashboard": ""}\n'
    '{"v": 2, "t": 2.0, "s": 1.0, "kind": "evaluated", "round": 0, "accuracy": 0.25, "loss": 1.5, "seconds": 0.1}\n'
)


def recorded(tmp_path: Path, name: str, records: str = RECORDS) -> Path:
    run_dir = tmp_path / "runs" / name
    run_dir.mkdir(parents=True)
    (run_dir / "events.jsonl").write_text(records)
    return run_dir


def test_status_reads_a_run_without_importing_torch(tmp_path: Path) -> None:
    (recorded(tmp_path, "night") / "wal").touch()
    printed, imported = imported_of({"torch", "distributed", "boto3"}, "status", "night", cwd=tmp_path)
    assert "interrupted" in printed
    assert imported == "[]"


def test_a_report_is_a_file_in_the_run_s_directory_and_a_few_lines(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, "night", RECORDS + '{"v": 2, "t": 2.0, "s": 2.0, "kind": "round_com')
    result = run("report", "night", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "night: interrupted"
    assert "  accuracy 0.2500, loss 1.5000 after 0 rounds" in lines
    assert lines[-1] == "  runs/night/report.html"
    assert 'data-key="accuracy">0.2500' in (run_dir / "report.html").read_text()


def test_reports_of_several_runs_are_one_comparison(tmp_path: Path) -> None:
    for name in ("night", "day"):
        recorded(tmp_path, name)
    result = run("report", "night", "runs/day", "--to", "both.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "<h1>night against day</h1>" in (tmp_path / "both.html").read_text()


def test_runs_are_compared_by_what_they_came_to_and_where_their_settings_differ(tmp_path: Path) -> None:
    for name, rate in (("night", 0.1), ("day", 0.3)):
        job = f'"job": {{"name": "{name}", "training": {{"subnets": 2, "lr": {rate}}}}}, "kind"'
        recorded(tmp_path, name, RECORDS.replace('"kind"', job, 1))
    result = run("compare", "night", "day", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = {line.rsplit(None, 2)[0].strip(): line.split()[-2:] for line in result.stdout.splitlines() if line.strip()}
    assert rows["accuracy"] == ["0.2500", "0.2500"]
    assert rows["training.lr"] == ["0.1", "0.3"]
    assert not {"name", "training.subnets"} & rows.keys()
    assert error_lines(run("compare", "night", cwd=tmp_path), 2) == [
        "idletrain: name two runs or more; `idletrain runs` lists them"
    ]


def test_a_report_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    assert error_lines(run("report", "night", cwd=tmp_path), 1) == [
        "idletrain: there is no run night in runs; there is none at all; of one in a cloud, add --cloud"
    ]
    recorded(tmp_path, "day")
    recorded(tmp_path, "newer", RECORDS.replace('"v": 2', '"v": 7'))
    (tmp_path / "runs" / "empty").mkdir()
    assert error_lines(run("report", "night", cwd=tmp_path), 1) == [
        "idletrain: there is no run night in runs; there are: day, newer; of one in a cloud, add --cloud"
    ]
    recorded(tmp_path, "begun", RECORDS[:20])
    for name in ("empty", "begun"):  # without its records, and with half of the first
        assert error_lines(run("report", name, cwd=tmp_path), 1) == [
            f"idletrain: run {name} has no records in runs/{name}/events.jsonl yet; look again once it trains"
        ]
    assert error_lines(run("report", "newer", cwd=tmp_path), 1) == [
        "idletrain: these records are of schema 7 and this idletrain reads 2; use a newer version"
    ]
    assert run("report", "day", "--to", "none/report.html", cwd=tmp_path).stderr == (
        "idletrain: none/report.html cannot be written (No such file or directory); name another with --to\n"
    )


def test_who_cannot_be_informed_of_a_run_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    lines = error_lines(run("launch", "job.yaml", "--webhook", "s3cret", "--log-to", "excel", cwd=tmp_path), 2)
    assert lines == [
        "idletrain: --webhook: should be a URL such as https://hooks.example.com/...",
        "idletrain: --log-to: there is no excel; choose from mlflow, wandb",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ""), ({"NO_PROXY": "a.example"}, "a.example,"), ({"no_proxy": "b", "NO_PROXY": "a"}, "b,")],
)
def test_this_machine_is_never_reached_by_a_proxy(given: dict[str, str], expected: str) -> None:
    environment = dict(given)
    cli.bypass_proxies(environment)
    both = {environment["no_proxy"], environment["NO_PROXY"]}
    assert both == {expected + "localhost,127.0.0.1,::1,169.254.169.254"}


def test_who_uses_no_proxy_at_all_keeps_that() -> None:
    environment = {"NO_PROXY": "*"}
    cli.bypass_proxies(environment)
    assert environment == {"NO_PROXY": "*"}


def test_a_folder_of_its_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """Such as a clone, for a script beside it."""
    (tmp_path / "idletrain").mkdir()
    command = [sys.executable, "-c", "import idletrain; idletrain.fit"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
