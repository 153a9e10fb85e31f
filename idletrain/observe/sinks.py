"""Report a run elsewhere: TensorBoard, MLflow, W&B, the user's command or function after a round, a webhook.

Each sink runs in a thread of its own: a slow or failing one costs the run nothing but a line in the log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import queue
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from idletrain.errors import JobError, placed
from idletrain.observe.provenance import url_parts
from idletrain.observe.records import Record, Sink
from idletrain.observe.summary import Summary

logger = logging.getLogger(__name__)
TRACKERS = ("mlflow", "wandb")
CLOSE_SECONDS = 20.0  # for metrics that are still queued at the run's end
WEBHOOK_SECONDS = 10.0
Callback = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Further receivers of a run's reports.

    Attributes:
        on_round: A shell command, which gets a JSON object on its input, or a function, which gets it as its argument.
        webhook: URL to POST a JSON object to at the run's end; its path is treated as a secret.
        log_to: Names of `TRACKERS`.
    """

    on_round: str | Callback | None = None
    webhook: str | None = None
    log_to: Sequence[str] = ()

    def faults(self) -> list[str]:
        """Return a sentence for each invalid setting."""
        faults = []
        if self.webhook:
            parts = url_parts(self.webhook)
            if parts.scheme not in ("https", "http") or not parts.hostname:
                faults.append("--webhook: should be a URL such as https://hooks.example.com/...")
        for name in self.log_to:
            if name not in TRACKERS:
                faults.append(f"--log-to: there is no {name}; choose from {', '.join(TRACKERS)}")
            elif importlib.util.find_spec(name) is None:
                faults.append(f"--log-to: {name} is not installed here; pip install {name}")
        return faults


class Metric(NamedTuple):
    """Numbers to report of an `evaluated`, `round` or `end` event, after `step` rounds, at `t` in Unix seconds."""

    kind: Literal["evaluated", "round", "end"]
    step: int
    t: float
    values: dict[str, float]
    record: dict[str, Any]


Listener = Callable[[Metric], None]


def metrics_of(summary: Summary, event: Record) -> Metric | None:
    """Return the metric of an event that the summary holds already; None if it has none."""
    record = summary.as_record()
    match event["kind"]:
        case "evaluated":
            names = ("accuracy", "loss", "calibration_error", "temperature")
            values = {**event, **event.get("metrics", {})}
            known = {name: values[name] for name in (*names, *event.get("metrics", ())) if values.get(name) is not None}
            return Metric("evaluated", event["round"], event["t"], known, record)
        case "round_committed":
            values = {
                "goodput": summary.goodput,
                "train_loss": summary.train_loss,
                "round_seconds": event["seconds"],
                "steps_per_second": summary.steps_per_second,
                "samples_per_second": summary.samples_per_second,
                "epochs": summary.epochs,
                "lr": summary.lr,
                "bytes_per_second": summary.bytes_per_second,
                "workers": sum(worker.left is None for worker in summary.workers.values()),
                "preemptions": summary.notices + summary.kills,
                "lost_steps": summary.lost_steps,
            }
            known = {name: float(value) for name, value in values.items() if value is not None}
            return Metric("round", event["round"] + 1, event["t"], known, summary.round_record(event))
        case "run_ended":
            return Metric("end", event["rounds"], event["t"], {}, record)
    return None


@contextlib.contextmanager
def watching(watch: WatchSettings, summary: Summary, run_dir: Path | None) -> Iterator[Sink]:
    """Yield a sink that reports events everywhere; at the run's end or failure, wait for what is still queued.

    Args:
        watch: Where to report.
        summary: The run's summary; must get an event before the sink does.
        run_dir: The run directory, where TensorBoard's file goes; None where there is none.

    Raises:
        JobError: A tracker cannot be reached.
    """
    background_sinks = [_BackgroundSink(name, listener) for name, listener in _listeners(watch, summary, run_dir)]
    ended = False

    def report(event: Record) -> None:
        nonlocal ended
        ended |= event["kind"] == "run_ended"
        if event["kind"] in ("evaluated", "round_committed", "run_ended") and (metric := metrics_of(summary, event)):
            for sink in background_sinks:
                sink.put(metric)

    try:
        yield report
    except BaseException as error:
        record = {**summary.as_record(), "status": "failed", "reason": str(error) or type(error).__name__}
        for sink in () if ended else background_sinks:
            sink.put(Metric("end", summary.rounds, summary.updated, {}, record))
        raise
    finally:
        for sink in background_sinks:
            sink.close()


def _listeners(watch: WatchSettings, summary: Summary, run_dir: Path | None) -> Iterator[tuple[str, Listener]]:
    if run_dir:
        yield "TensorBoard", TensorBoard(run_dir / "tensorboard")
    trackers: dict[str, Callable[[Summary], Listener]] = {"mlflow": Mlflow, "wandb": Wandb}
    for name in watch.log_to:
        yield name, trackers[name](summary)
    if watch.on_round:
        callback = watch.on_round if callable(watch.on_round) else Command(watch.on_round)
        yield "--on-round" if isinstance(watch.on_round, str) else "on_round", lambda metric: callback(metric.record)
    if watch.webhook:
        yield "--webhook", Webhook(watch.webhook)


