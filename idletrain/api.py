"""Training from Python: an `nn.Module` and data go in, the trained `nn.Module` comes out."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from rich.console import Console
from torch import nn

from idletrain.errors import JobError, RunError, user_code
from idletrain.export import finished_module
from idletrain.job import Job, parse_job
from idletrain.nn.data.arrays import ArraySource, FileSource, MapStyleSource, Samples, as_samples
from idletrain.nn.ist.groups import to_meta
from idletrain.nn.prepare import Prepared, prepare
from idletrain.nn.program import Loss
from idletrain.observe.display import choose_display
from idletrain.observe.records import Record, Recorder, Sink
from idletrain.observe.sinks import WatchSettings
from idletrain.observe.summary import Summary
from idletrain.providers.local import LocalProcesses
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.scheduler import ExistingScheduler
from idletrain.rounds.coordinator import RunOutcome
from idletrain.rounds.durable.recovery import load_network
from idletrain.run import Composition, RunOptions, compose
from idletrain.storage import write_whole


@dataclass(frozen=True)
class FitResult:
    """The result of a training.

    Attributes:
        module: The trained module, in evaluation mode, its BatchNorm statistics estimated.
        records: Every event of the run, in order (their fields are documented in `idletrain.observe.records`).
        summary: Totals of the events: accuracy, goodput, preemptions, `params_sha256`, ...
        run_dir: The directory that holds the run's durable state.
    """

    module: nn.Module
    records: tuple[Record, ...]
    summary: Mapping[str, Any]
    run_dir: Path


def fit(  # noqa: PLR0913 (one argument a choice that most calls make; the rest are sections)
    module: nn.Module,
    train: Any,
    test: Any = None,
    *,
    loss: str | Loss = "cross_entropy",
    method: str = "ist",
    subnets: int = 4,
    local_steps: int = 50,
    rounds: int = 120,
    batch_size: int = 128,
    optimizer: Mapping[str, Any] | None = None,
    seed: int = 0,
    evaluate_every: int = 10,
    workers: int = 4,
    name: str | None = None,
    run_dir: str | Path = "runs",
    resume: bool = False,
    scheduler: str | None = None,
    on_event: Callable[[Record], None] | None = None,
    on_round: Callable[[Mapping[str, Any]], None] | None = None,
    log_to: Sequence[str] = (),
    **sections: Mapping[str, Any],
) -> FitResult:
    """Train a module by independent subnets (or local SGD) on workers that may come and go.

    Args:
        module: Any module with float32 parameters; its class may stand in a script or notebook. Left unchanged.
        train: A pair (inputs `[N, ...]`, labels `[N, ...]`) of arrays or tensors, or a map-style torch Dataset.
        test: The same, for evaluation, or None.
        loss: `cross_entropy`, `bce_with_logits`, `mse`, `package.module:function`, or a function
            `(outputs, labels) -> scalar`.
        method: `ist` or `local-sgd`.
        subnets: Independent subnets in a round.
        local_steps: Steps of each between two exchanges.
        rounds: Rounds to train.
        batch_size: Samples a step and subnet.
        optimizer: As in a job file, such as `{"name": "adamw", "lr": 1e-3}`; SGD with lr 0.1 if None.
        seed: Seed of every random number.
        evaluate_every: Rounds between two evaluations on `test`.
        workers: Worker processes to start here, or to wait for with `scheduler`.
        name: The run's name; derived from the time if None.
        run_dir: Directory of runs.
        resume: Continue the run of that name.
        scheduler: Address of a Dask cluster whose workers train.
        on_event: Called with every event as it happens; the run waits for it.
        on_round: Called with a summary after a committed round, from a thread of its own; a slow one misses rounds.
        log_to: `mlflow` and/or `wandb`, for the curves.
        sections: Further sections of a job file: `stop`, `nodes`, `memory`, `preemption`, `checkpoint`, `model`,
            and of `training` what has no argument here (`exchange`).

    Raises:
        JobError: module, data and settings do not fit together; nothing was started.
        RunError: the run cannot continue now; try again with `resume`.
        KeyboardInterrupt: it was stopped, by Ctrl-C or SIGTERM; the text says how to go on.
    """
    job = parse_job(
        {
            "name": name or f"fit-{time.time_ns():x}",
            "data": {},
            **sections,
            "training": {
                "method": method,
                "subnets": subnets,
                "local_steps": local_steps,
                "rounds": rounds,
                "batch_size": batch_size,
                "seed": seed,
                "evaluate_every": evaluate_every,
                **({"loss": loss} if isinstance(loss, str) else {}),
                **({"optimizer": dict(optimizer)} if optimizer else {}),
                **sections.get("training", {}),
            },
            "model": {"factory": type(module).__qualname__, **sections.get("model", {})},
            "nodes": {"count": workers, **sections.get("nodes", {})},
            "checkpoint": {"to": str(run_dir), **sections.get("checkpoint", {})},
        }
    )
    watch, summary = WatchSettings(on_round=on_round, log_to=log_to), Summary()
    provider = ExistingScheduler(LaunchRequest(scheduler=scheduler)) if scheduler else LocalProcesses()
    source = _ArrayData(train, job.run_dir / "data" / "train")
    test_source = None if test is None else _ArrayData(test, job.run_dir / "data" / "test")

    def prepare_module(job: Job) -> Prepared:
        return prepare(
            module,
            source,
            test_source,
            loss,
            job.training,
            exclude=job.model.exclude,
            table=job.model.groups,
            fixed=job.model.fixed,
            memory=job.memory,
        )

    options = RunOptions(provider=provider, resume=resume, watch=watch, summary=summary)
    composition = compose(job, options, prepare=prepare_module)
    prepared = composition.prepared
    with user_code(
        "fit: cannot travel to workers (", "); keep open files, locks and sockets out of data, module and loss"
    ):
        cloudpickle.dumps((prepared.program, test_source))

    def write() -> None:
        for arrays in (source, test_source):
            if arrays:
                arrays.write()
        pickled = cloudpickle.dumps(replace(prepared, module=to_meta(module), network=()))
        write_whole(job.run_dir / "program.pkl", pickled)

    records: list[Record] = []
    display = choose_display(False, Console(), summary)
    sinks = (records.append, display, *([on_event] if on_event else []))
    with display:
        outcome = _run(composition, sinks, write)
    if outcome.status == "stopped":
        raise KeyboardInterrupt(f"stopped after round {outcome.rounds}; fit(name={job.name!r}, resume=True) goes on")
    if outcome.status == "diverged":
        raise RunError("the training diverges (NaN in three attempts); lower the optimizer's lr")
    network, _ = load_network(job.run_dir, prepared.program)
    return FitResult(finished_module(prepared, network), tuple(records), summary.as_record(), job.run_dir)


@dataclass(frozen=True)
class _ArrayData:
    """Data passed to `fit`, as a source: the arrays themselves in this process, memory-mapped files in all others.

    Attributes:
        data: A pair of arrays or a Dataset.
        folder: Where arrays are written once the run has started, named by their digest; workers map them.
    """

    data: Any
    folder: Path

    @cached_property
    def samples(self) -> Samples:
        return as_samples(self.data)

    def open(self) -> Samples:
        return self.samples

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle arrays as paths of their files; a Dataset as it is."""
        if not isinstance(self.samples, ArraySource):
            return MapStyleSource, (self.data,)
        return FileSource, (str(self.file("x")), str(self.file("y")), f"data.{self.folder.name}")

    def file(self, name: str) -> Path:
        """Return the file of the inputs, `x`, or of the labels, `y`."""
        return (self.folder / f"{name}-{self._digest}.npy").resolve()

    @cached_property
    def _digest(self) -> str:
        assert isinstance(self.samples, ArraySource)
        digest = hashlib.sha256()
        for array in (self.samples.x, self.samples.y):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def write(self) -> None:
        """Write arrays where workers map them, unless the run has them from before a resumption.

        Raises:
            JobError: the run began with other data.
        """
        if not isinstance(self.samples, ArraySource):
            return
        if self.folder.exists() and not self.file("y").exists() and list(self.folder.glob("y-*.npy")):
            raise JobError(
                f"{self.folder.name}: is not the data that the run in {self.folder.parents[1]} began with; "
                "give that or another name"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, array in (("x", self.samples.x), ("y", self.samples.y)):  # y last: then both are whole
            if not self.file(name).exists():
                partial = self.file(name).with_suffix(".partial")
                with partial.open("wb") as out:
                    np.save(out, array)
                partial.replace(self.file(name))


def _run(composition: Composition, sinks: Sequence[Sink], write: Callable[[], None]) -> RunOutcome:
    """Train to the end, also where an event loop runs already (a notebook): there Ctrl-C stops it too.

    Args:
        composition: The run.
        sinks: Called with every event.
        write: Called once the run directory is this run's.
    """
    stops: list[Callable[[], object]] = []

    def on_start(stop: Callable[[], None], _record: Recorder) -> None:
        write()
        stops.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop))

    training = composition.launch(sinks=sinks, on_start=on_start)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(training)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, training)
        while True:
            try:
                return running.result()
            except KeyboardInterrupt:
                if running.done():
                    raise
                for stop in stops:
                    stop()
