"""The process: one line of JSON, gone with its input or at a signal, and its machines with it, however it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from rehearsal import Sandbox, eventually

from idletrain.cloud.sandbox.__main__ import main


def busy(tmp_path: Path) -> tuple[Sandbox, list[int]]:
    """A cloud with a machine, and that machine's processes."""
    cloud = Sandbox(tmp_path)
    (id_,) = cloud.start("setsid sleep 300 & sleep 300")
    return cloud, eventually(lambda: len(pids := cloud.pids(id_)) == 3 and pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_machines_die_with_the_process(tmp_path: Path, number: signal.Signals) -> None:
    cloud, pids = busy(tmp_path)
    cloud.process.send_signal(number)
    assert cloud.process.wait(20) == (0 if number == signal.SIGTERM else -number)
    eventually(lambda: not any(map(psutil.pid_exists, pids)))
    cloud.close()


def test_it_is_up_in_seconds_and_ends_when_its_input_is_closed(tmp_path: Path) -> None:
    cloud, pids = busy(tmp_path)
    assert cloud.started_seconds < 20.0  # 1.5 s on two quiet cores
    cloud.close()
    assert cloud.process.returncode == 0
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--churn", "soon"], "should be a duration such as 15s"),
        (["--memory", "much"], "should be a size such as 512MiB"),
    ],
)
def test_a_word_that_makes_no_sense_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("text", "complaint"), [(None, "cannot be read"), ("one,two\n", "line 1 is 'one,two'")])
def test_a_trace_that_is_none_is_refused(
    tmp_path: Path, text: str | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    if text:
        trace.write_text(text)
    assert main(["--trace", str(trace)]) == 2
    assert complaint in capsys.readouterr().err
