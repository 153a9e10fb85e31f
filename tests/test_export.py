"""A run's network as files that torch and safetensors load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Given
from safetensors.torch import load_file
from torch import nn
from torchmetrics.regression import MeanAbsoluteError, R2Score

from idletrain.errors import RunError
from idletrain.export import LoadedRun, load_run, save, save_pretrained
from idletrain.job import TrainingSettings
from idletrain.nn.network import Network
from idletrain.nn.prepare import named_loss, prepare
from idletrain.nn.user_metrics import checked_metrics


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["network.pt", "network.safetensors"])
def test_a_saved_network_loads_into_a_fresh_module(tmp_path: Path, name: str) -> None:
    trained, fresh = module(), module()
    trained[1].running_mean.fill_(0.5)
    save(trained.state_dict(), tmp_path / name)
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
    save(tied.state_dict(), tmp_path / name)
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["network.pt", "network.safetensors"])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=f"none/{name} cannot be written"):
        save(module().state_dict(), tmp_path / "none" / name)


def test_a_transformers_model_is_read_back_by_from_pretrained(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=9))
    save_pretrained(model, tmp_path / "out" / "model")
    assert {path.name for path in (tmp_path / "out" / "model").iterdir()} == {"config.json", "model.safetensors"}
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert type(again) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_other_modules_and_files_in_the_way_are_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"a Sequential has no save_pretrained.*name a \.safetensors or \.pt file"):
        save_pretrained(module(), tmp_path / "model")
    (tmp_path / "model").touch()
    model = transformers.BertModel(
        transformers.BertConfig(hidden_size=8, num_hidden_layers=0, num_attention_heads=2, vocab_size=9)
    )
    with pytest.raises(RunError, match="model is a file and no directory"):
        save_pretrained(model, tmp_path / "model")


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        load_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("own", "shown"),
    [({}, {"MAE", "R2"}), ({"r2": R2Score()}, {"r2", "MAE"}), ({"mae": MeanAbsoluteError()}, {"mae", "R2"})],
    ids=["none", "r2", "mae"],
)
def test_a_regression_s_scores_are_each_told_once(own: dict[str, Any], shown: set[str]) -> None:
    x = torch.linspace(-1, 1, 24).reshape(12, 2)
    source = Given(x.numpy(), x.sum(1, keepdim=True).numpy())
    training = TrainingSettings.model_validate({"subnets": 1, "local_steps": 1, "rounds": 1, "loss": "mse"})
    prepared = prepare(nn.Linear(2, 1), source, source, named_loss("mse"), training)
    run = LoadedRun(
        replace(prepared, metrics=checked_metrics(own)), Network.of(prepared.program, prepared.network), 1, (0.5, 0.4)
    )
    metrics = run.score().metrics
    assert set(metrics) == shown
    with torch.no_grad():
        expected = float(R2Score()(run.module()(x), x.sum(1, keepdim=True)))
    assert metrics["r2" if "r2" in own else "R2"] == pytest.approx(expected, rel=1e-4)
