"""A run's network as files that torch and safetensors load."""

from __future__ import annotations

import importlib
import json
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

import idletrain
from idletrain.errors import JobError, RunError
from idletrain.export import LoadedRun, load_run, read_prepared, save, save_pretrained
from idletrain.job import TrainingSettings
from idletrain.nn.data.known import digits
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
def test_weights_with_channels_last_can_be_saved(tmp_path: Path, name: str) -> None:
    state = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last).state_dict()
    save(state, tmp_path / name)
    read = torch.load(tmp_path / name, weights_only=True) if name.endswith(".pt") else load_file(tmp_path / name)
    assert torch.equal(read["weight"], state["weight"])


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


OWN = """
from torch import nn

class Scaled(nn.Module):
    def forward(self, x):
        return {scale} * x
"""


def test_a_run_that_has_moved_is_read_there_and_changed_code_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the workers
    own = tmp_path / "own_scaled.py"
    own.write_text(OWN.format(scale=1))
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), importlib.import_module("own_scaled").Scaled(), nn.Linear(16, 10))
    train, test = digits()
    settings: dict[str, Any] = {"method": "ist", "subnets": 2, "local_steps": 2, "rounds": 1, "workers": 1}
    result = idletrain.fit(net, train, test, name="a", run_dir=tmp_path / "runs", **settings)
    (tmp_path / "runs").rename(tmp_path / "moved")
    run = load_run(tmp_path / "moved" / "a")
    assert run.score().accuracy == pytest.approx(result.summary["accuracy"])
    assert run.note == ""
    own.write_text(OWN.format(scale=2))
    note = load_run(tmp_path / "moved" / "a").note
    assert note == "the code of Scaled has changed since the run; its network computes what is new"
    (tmp_path / "moved" / "a" / "events.jsonl").unlink()
    assert load_run(tmp_path / "moved" / "a").note == ""


def test_relative_paths_of_a_run_are_told_to_be_those_of_its_launch(tmp_path: Path) -> None:
    data = {"train": ["x.npy", str(tmp_path / "y.npy")], "test": "s3://bucket/test.npz"}
    job = {"name": "a", "model": {"factory": "torch.nn:Flatten"}, "data": data}
    (tmp_path / "job.json").write_text(json.dumps(job))
    fault = "data: this folder has no x.npy, and a run's relative paths begin in the one that it was launched in; run"
    with pytest.raises(JobError, match=fault):
        read_prepared(tmp_path)


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
