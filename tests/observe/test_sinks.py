"""Who else hears of a run."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import logging
import os
import re
import sqlite3
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent
from test_status import stamped
from test_summary import CHURN

from idletrain.errors import JobError, RunError
from idletrain.observe import sinks
from idletrain.observe.display import folding
from idletrain.observe.sinks import WatchSettings, watching
from idletrain.observe.summary import Summary


def tell(watch: WatchSettings, run_dir: Path | None, events: list[dict[str, Any]] = CHURN) -> Summary:
    summary = Summary()
    with watching(watch, summary, run_dir) as sink:
        take = folding(summary, sink)
        for one in stamped(events):
            take(one)
    return summary


def scalars(folder: Path) -> list[tuple[str, int, float, float]]:
    """What an event file holds: lengths and payloads as TensorFlow's record files have them."""
    points = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = TensorBoardEvent.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            points += [(v.tag, event.step, event.wall_time, v.simple_value) for v in event.summary.value]
    return points


def test_tensorboard_finds_the_curves_in_the_run_directory(tmp_path: Path) -> None:
    tell(WatchSettings(), tmp_path)
    points = {(tag, step): (at, value) for tag, step, at, value in scalars(tmp_path / "tensorboard")}
    assert points["accuracy", 1] == (1008.5, pytest.approx(0.8))
    assert points["loss", 1] == (1008.5, pytest.approx(0.5))
    assert points["preemptions", 1] == (1008.0, 2.0)
    assert points["round_seconds", 1] == (1008.0, 2.0)
    assert {tag for tag, _ in points} >= {"goodput", "steps_per_second", "bytes_per_second", "workers", "lost_steps"}


def test_a_command_gets_every_round_on_its_input(tmp_path: Path) -> None:
    tell(WatchSettings(on_round=f"cat >> {tmp_path}/rounds"), None)
    (line,) = (tmp_path / "rounds").read_text().splitlines()
    assert json.loads(line)["rounds"] == 1


def test_a_function_gets_every_round_and_its_errors_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def received(record: Any) -> None:
        seen.append(record)
        raise ZeroDivisionError("an invented bug")

    more = [{**one, "round": 1} for one in CHURN if one["kind"] == "round_committed"]
    with caplog.at_level(logging.WARNING):
        tell(WatchSettings(on_round=received), None, [*CHURN[:-2], *more])
    assert seen
    assert seen[-1]["rounds"] == 2
    (told,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(r"on_round: received at \S+:\d+ raised ZeroDivisionError: an invented bug; the run .*", told)


def test_a_slow_function_hears_of_the_newest_round_only() -> None:
    seen: list[int] = []
    first, rest = threading.Event(), threading.Event()

    def received(record: Any) -> None:
        seen.append(record["rounds"])
        first.set()
        assert rest.wait(10)

    summary = Summary()
    rounds = [{**one, "round": n} for n in range(5) for one in CHURN if one["kind"] == "round_committed"]
    with watching(WatchSettings(on_round=received), summary, None) as sink:
        take = folding(summary, sink)
        for one in stamped([*CHURN[:-2], *rounds[:1]]):
            take(one)
        assert first.wait(10)
        for one in stamped(rounds[1:]):
            take(one)
        rest.set()
    assert seen[0] == 1
    assert 5 not in seen[:-1]
    assert len(seen) <= 3


def test_a_command_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tell(WatchSettings(on_round="exit 7"), None)
    assert "--on-round: the command ended with exit code 7; the run goes on" in caplog.text


@pytest.fixture
def hook() -> Iterator[tuple[str, list[Any], Callable[[int], None]]]:
    """A server on loopback: its URL, what it received, and what sets its answer."""
    received: list[Any] = []
    answer = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(answer[0])
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/s3cret", received, lambda code: answer.__setitem__(0, code)
        server.shutdown()
        thread.join()


def test_a_webhook_gets_the_summary_at_the_end(hook: Any) -> None:
    url, received, _ = hook
    summary = tell(WatchSettings(webhook=url), None)
    ((path, kind, body),) = received
    assert (path, kind) == ("/s3cret", "application/json")
    assert body.pop("text") == "idletrain demo: completed after 1 rounds, accuracy 0.8000"
    assert body.keys() == summary.as_record().keys()
    assert body["params_sha256"] == "ab"


def test_a_webhook_hears_also_of_a_run_that_fails(hook: Any) -> None:
    url, received, _ = hook
    summary = Summary()
    with pytest.raises(RunError), watching(WatchSettings(webhook=url), summary, None):
        raise RunError("the scheduler is gone")
    ((_, _, body),) = received
    assert (body["status"], body["reason"]) == ("failed", "the scheduler is gone")


@pytest.mark.parametrize("refused", [True, False])
def test_a_webhook_s_secret_is_in_no_log(hook: Any, refused: bool, caplog: pytest.LogCaptureFixture) -> None:
    url, _, answer = hook
    answer(500)
    tell(WatchSettings(webhook="http://127.0.0.1:1/s3cret" if refused else url), None)
    assert ("Connection refused" if refused else "the server answered 500") in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("url", ["hooks.example.com/x", "file:///etc/passwd", "https://", "ftp://a/b"])
def test_what_is_no_url_to_post_to_is_refused_without_repeating_it(url: str) -> None:
    assert WatchSettings(webhook=url).faults() == ["--webhook: should be a URL such as https://hooks.example.com/..."]


def test_trackers_that_are_unknown_or_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda _name: None)
    assert WatchSettings(log_to=["mlflow", "excel"]).faults() == [
        "--log-to: mlflow is not installed here; pip install mlflow",
        "--log-to: there is no excel; choose from mlflow, wandb",
    ]
    assert WatchSettings().faults() == []