class _BackgroundSink:
    """Call a listener from a thread of its own."""

    def __init__(self, name: str, listener: Listener) -> None:
        self._name, self._listener = name, listener
        self._queue: queue.SimpleQueue[Metric | None] = queue.SimpleQueue()
        self._newest: Metric | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, metric: Metric) -> None:
        if metric.kind == "round":
            self._newest = metric
        self._queue.put(metric)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %d s of the run's end", self._name, CLOSE_SECONDS)

    def _run(self) -> None:
        while (metric := self._queue.get()) is not None:
            if self._name in ("--on-round", "on_round") and metric is not self._newest:
                continue  # a command slower than a round gets only the newest one
            try:
                self._listener(metric)
            except Exception as error:  # noqa: BLE001 (the run goes on after any error)
                if not self._failed:
                    logger.warning("%s: %s; the run goes on", self._name, _error_text(error))
                self._failed = True


def _error_text(error: Exception) -> str:
    """Describe an error without secrets: the message of a URL error can contain the URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError | ValueError | OSError):
        reason = getattr(error, "reason", None)
        return f"failed ({reason if isinstance(reason, OSError) else type(error).__name__})"
    return placed(error)


class Command:
    """Run a shell command with a round's record on its input."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Run the command and wait for its end."""
        line = (json.dumps(record) + "\n").encode()
        done = subprocess.run(["/bin/sh", "-c", self._command], input=line, check=False)
        if done.returncode:
            raise RuntimeError(f"the command ended with exit code {done.returncode}")


class Webhook:
    """POST a run's summary at its end, with a sentence in `text`, which Slack and Mattermost show."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, metric: Metric) -> None:
        """Send the summary at the run's end."""
        if metric.kind != "end":
            return
        record = metric.record
        score = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.4f}"
        text = f"idletrain {record['run']}: {record['status']} after {record['rounds']} rounds{score}"
        body = json.dumps({"text": text, **record}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "idletrain"}
        request = urllib.request.Request(self._url, body, headers, method="POST")  # noqa: S310 (checked in WatchSettings)
        with urllib.request.urlopen(request, timeout=WEBHOOK_SECONDS):  # noqa: S310
            pass


class TensorBoard:
    """Write a TensorBoard event file in the run directory, a new one for each head session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def __call__(self, metric: Metric) -> None:
        """Write the metric's values; the file is created with the first."""
        from tensorboardX.event_file_writer import EventsWriter  # without a thread of its own, as this is one already
        from tensorboardX.proto.event_pb2 import Event as Point
        from tensorboardX.proto.summary_pb2 import Summary as Scalars
        from tensorboardX.summary import scalar

        if self._writer is None and metric.values:
            self._folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
        if self._writer is None:
            return
        scalars = Scalars(value=[part for name, value in metric.values.items() for part in scalar(name, value).value])
        self._writer.write_event(Point(wall_time=metric.t, step=metric.step, summary=scalars))
        self._writer.flush()
        if metric.kind == "end":
            self._writer.close()
            self._writer = None


class Mlflow:
    """Log to a run of the experiment `idletrain` at the tracking server that MLflow's own settings name.

    Raises:
        JobError: The server cannot be used.
    """

    def __init__(self, summary: Summary) -> None:
        import mlflow

        self._summary, self._run_id = summary, ""
        try:
            self._client = mlflow.MlflowClient()  # refuses some addresses itself: MLflow 3 those of a folder
            known = self._client.get_experiment_by_name("idletrain")
            self._experiment = known.experiment_id if known else self._client.create_experiment("idletrain")
        except (mlflow.MlflowException, OSError) as error:
            raise JobError(f"--log-to: mlflow cannot be used ({error}); set MLFLOW_TRACKING_URI") from None

    def __call__(self, metric: Metric) -> None:
        """Log the metric's values; the run is created with the first."""
        if not self._run_id:
            self._run_id = self._client.create_run(self._experiment, run_name=self._summary.run).info.run_id
            for name, value in logged_settings(self._summary).items():
                self._client.log_param(self._run_id, name, value)
        for name, value in metric.values.items():
            self._client.log_metric(self._run_id, name, value, round(metric.t * 1000), metric.step)
        if metric.kind == "end":
            failed = metric.record["status"] in ("failed", "diverged")
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


class Wandb:
    """Log to a run of the project `idletrain`, as W&B's own settings (WANDB_MODE, WANDB_PROJECT, ...) say."""

    def __init__(self, summary: Summary) -> None:
        import wandb

        self._summary, self._wandb = summary, wandb
        self._run: Any = None

    def __call__(self, metric: Metric) -> None:
        """Log the metric's values; the run is created with the first."""
        if self._run is None:
            settings = self._wandb.Settings(silent=True)
            self._run = self._wandb.init(
                project="idletrain", name=self._summary.run, config=logged_settings(self._summary), settings=settings
            )
        if metric.values:
            self._run.log({**metric.values, "round": metric.step})
        if metric.kind == "end":
            self._run.finish(exit_code=int(metric.record["status"] in ("failed", "diverged")))


def logged_settings(summary: Summary) -> dict[str, Any]:
    """Return a job's training settings as a flat dict, for trackers' tables."""
    training = dict(summary.settings.get("job", {}).get("training", {}))
    optimizer = training.pop("optimizer", {})
    return {**training, **{f"optimizer.{key}": value for key, value in optimizer.items()}, "policy": summary.policy}
