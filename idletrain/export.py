"""A run's network as something to take away, from its run directory alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from idletrain.errors import RunError
from idletrain.job import Job
from idletrain.nn.evaluate import assembled, estimate_statistics, score
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.rounds.recovery import load_network, read_history


@dataclass(frozen=True)
class LoadedRun:
    """The network after a run's last committed round."""

    prepared: Prepared
    network: Network
    rounds: int

    def module(self) -> nn.Module:
        """The assembled network in evaluation mode, its BatchNorm statistics estimated on the training data."""
        return finished_module(self.prepared, self.network)

    def score(self) -> tuple[float | None, float]:
        """Accuracy and loss on the test data.

        Raises:
            RunError: the job has none.
        """
        if self.prepared.test is None:
            raise RunError("the job names no test data; add data.test")
        return score(self.module(), self.prepared.test.open(), self.prepared.program.loss)


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run, also while it is going on.

    Raises:
        RunError: there is no such run.
    """
    read_history(run_dir)
    pickled = run_dir / "program.pkl"
    if pickled.exists():
        prepared = cloudpickle.loads(pickled.read_bytes())
    else:
        job = Job.model_validate_json((run_dir / "job.json").read_text())
        prepared = from_settings(job.model, job.data, job.training)
    return LoadedRun(prepared, *load_network(run_dir, prepared.program))


def finished_module(prepared: Prepared, network: Network) -> nn.Module:
    """The user's module with the trained values, ready to use."""
    module = assembled(prepared.module, network.values)
    estimate_statistics(module, prepared.program.source.open(), prepared.program.training.seed)
    return module


def save(module: nn.Module, to: Path) -> None:
    """Write a state_dict: `.pt` for `torch.load(weights_only=True)`, else safetensors.

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