class Client:
    """MLflow's client as its documentation has it."""

    calls: ClassVar[list[Any]] = []

    def get_experiment_by_name(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def create_experiment(self, name: str) -> str:
        self.calls.append(("new experiment", name))
        return "7"

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.calls.append(("run", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def log_param(self, run: str, name: str, value: Any) -> None:
        self.calls.append(("param", run, name, value))

    def log_metric(self, run: str, name: str, value: float, milliseconds: int, step: int) -> None:
        self.calls.append(("metric", run, name, value, milliseconds, step))

    def set_terminated(self, run: str, status: str) -> None:
        self.calls.append(("end", run, status))


def test_mlflow_gets_settings_curves_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client, MlflowException=OSError))
    monkeypatch.setattr(Client, "calls", [])
    started = {**CHURN[0], "job": {"training": {"rounds": 3, "optimizer": {"name": "sgd", "lr": 0.1}}}}
    tell(WatchSettings(log_to=["mlflow"]), None, [started, *CHURN[1:]])
    named = [("experiment", "idletrain"), ("new experiment", "idletrain"), ("run", "7", "demo")]
    assert Client.calls[:3] == named
    assert ("param", "r", "optimizer.lr", 0.1) in Client.calls
    assert ("param", "r", "policy", "reissue") in Client.calls
    assert ("metric", "r", "accuracy", 0.8, 1008500, 1) in Client.calls
    assert Client.calls[-1] == ("end", "r", "FINISHED")


def test_an_mlflow_that_refuses_its_address_is_reported_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError("no folders any more")

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=refused, MlflowException=OSError))
    with pytest.raises(JobError, match=r"mlflow cannot be used \(no folders any more\); set MLFLOW_TRACKING_URI"):
        tell(WatchSettings(log_to=["mlflow"]), None)


REAL = """
import sys
sys.path += sys.argv[1:]
from test_sinks import Watch, tell
tell(Watch(log_to=["{name}"]), None)
"""


def told_the_real(name: str, tmp_path: Path, **environment: str) -> None:
    """Tell a tracker's own client, in a process of its own: both bring threads, warnings and exit handlers."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", REAL.format(name=name), *sys.path],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the run goes on" not in done.stderr


def test_a_real_mlflow_has_the_curves(tmp_path: Path) -> None:
    told_the_real("mlflow", tmp_path, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        metrics = database.execute("select step, value from metrics where key = 'accuracy'").fetchall()
        runs = database.execute("select name, status from runs").fetchall()
    assert metrics == [(1, 0.8)]
    assert runs == [("demo", "FINISHED")]


def test_a_real_wandb_has_the_curves(tmp_path: Path) -> None:
    told_the_real("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    assert b"accuracy" in written
    assert b"demo" in written


def test_wandb_gets_settings_curves_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: ClassVar[list[Any]] = []

    class Run:
        def log(self, values: dict[str, float]) -> None:
            calls.append(values)

        def finish(self, exit_code: int) -> None:
            calls.append(exit_code)

    def init(**settings: Any) -> Run:
        calls.append((settings["project"], settings["name"], settings["config"]["policy"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=lambda **_: None))
    tell(WatchSettings(log_to=["wandb"]), None)
    assert calls[0] == ("idletrain", "demo", "reissue")
    assert {"accuracy": 0.8, "loss": 0.5, "calibration_error": 0.02, "temperature": 1.1, "round": 1} in calls
    assert calls[-1] == 0
