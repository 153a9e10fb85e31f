"""Load, score and save a run's network, from its run directory alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from idletrain.errors import DamageError, JobError, RunError
from idletrain.job import Job
from idletrain.nn import constant
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.data.remote import SCHEME
from idletrain.nn.data.run_files import read_pickled
from idletrain.nn.evaluate import Score, assembled, score
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, prepare_job
from idletrain.nn.program import Program
from idletrain.nn.statistics import set_buffers
from idletrain.nn.user_metrics import Tally
from idletrain.observe.records import read_records
from idletrain.own_code import changed_imports
from idletrain.rounds.durable import module_state
from idletrain.rounds.durable.history import read_history
from idletrain.rounds.durable.recovery import load_result, read_job


@dataclass(frozen=True)
class LoadedRun:
    """The network that a run gives: the best one if the job says what tells it (`stop`), else the last one.

    Attributes:
        rounds: The rounds after which it was so.
        note: Which later rounds are lost by damage, and which of the user's own code has changed; empty if none.
    """

    prepared: Prepared
    network: Network
    rounds: int
    propensity: tuple[float, float]
    note: str = ""

    def module(self) -> nn.Module:
        """Return the network in evaluation mode, its running statistics estimated on the training data."""
        return finished_module(self.prepared, self.network)

    @functools.cached_property
    def _module(self) -> nn.Module:
        """The module that all scores share: assembling a very wide network copies gigabytes."""
        return self.module()

    def score(self) -> Score:
        """Score the network on the test data; with squared errors also by R2 and the mean absolute error.

        Raises:
            RunError: the job has none.
        """
        if self.prepared.test is None:
            raise RunError("the run has no test data; export its network and measure that, or train with data.test")
        loss = self.prepared.program.loss
        own = self.prepared.metrics
        ours = {name for name in ("MAE", "R2") if not any(one.name.upper().startswith(name) for one in own)}
        metrics = (*own, *([constant.MAE] if loss in constant.SQUARED and "MAE" in ours else []))
        found = score(self._module, self.prepared.test.open(), loss, [Tally(metric) for metric in metrics])
        if loss not in constant.SQUARED or not found.constant_loss or "R2" not in ours:
            return found
        return replace(found, metrics={**found.metrics, "R2": 1.0 - found.loss / found.constant_loss})

    def ranking(self) -> dict[str, float]:
        """Return P@k, nDCG@k and PSP@k for k = 1, 3, 5 on the test data; empty if its labels are not sets."""
        tests, train = self._sparse()
        if tests is None or train is None:
            return {}
        from idletrain.nn.wide.models import rank_labels  # and with it Numba

        metrics = rank_labels(self._module, tests, train, *self.propensity)
        kinds = {"P": metrics.precision, "nDCG": metrics.ndcg, "PSP": metrics.propensity_precision}
        return {f"{kind}@{k}": float(values[k - 1]) for kind, values in kinds.items() for k in (1, 3, 5)}

    def retrieval(self) -> dict[str, float]:
        """Score sparse inference, which retrieves labels through the sampler's tables, on the test data.

        Return `recall`, the share of the five best labels that it finds, and its `sparse P@1`; empty if there are no
        tables.
        """
        tests, _ = self._sparse()
        if tests is None:
            return {}
        from idletrain.nn.wide import label_shards, models  # and with them Numba

        output = label_shards.wide_output(self._module)
        if output is None or not output[1].retrieves:
            return {}
        output[1].rebuild(self.prepared.program.training.seed)
        recall, precision = models.recall(self._module, tests)
        return {"recall": recall, "sparse P@1": precision}

    def _sparse(self) -> tuple[SparseSamples, SparseSamples] | tuple[None, None]:
        """Return test and training data if both are sparse rows for a very wide output, else two Nones."""
        if self.prepared.test is None or self.prepared.program.output is None:
            return None, None
        tests, train = self.prepared.test.open(), self.prepared.program.source.open()
        if not isinstance(tests, SparseSamples) or not isinstance(train, SparseSamples):
            return None, None
        return tests, train


def require_run(run_dir: Path) -> None:
    """Check that a directory holds a run, without executing anything of it.

    Raises:
        RunError: it holds none.
    """
    read_history(run_dir)


def saved_state(run_dir: Path, *, last: bool = False) -> tuple[dict[str, Tensor], int]:
    """Return the state_dict of a run's snapshot, and its round; nothing of the run is imported or unpickled.

    Args:
        run_dir: The run's directory, such as `runs/digits`.
        last: Take the newest snapshot, also if the run kept the best network's.

    Raises:
        RunError: there is no such run, or it has no sound snapshot.
        DamageError: the best network's snapshot does not hold what was written.
    """
    past = read_history(run_dir)
    best = None if last else past.best_round(_watched(run_dir))
    return module_state.newest(run_dir) if best is None else (module_state.read(run_dir, best), best)


def later_rounds(run_dir: Path, rounds: int, *, last: bool = False) -> str:
    """Say if a run went on after a saved round, as a sentence; "" if not, or if that round was its best."""
    past = read_history(run_dir)
    if past.rounds <= rounds or (not last and past.best_round(_watched(run_dir)) == rounds):
        return ""
    return (
        f"round {rounds} is that of the newest snapshot, and the run went on to round {past.rounds}; export that one "
        "to .pt, which executes the run's code"
    )


def _watched(run_dir: Path) -> str | None:
    """Return what tells the best network of a run; None if nothing does, or if its job cannot be read any more."""
    try:
        return read_job(run_dir).stop.watched
    except DamageError:
        return None


def load_run(run_dir: str | Path, *, last: bool = False) -> LoadedRun:
    """Read a run, even while it is under way.

    Args:
        run_dir: The run's directory, such as `runs/digits`.
        last: Take the network after the last committed round, also if the run kept the best one.

    This executes what the run's `job.json` and `program.pkl` say: do it with runs of people whose code you would run,
    and with `saved_state` otherwise.

    Raises:
        RunError: there is no such run.
    """
    run_dir = Path(run_dir)
    require_run(run_dir)
    job, prepared = read_prepared(run_dir)
    restored = load_result(run_dir, prepared.program, None if last else job.stop.watched)
    note = "; ".join(filter(None, (restored.note, _changed_code(run_dir, prepared.program))))
    return LoadedRun(prepared, restored.network, restored.rounds, job.data.propensity, note)


def _changed_code(run_dir: Path, program: Program) -> str:
    """Say if the user's own code is not what the run was trained by, as a sentence; "" if it is."""
    code: Mapping[str, str] = {}
    with contextlib.suppress(OSError, RunError):  # a run is read without its records, too
        for event in read_records(run_dir / "events.jsonl"):
            if event["kind"] == "run_started" and isinstance(event.get("code"), dict):
                code = event["code"]  # of a resumed run, what trained the last rounds
    changed = ", ".join(changed_imports(code, program.module, (program.loss, program.schedule)))
    return f"the code of {changed} has changed since the run; its network computes what is new" if changed else ""


