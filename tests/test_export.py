"""A run's network as files that torch and safetensors load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from idletrain.errors import RunError
from idletrain.export import load_run, save


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["network.pt", "network.safetensors"])
def test_a_saved_network_loads_into_a_fresh_module(tmp_path: Path, name: str) -> None:
    trained, fresh = module(), module()
    trained[1].running_mean.fill_(0.5)
    save(trained, tmp_path / name)
    path = tmp_path / name
    fresh.load_state_dict(torch.load(path, weights_only=True) if name.endswith(".pt") else load_file(path))
    assert all(
        torch.equal(a, b) for a, b in zip(trained.state_dict().values(), fresh.state_dict().values(), strict=True)
    )
    assert fresh[1].running_mean.tolist() == [0.5] * 4


@pytest.mark.parametrize("name", ["network.pt", "network.safetensors"])
def test_tied_parameters_can_be_saved(tmp_path: Path, name: str) -> None:
    tied = nn.ModuleList([nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)])
    tied[1].weight = tied[0].weight
    save(tied, tmp_path / name)
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["network.pt", "network.safetensors"])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=f"none/{name} cannot be written"):
        save(module(), tmp_path / "none" / name)


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        load_run(tmp_path / "nothing")
