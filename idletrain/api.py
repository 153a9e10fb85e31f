"""Training from Python: an `nn.Module` and data go in, the trained `nn.Module` comes out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from rich.console import Console
from torch import nn

from idletrain.export import finished_module
from idletrain.job import Job, parse_job
from idletrain.launch import Options, check_run, launch
from idletrain.nn.data import Arrays, Files, MapStyle, Source, as_samples
from idletrain.nn.groups import to_meta
from idletrain.nn.prepare import Prepared, named_loss, prepare
from idletrain.nn.program import Loss
from idletrain.observe.display import choose
from idletrain.observe.records import Event
from idletrain.observe.summary import Summary
from idletrain.observe.watch import Watch
from idletrain.rounds.recovery import load_network


@dataclass(frozen=True)
class FitResult:
    """What a training gave.

    Attributes:
        module: The trained module, in evaluation mode, its BatchNorm statistics estimated.
        records: Every event of the run, in order (`idletrain.observe.records` tells what they hold).
        summary: Their sum: accuracy, goodput, preemptions, `params_sha256`, ...
        run_dir: Where the run's durable state is.
    """

    module: nn.Module
    records: tuple[Event, ...]
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
    on_event: Callable[[Event], None] | None = None,
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
        optimizer: As in a job file, for example `{"name": "adamw", "lr": 1e-3}`; SGD with lr 0.1 if None.
        seed: Decides every random number.
        evaluate_every: Rounds between two evaluations on `test`.
        workers: Worker processes to start here, or to wait for with `scheduler`.
        name: The run's name; made up from the time if None.
        run_dir: Directory of runs.
        resume: Go on with the run of that name.
        scheduler: Address of a Dask cluster whose workers train.
        on_event: Called with every event as it happens; the run waits for it.
        on_round: Called with a summary after a committed round, from a thread of its own; a slow one misses rounds.
        log_to: `mlflow` and/or `wandb`, for the curves.
        sections: Further sections of a job file: `stop`, `nodes`, `preemption`, `checkpoint`, `model`.

    Raises:
        JobError: module, data and settings do not fit together; nothing was started.
        RunError: the run cannot go on; with `resume` it can later.
    """
    job = parse_job(
        {
            "name": name or f"fit-{time.time_ns():x}",
            "data": {},
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
            },
            **sections,
            "model": {"factory": type(module).__qualname__, **sections.get("model", {})},
            "nodes": {"count": workers, **sections.get("nodes", {})},
            "checkpoint": {"to": str(run_dir), **sections.get("checkpoint", {})},
        }
    )
    watch, summary = Watch(on_round=on_round, log_to=log_to), Summary()
    options = Options(scheduler=scheduler, resume=resume, watch=watch, summary=summary)
    check_run(job, options)
    prepared = _prepare(job, module, train, test, named_loss(loss) if isinstance(loss, str) else loss)
    records: list[Event] = []
    display = choose(False, Console(), summary)
    sinks = (records.append, display, *([on_event] if on_event else []))
    with display:
        _run(launch(job, prepared, replace(options, sinks=sinks)))
    network, _ = load_network(job.run_dir, prepared.program)
    return FitResult(finished_module(prepared, network), tuple(records), summary.as_record(), job.run_dir)


def _prepare(job: Job, module: nn.Module, train: Any, test: Any, loss: Loss) -> Prepared:
    """Check everything, then put the data where workers can map it."""
    source, test_source = _in_memory(train), None if test is None else _in_memory(test)
    model = job.model
    prepared = prepare(module, source, test_source, loss, job.training, exclude=model.exclude, table=model.groups)
    data = job.run_dir / "data"
    prepared = replace(
        prepared,
        program=replace(prepared.program, source=_mapped(data / "train", source)),
        test=test_source and _mapped(data / "test", test_source),
    )
    job.run_dir.mkdir(parents=True, exist_ok=True)
    (job.run_dir / "program.pkl").write_bytes(cloudpickle.dumps(replace(prepared, module=to_meta(module), network=())))
    return prepared


@dataclass(frozen=True)
class _InMemory:
    """Samples of this process as a source, for the checks before anything is written."""

    samples: Arrays | MapStyle

    def open(self) -> Arrays | MapStyle:
        return self.samples


def _in_memory(data: Any) -> _InMemory:
    samples = as_samples(data)
    assert isinstance(samples, Arrays | MapStyle)
    return _InMemory(samples)


def _mapped(folder: Path, source: _InMemory) -> Source:
    """Arrays as files that every worker maps; a Dataset travels as it is."""
    samples = source.samples
    if isinstance(samples, MapStyle):
        return samples
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (("x", samples.x), ("y", samples.y)):
        np.save(folder / f"{name}.npy", array)
    return Files(str((folder / "x.npy").resolve()), str((folder / "y.npy").resolve()), field=folder.name)


def _run(work: Any) -> None:
    """Run a coroutine to its end, also where an event loop runs already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:  # noqa: BLE001 (raised again by the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