def read_prepared(run_dir: Path) -> tuple[Job, Prepared]:
    """Return a run's job, and its network and data as they were before training; this executes the run's code.

    Raises:
        RunError: its record cannot be read.
        JobError: its model or its data are not here any more.
    """
    job, pickled = read_job(run_dir), run_dir / "program.pkl"
    if pickled.exists():
        prepared: Prepared = read_pickled(pickled.read_bytes(), run_dir)
        return job, prepared
    absent = [file for file in job.data.paths if not file.startswith(SCHEME) and not Path(file).exists()]
    if relative := [file for file in absent if not Path(file).is_absolute()]:
        raise JobError(
            f"data: this folder has no {', '.join(dict.fromkeys(relative))}, and a run's relative paths begin in the "
            "one that it was launched in; run the command there"
        )
    return job, prepare_job(job)


def finished_module(prepared: Prepared, network: Network) -> nn.Module:
    """Return the user's module with the trained values, its buffers too, ready to use."""
    module = assembled(prepared.module, network.averaged)
    set_buffers(module, prepared.module, prepared.program, network.averaged)
    return module


def save(state_dict: Mapping[str, Tensor], to: Path) -> None:
    """Write a state_dict: for `torch.load(weights_only=True)` if `to` ends in `.pt`, else as safetensors.

    Raises:
        RunError: the file cannot be written.
    """
    state = {name: value.detach().clone() for name, value in state_dict.items()}
    try:
        if to.suffix == ".pt":
            torch.save(state, to)
        else:
            save_file({name: value.contiguous() for name, value in state.items()}, to)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RunError(f"{to} cannot be written: {error}") from None


def save_pretrained(module: nn.Module, to: Path) -> None:
    """Write a transformers model to a directory that its `from_pretrained` reads: `config.json` and safetensors.

    Raises:
        RunError: the module has no such method, or the directory cannot be written.
    """
    write = getattr(module, "save_pretrained", None)
    if write is None:
        raise RunError(
            f"a {type(module).__name__} has no save_pretrained, as models of transformers have; "
            "name a .safetensors or .pt file"
        )
    if to.exists() and not to.is_dir():
        raise RunError(f"{to} is a file and no directory; name another")
    try:
        to.mkdir(parents=True, exist_ok=True)
        write(to)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RunError(f"{to} cannot be written: {error}") from None
