"""Load, score and save a run's network, from its run directory alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from idletrain.errors import RunError
from idletrain.job import Job
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.evaluate import Score, assembled, estimate_statistics, score
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.rounds.durable.recovery import load_network, read_history


@dataclass(frozen=True)
class LoadedRun:
    """The network after a run's last committed round."""

    prepared: Prepared
    network: Network
    rounds: int
    propensity: tuple[float, float]

    def module(self) -> nn.Module:
        """Return the network in evaluation mode, its BatchNorm statistics estimated on the training data."""
        return finished_module(self.prepared, self.network)

    @functools.cached_property
    def _module(self) -> nn.Module:
        """The module that all scores share: assembling a very wide network copies gigabytes."""
        return self.module()

    def score(self) -> Score:
        """Score the network on the test data.

        Raises:
            RunError: the job has none.
        """
        if self.prepared.test is None:
            raise RunError("the job names no test data; add data.test")
        return score(self._module, self.prepared.test.open(), self.prepared.program.loss)

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


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run, even while it is under way.

    Raises:
        RunError: there is no such run.
    """
    read_history(run_dir)
    job = Job.model_validate_json((run_dir / "job.json").read_text())
    pickled = run_dir / "program.pkl"
    if pickled.exists():
        prepared = cloudpickle.loads(pickled.read_bytes())
    else:
        prepared = from_settings(job.model, job.data, job.training)
    return LoadedRun(prepared, *load_network(run_dir, prepared.program), job.data.propensity)


def finished_module(prepared: Prepared, network: Network) -> nn.Module:
    """Return the user's module with the trained values, ready to use."""
    module = assembled(prepared.module, network.values)
    estimate_statistics(module, prepared.program.source.open(), prepared.program.training.seed)
    return module


def save(module: nn.Module, to: Path) -> None:
    """Write a module's state_dict: for `torch.load(weights_only=True)` if `to` ends in `.pt`, else as safetensors.

    Raises:
        RunError: the file cannot be written.
    """
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    try:
        if to.suffix == ".pt":
            torch.save(state, to)
        else:
            save_file(state, to)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RunError(f"{to} cannot be written: {error}") from None
