"""A module of which parts are frozen: they neither train nor travel, and evaluated layers stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import idletrain
from idletrain.export import finished_module, load_run, saved_state
from idletrain.job import TrainingSettings
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import BatchOrder, LocalSteps, assemble
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, prepare
from idletrain.optimizer_settings import OptimizerSettings

HALVES = by_neurons((0.5, 0.5))


class Opened(ArraySource):
    """Arrays that are their own source."""

    def open(self) -> ArraySource:
        return self


def rows(samples: int = 64) -> Opened:
    random = np.random.Generator(np.random.Philox(0))
    x = random.standard_normal((samples, 8)).astype(np.float32)
    return Opened(x, (x[:, :4]).argmax(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(),
        nn.Linear(32, 4),
    )  # fmt: skip


def freeze(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad = False
    return module


def prepared(module: nn.Module, **settings: Any) -> Prepared:
    optimizer = OptimizerSettings(name="adamw", lr=1e-2)
    training = TrainingSettings(
        **{"subnets": 2, "local_steps": 3, "batch_size": 16, "optimizer": optimizer, **settings}
    )
    return prepare(module, rows(), None, "cross_entropy", training)


def trained(made: Prepared, rounds: int = 2) -> Network:
    program, network = made.program, Network.of(made.program, made.network)
    samples, training = program.source.open(), program.training
    order = BatchOrder(0, len(samples), training.batch_size, training.subnets)
    for round_ in range(rounds):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, HALVES)):
            flat = network.pull(subnet)
            work = LocalSteps(program, subnet, flat, k, round_)
            for step in range(training.local_steps):
                work.step(samples, order, step)
            work.check_buffers()
            updates.append((subnet, flat, training.local_steps))
        network.commit(updates)
    return network


def test_frozen_parameters_do_not_travel_and_their_layers_still_count_for_groups() -> None:
    module = mlp()
    freeze(module[0])
    made = prepared(module)
    assert made.program.training.method == "ist"
    assert made.program.layout.sizes == (16, 32)
    assert [t.name for t in made.program.layout.frozen] == ["0.weight", "0.bias"]
    assert not {"0.weight", "0.bias"} & {t.name for t in made.program.layout.tensors}
    (subnet, _) = made.program.subnets(0, HALVES)
    assert subnet.frozen is not None
    assert subnet.frozen.shapes == ((8, 8), (8,))
    finished = finished_module(made, trained(made))
    assert torch.equal(finished[0].weight, module[0].weight)  # type: ignore[index]
    assert not torch.equal(finished[3].weight, module[3].weight)  # type: ignore[index]


def test_a_subnet_of_frozen_parameters_computes_what_it_would_if_they_trained() -> None:
    half_frozen, all_trained = mlp(), mlp()
    for module in (half_frozen, all_trained):
        nn.init.constant_(module[6].weight, 0.1)  # not as drawn, which would begin smaller where it trains
    freeze(half_frozen[0])
    freeze(half_frozen[6])  # whose sum over cut neurons is scaled
    x = torch.from_numpy(rows().x)
    outputs = []
    for made in (prepared(half_frozen), prepared(all_trained)):
        network = Network.of(made.program, made.network)
        outputs.append(
            [
                assemble(made.program.module, subnet, network.pull(subnet)[: subnet.parameters])(x)
                for subnet in made.program.subnets(0, HALVES)
            ]
        )
    for ours, reference in zip(*outputs, strict=True):
        assert torch.equal(ours, reference)


def test_layers_in_evaluation_mode_keep_their_statistics_and_use_them() -> None:
    module = mlp().train()
    module[1].eval()
    module[1].running_mean.fill_(3.0)
    module[1].running_var.fill_(4.0)
    made = prepared(module, method="local-sgd")
    (subnet, _) = made.program.subnets(0, HALVES)
    x = torch.from_numpy(rows().x)
    subnets = assemble(
        made.program.module, subnet, Network.of(made.program, made.network).pull(subnet)[: subnet.parameters]
    )
    assert torch.allclose(subnets[1](subnets[0](x)), ((module[0](x) - 3) / (4 + 1e-5) ** 0.5), atol=1e-6)  # type: ignore[index]
    finished: Any = finished_module(made, trained(made))
    assert torch.equal(finished[1].running_mean, torch.full((16,), 3.0))
    assert torch.equal(finished[1].running_var, torch.full((16,), 4.0))
    expected = finished[3](torch.relu(finished[1](finished[0](x)))).mean(0)
    assert torch.allclose(finished[4].running_mean, expected, atol=1e-4)  # estimated with the first one's statistics


def test_statistics_of_a_layer_in_evaluation_mode_are_cut_with_its_neurons() -> None:
    module = mlp().train()
    module[1].eval()
    module[1].running_mean.copy_(torch.arange(16.0))
    made = prepared(module)
    assert made.program.layout.sizes == (16, 32)
    network = Network.of(made.program, made.network)
    for subnet in made.program.subnets(0, HALVES):
        small: Any = assemble(made.program.module, subnet, network.pull(subnet)[: subnet.parameters])
        at = next(p for t, p in zip(subnet.layout.tensors, subnet.positions, strict=True) if t.name == "1.weight")[0]
        assert at is not None
        assert torch.equal(small[1].running_mean, at.float())
    assert torch.equal(finished_module(made, trained(made))[1].running_mean, torch.arange(16.0))  # type: ignore[index]


def test_a_module_in_evaluation_mode_as_a_whole_trains_as_any_other() -> None:
    made = prepared(mlp().eval(), method="local-sgd")
    (subnet, _) = made.program.subnets(0, HALVES)
    small = assemble(made.program.module, subnet, torch.zeros(subnet.parameters))
    assert all(layer.training for layer in small.modules())


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = freeze(layer)
        self.down, self.up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Adapted(nn.Linear(8, 64), 2), nn.ReLU(), Adapted(nn.Linear(64, 64), 2), nn.ReLU(), nn.Linear(64, 4)
    )


def test_of_a_module_with_adapters_only_they_travel() -> None:
    made = prepared(adapted())
    assert made.program.training.method == "local-sgd"
    assert "of its parameters train" in made.fallback
    assert {t.name for t in made.program.layout.tensors} == {
        "0.down.weight", "0.up.weight", "0.up.bias", "2.down.weight", "2.up.weight", "2.up.bias", "4.weight", "4.bias",
    }  # fmt: skip


@pytest.mark.timeout(120)
def test_a_run_trains_adapters_and_its_directory_holds_the_whole_module(tmp_path: Path) -> None:
    module, data = adapted(), rows(256)
    result = idletrain.fit(
        module, (data.x, data.y), subnets=2, workers=1, local_steps=8, rounds=6, batch_size=16, run_dir=tmp_path,
        optimizer={"name": "adamw", "lr": 1e-2}, name="adapters",
    )  # fmt: skip
    state = result.module.state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]) == ("layer" in name), name
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    with torch.no_grad():
        before, after = (nn.functional.cross_entropy(net(x), y) for net in (module, result.module))
    assert after < 0.5 * before
    for stored in (load_run(tmp_path / "adapters").module().state_dict(), saved_state(tmp_path / "adapters")[0]):
        assert all(torch.equal(stored[name], value) for name, value in state.items())


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("default")  # of peft's own imports
def test_adapters_of_peft_train_alone_and_are_saved_as_its_users_save_them(tmp_path: Path) -> None:
    import peft
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=16, num_labels=2)
    torch.manual_seed(0)
    bert = transformers.AutoModelForSequenceClassification.from_config(config)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
    module = peft.get_peft_model(bert, lora)
    ids = torch.randint(0, 50, (256, 8), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[:, 0] < 25).long()}
    result = idletrain.fit(
        module, data, subnets=2, workers=2, local_steps=10, rounds=8, batch_size=16, run_dir=tmp_path,
        optimizer={"name": "adamw", "lr": 1e-2},
    )  # fmt: skip
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "classifier" in name for name in trained)
    before, after = module.state_dict(), result.module.state_dict()
    assert all(torch.equal(value, after[name]) == (name not in trained) for name, value in before.items())
    pulled = [record["pull_bytes"] for record in result.records if "pull_bytes" in record]
    assert 0 < max(pulled) < sum(4 * parameter.numel() for parameter in module.parameters()) / 2
    with torch.no_grad():
        first, last = (float(net.eval()(**data).loss) for net in (module, result.module))
    assert last < 0.9 * first
    result.module.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 100_000
