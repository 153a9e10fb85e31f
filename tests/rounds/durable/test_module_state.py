"""A snapshot's state_dict is read without the module's code, or what is wrong with it is a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from idletrain.errors import DamageError, RunError
from idletrain.nn.evaluate import assembled
from idletrain.nn.ist.groups import whole
from idletrain.nn.network import Network
from idletrain.rounds.durable import module_state, snapshots


class Tied(nn.Module):
    """Parameters with two names, statistics, a counter and a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


@pytest.fixture
def module(tmp_path: Path) -> nn.Module:
    """A module whose snapshot after round 3 has two slots, the second of them momenta."""
    tied = Tied()
    tied.norm.running_mean.fill_(0.5)
    tied.norm.num_batches_tracked.fill_(7)
    network = Network(whole(tied), 2)
    network.flat.normal_()
    tied = assembled(tied, network.values)
    snapshots.write(tmp_path, 3, network, lambda _: None)
    module_state.write(tmp_path, 3, tied)
    return tied


def test_it_is_the_module_s_own_state_dict(tmp_path: Path, module: nn.Module) -> None:
    expected = module.state_dict()
    state, round_ = module_state.newest(tmp_path)
    assert round_ == 3
    assert {name: value.tolist() for name, value in state.items()} == {n: v.tolist() for n, v in expected.items()}
    assert {name: value.dtype for name, value in state.items()} == {n: v.dtype for n, v in expected.items()}


def test_parameters_are_not_stored_twice(tmp_path: Path, module: nn.Module) -> None:
    stored = safetensors.torch.load_file(tmp_path / "snapshots/00000003" / module_state.STATE_FILE)
    assert set(stored) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def rewritten(places: object) -> Callable[[Path], None]:
    """A state file that names these places."""

    def write(folder: Path) -> None:
        content = safetensors.torch.save({}, metadata={"parameters": json.dumps(places)})
        (folder / module_state.STATE_FILE).write_bytes(content)

    return write


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "network").write_bytes(b"\0" * 400), "does not hold what was written"),
        (lambda folder: (folder / "network").write_bytes(b""), "cannot be read"),
        (lambda folder: (folder / "network").unlink(), "network: is missing"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "cannot be read"),
        (lambda folder: (folder / module_state.STATE_FILE).unlink(), "state.safetensors: is missing"),
        (lambda folder: (folder / module_state.STATE_FILE).write_bytes(b"\x80\x04."), "cannot be read"),
        (rewritten({"w": [10**9, [2]]}), "cannot be read"),
        (rewritten({"w": [-3, [2]]}), "cannot be read"),
        (rewritten({"w": [0, [-2, -2]]}), "cannot be read"),
        (rewritten({"w": [0, ["x"]]}), "cannot be read"),
        (rewritten({"w": 1}), "cannot be read"),
        (rewritten(["w"]), "cannot be read"),
    ],
)
def test_what_is_damaged_is_a_sentence(
    harm: Callable[[Path], None], message: str, tmp_path: Path, module: nn.Module
) -> None:
    harm(tmp_path / "snapshots/00000003")
    with pytest.raises(DamageError, match=message):
        module_state.read(tmp_path, 3)
    with pytest.raises(RunError, match=f"{message}.*export to a .pt file"):
        module_state.newest(tmp_path)


def test_the_snapshot_before_a_damaged_one_is_read(tmp_path: Path, module: nn.Module) -> None:
    network = Network(whole(Tied()), 2)
    snapshots.write(tmp_path, 5, network, lambda _: None)
    assert module_state.newest(tmp_path)[1] == 3
    module_state.write(tmp_path, 5, assembled(module, network.values))
    state, round_ = module_state.newest(tmp_path)
    assert (round_, float(state["first.weight"].abs().sum())) == (5, 0.0)


def test_a_run_without_a_snapshot_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no snapshot"):
        module_state.newest(tmp_path)
