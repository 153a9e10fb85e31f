"""Test labels as one more neuron group: the samples of each shard, their sums, and errors in jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Given
from torch import nn

from idletrain.errors import JobError
from idletrain.job import Job, TrainingSettings
from idletrain.job_file import parse_job
from idletrain.nn.data.given import as_samples
from idletrain.nn.evaluate import assembled, score
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.memory import subnet_need, subnet_of_share
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings, named_loss, prepare
from idletrain.nn.wide import label_shards
from idletrain.nn.wide.layers import SparseLinear
from idletrain.nn.wide.models import rank_labels

FEATURES, LABELS, SUBNETS = 90, 60, 2


@pytest.fixture
def job_of(tmp_path: Path) -> Any:
    random = np.random.default_rng(0)
    for name, rows in (("train", 600), ("test", 200)):
        lines = [f"{rows} {FEATURES} {LABELS}\n"]
        for label in random.integers(0, LABELS, rows):
            features = sorted({int(label), LABELS + int(label) % 30, *random.integers(0, FEATURES, 2).tolist()})
            lines.append(f"{label},{(label + 1) % LABELS} {' '.join(f'{word}:1' for word in features)}\n")
        (tmp_path / f"{name}.txt").write_text("".join(lines))

    def make(args: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **model: Any) -> Job:
        args = {
            "features": FEATURES,
            "hidden": 16,
            "labels": LABELS,
            "sampler": {"name": "uniform", "negatives": 20},
        } | (args or {})
        optimizer = optimizer or {"name": "row-adagrad", "lr": 0.1, "start": {"output.weight": 1e-4}}
        return parse_job(
            {
                "name": "wide",
                "model": {"factory": "idletrain.nn.wide.models:wide", "args": args, **model},
                "data": {"train": str(tmp_path / "train.txt"), "test": str(tmp_path / "test.txt"), "test_rows": 100},
                "training": {
                    "subnets": SUBNETS,
                    "local_steps": 20,
                    "rounds": 3,
                    "batch_size": 16,
                    "loss": "sampled_softmax",
                    "optimizer": optimizer,
                },
            }
        )

    return make


def prepared_of(job: Job) -> Prepared:
    return from_settings(job.model, job.data, job.training)


def train(prepared: Prepared, rounds: int = 3) -> Network:
    program = prepared.program
    samples, network = program.source.open(), Network.of(program, prepared.network)
    for round_ in range(rounds):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, by_neurons((1 / SUBNETS,) * SUBNETS))):
            flat = torch.zeros(program.buffer_size(subnet, persistent=False))
            pulled = network.pull(subnet)
            flat[: len(pulled)] = pulled
            work = LocalSteps(program, subnet, flat, k, round_)
            order = label_shards.open_output(
                program, work.module, subnet, samples, flat, label_shards.ShardPlace(round_, k)
            )
            for step in range(program.training.local_steps):
                work.step(samples, order, step)
            updates.append((subnet, flat[: program.buffer_size(subnet, persistent=True)], 20))
        network.commit(updates)
    return network


def accuracy(prepared: Prepared, network: Network) -> float:
    assert prepared.test is not None
    result = score(assembled(prepared.module, network.values), prepared.test.open(), prepared.program.loss)
    reached, loss = result.accuracy, result.loss
    assert reached is not None
    assert np.isfinite(loss)
    return reached


@pytest.mark.parametrize(
    ("model", "common"),
    [({"exclude": ["hidden"]}, "sum"), ({"exclude": ["labels"]}, "mean"), ({}, "sum"), ({"fixed": ["labels"]}, "sum")],
    ids=["labels", "hidden", "both", "labels fixed"],
)
@pytest.mark.parametrize("name", ["sgd", "adamw", "row-adagrad", "adagrad"])
def test_every_cut_and_optimizer_learns(job_of: Any, model: dict[str, Any], common: str, name: str) -> None:
    rates = {"sgd": 0.3, "adamw": 0.03, "row-adagrad": 0.1, "adagrad": 0.1}
    job = job_of({"start": "random"}, {"name": name, "lr": rates[name]}, **model)
    prepared = prepared_of(job)
    assert prepared.program.layout.common == common
    assert prepared.program.output == "output"
    before = accuracy(prepared, Network.of(prepared.program, prepared.network))
    assert accuracy(prepared, train(prepared, 5)) > max(before + 0.1, 0.2)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_shards_share_the_decay_of_what_they_all_have(job_of: Any, name: str) -> None:
    job = job_of({"start": "random"}, {"name": name, "lr": 0.01, "weight_decay": 0.5}, exclude=["hidden"])
    prepared = prepared_of(job)
    program = prepared.program
    subnet = program.subnets(0, by_neurons((1 / SUBNETS,) * SUBNETS))[0]
    work = LocalSteps(program, subnet, torch.zeros(program.buffer_size(subnet, persistent=False)), 0, 0)
    settings = zip((t.name for t in program.layout.tensors), work._optimizer._settings, strict=True)
    decays = {name: own.weight_decay for name, own in settings}
    assert decays.pop("output.weight") == 0.5
    assert decays.pop("output.bias") == 0.5
    assert set(decays.values()) == {0.5 / SUBNETS}


def test_a_shard_trains_on_the_rows_that_have_its_labels_each_once_an_epoch(job_of: Any) -> None:
    prepared = prepared_of(job_of(exclude=["hidden"], fixed=["labels"]))
    program, samples = prepared.program, prepared.program.source.open()
    subnets = program.subnets(0, by_neurons((0.5, 0.5)))
    held = [label_shards.held_labels(program, subnet) for subnet in subnets]
    assert sorted(np.concatenate(held).tolist()) == list(range(LABELS))
    flat = torch.zeros(program.buffer_size(subnets[0], persistent=False))
    work = LocalSteps(program, subnets[0], flat, 0, 0)
    order = label_shards.open_output(program, work.module, subnets[0], samples, flat, label_shards.ShardPlace(0, 0))
    own = set(samples.holding(held[0]).tolist())
    steps = len(own) // 16
    seen = np.concatenate([order.batch(0, step) for step in range(steps)])
    assert len(set(seen.tolist())) == len(seen) == steps * 16
    assert set(seen.tolist()) <= own
    _, y = samples.batch(seen)
    assert np.isin(y.indices.numpy(), held[0]).reshape(-1, 2).any(1).all()


def test_fixed_labels_stay_and_others_move(job_of: Any) -> None:
    fixed, redrawn = (prepared_of(job_of(exclude=["hidden"], fixed=names)).program for names in (["labels"], []))
    for program, same in ((fixed, True), (redrawn, False)):
        first, second = (program.subnets(round_, by_neurons((0.5, 0.5)))[0] for round_ in (0, 1))
        labels = label_shards.held_labels(program, first), label_shards.held_labels(program, second)
        assert np.array_equal(*labels) == same


def test_shared_changes_are_summed_and_adagrad_s_sums_too(job_of: Any) -> None:
    prepared = prepared_of(job_of(exclude=["hidden"]))
    program = prepared.program
    network = Network.of(program, prepared.network)
    before = [[t.clone() for t in slot] for slot in network.slots]
    updates = []
    for k, subnet in enumerate(program.subnets(0, by_neurons((0.5, 0.5)))):
        updates.append((subnet, network.pull(subnet) + k + 1, 20))
    network.commit(updates)
    names = [t.name for t in program.layout.tensors]
    shared, output = names.index("embeddings.weight"), names.index("output.weight")
    for slot, old in zip(network.slots, before, strict=True):
        torch.testing.assert_close(slot[shared], old[shared] + 3)
        moved = (slot[output] - old[output]).round()
        assert set(moved.unique().tolist()) == {1.0, 2.0}


def test_moments_of_shared_parameters_are_averaged(job_of: Any) -> None:
    """Where four shards each let an old square decay, the sum of the changes would be far below zero."""
    job = job_of(optimizer={"name": "adamw", "lr": 0.01}, exclude=["hidden"])
    program = prepared_of(job.model_copy(update={"training": job.training.model_copy(update={"subnets": 4})})).program
    network, updates = Network.of(program), []
    for slot in network.slots:
        for tensor in slot:
            tensor.fill_(1.0)
    for subnet in program.subnets(0, by_neurons((0.25,) * 4)):
        flat = network.pull(subnet)
        flat[subnet.parameters :] *= 0.25
        updates.append((subnet, flat, 20))
    network.commit(updates)
    for slot in network.slots[1:]:
        assert all(torch.equal(tensor, torch.full_like(tensor, 0.25)) for tensor in slot)


def test_without_a_label_group_all_rows_are_dealt_out(job_of: Any) -> None:
    prepared = prepared_of(job_of(exclude=["labels"]))
    program, samples = prepared.program, prepared.program.source.open()
    subnet = program.subnets(0, by_neurons((0.5, 0.5)))[0]
    assert label_shards.held_labels(program, subnet) is None
    flat = torch.zeros(program.buffer_size(subnet, persistent=False))
    work = LocalSteps(program, subnet, flat, 0, 0)
    order = label_shards.open_output(program, work.module, subnet, samples, flat, label_shards.ShardPlace(0, 0))
    assert type(order) is BatchOrder


def test_memory_follows_the_shard_and_counts_tables(job_of: Any) -> None:
    plain, tables = (
        subnet_need(prepared_of(job_of({"sampler": name}, exclude=["hidden"])).program)
        for name in ("uniform", {"name": "simhash", "k": 12, "tables": 50})
    )
    assert plain(0.25) < plain(0.5) < plain(1.0)
    assert tables(1.0) - plain(1.0) == 4 * 50 * (LABELS + 4097) + LABELS


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"args": {"labels": 59}}, "data.train: has 60 labels and the model 59; set model.args.labels: 60"),
        ({"args": {"features": 9}}, "data.train: has 90 features and the model 9; set model.args.features: 90"),
        ({"exclude": ["outputs"]}, "model.exclude: outputs is not a group; the groups are hidden, labels"),
        ({"exclude": ["hidden", "labels"]}, "model.exclude: names every group"),
        ({"fixed": ["outputs"]}, "model.fixed: outputs is not a group; the groups are hidden, labels"),
        ({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}, "momentum: row-sparse gradients keep none"),
        ({"args": {"sampler": "simhush"}}, "sampler: 'simhush' should be one of"),
        ({"args": {"sampler": "simhash", "most_table_bytes": 1000}}, r"tables over 30 labels take 0.1 MiB and 0.0 MiB"),
    ],
)
def test_jobs_that_do_not_fit_together_are_refused(job_of: Any, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        prepared_of(job_of(**changes))


def end_in_sparse(inputs: int, labels: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 16),
        torch.nn.ReLU(),
        SparseLinear(16, labels, sampler={"name": "simhash", "k": 2, "tables": 4}),
    )


def test_any_network_on_dense_arrays_can_shard_its_labels() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 12)).astype(np.float32)
    source = Given(x, x.argmax(1))
    settings = {
        "subnets": 2,
        "local_steps": 20,
        "loss": "sampled_softmax",
        "batch_size": 16,
        "optimizer": {"name": "sgd", "lr": 0.5},
    }
    training = TrainingSettings.model_validate(settings)
    torch.manual_seed(0)
    module, loss = end_in_sparse(12, 12), named_loss("sampled_softmax")
    with pytest.raises(JobError, match=r"model.groups: a network that ends in SparseLinear needs its groups by hand"):
        prepare(module, source, source, loss, training)
    table = {"2.weight": ["labels", None], "2.bias": ["labels"]}
    prepared = prepare(module, source, source, loss, training, table=table)
    assert prepared.program.layout.common == "sum"
    before = accuracy(prepared, Network.of(prepared.program, prepared.network))
    assert accuracy(prepared, train(prepared, 6)) > max(before + 0.2, 0.4)


def test_sparse_rows_and_dense_networks_are_refused_with_a_reason(job_of: Any) -> None:
    job = job_of()
    mlp = job.model.model_copy(update={"factory": "idletrain.nn.models:mlp", "args": {"widths": [90, 8, 60]}})
    with pytest.raises(JobError, match=r"model: does not take inputs of shape"):
        from_settings(mlp, job.data, job.training)
    loss = job.training.model_copy(update={"loss": "cross_entropy"})
    with pytest.raises(JobError, match=r"training.loss: cross_entropy does not fit"):
        from_settings(job.model, job.data, loss)


def test_a_shard_whose_labels_have_no_rows_stands_still(job_of: Any) -> None:
    prepared = prepared_of(job_of({"labels": 2000, "start": "random"}, exclude=["hidden"]))
    program, samples = prepared.program, prepared.program.source.open()
    subnet = program.subnets(0, by_neurons((0.001, 0.999)))[0]
    held = label_shards.held_labels(program, subnet)
    assert held is not None
    assert held.min() >= LABELS
    flat = Network.of(program, prepared.network).pull(subnet)
    work = LocalSteps(program, subnet, flat, 0, 0)
    before = flat.clone()
    work.step(
        samples, label_shards.open_output(program, work.module, subnet, samples, flat, label_shards.ShardPlace(0, 0)), 0
    )
    assert torch.equal(flat, before)


# --- lockstep --------------------------------------------------------------------------------------------------------


def in_lockstep(job: Job) -> Job:
    training = job.training.model_copy(update={"mode": "lockstep"})
    return job.model_copy(update={"training": training})


def test_lockstep_is_for_labels_as_the_only_group(job_of: Any) -> None:
    with pytest.raises(JobError, match=r"training.mode: lockstep is for networks that end in SparseLinear"):
        prepared_of(in_lockstep(job_of()))
    with pytest.raises(JobError, match=r"training.mode: lockstep is for networks that end in SparseLinear"):
        prepared_of(in_lockstep(job_of(exclude=["labels"])))
    prepared = prepared_of(in_lockstep(job_of(exclude=["hidden"])))
    assert prepared.program.layout.common == "same"


def test_in_lockstep_all_shards_take_the_same_rows(job_of: Any) -> None:
    program = prepared_of(in_lockstep(job_of(exclude=["hidden"]))).program
    samples, orders = program.source.open(), []
    for k, subnet in enumerate(program.subnets(0, by_neurons((0.5, 0.5)))):
        flat = torch.zeros(program.buffer_size(subnet, persistent=False))
        work = LocalSteps(program, subnet, flat, 0, 0)
        orders.append(
            label_shards.open_output(program, work.module, subnet, samples, flat, label_shards.ShardPlace(0, k))
        )
    for step in range(len(samples) // 16):
        assert np.array_equal(*(order.batch(0, step) for order in orders))


def test_in_lockstep_what_all_shards_have_is_taken_as_it_is(job_of: Any) -> None:
    prepared = prepared_of(in_lockstep(job_of(exclude=["hidden"])))
    network, updates = Network.of(prepared.program, prepared.network), []
    for subnet in prepared.program.subnets(0, by_neurons((0.5, 0.5))):
        flat = network.pull(subnet)
        embeddings = FEATURES * 16
        flat[:embeddings] = torch.linspace(0, 1, embeddings)
        updates.append((subnet, flat, 20))
    network.commit(updates)
    assert torch.equal(network.values[0].flatten(), torch.linspace(0, 1, FEATURES * 16))


def test_lockstep_keeps_one_more_state_in_memory(job_of: Any) -> None:
    jobs = job_of(exclude=["hidden"]), in_lockstep(job_of(exclude=["hidden"]))
    alone, together = (prepared_of(job).program for job in jobs)
    more = subnet_need(together)(0.5) - subnet_need(alone)(0.5)
    assert more == 4 * alone.buffer_size(subnet_of_share(alone, 0.5), persistent=False)


def test_looking_at_all_labels_takes_memory_for_their_logits_and_gradient(job_of: Any) -> None:
    needs = {}
    for sampler in ({"name": "uniform", "negatives": 1}, {"name": "all"}):
        program = prepared_of(job_of({"sampler": sampler}, exclude=["hidden"])).program
        needs[sampler["name"]] = subnet_need(program)(1.0)
    batch, hidden = program.training.batch_size, program.module.output.weight.shape[1]
    unseen = LABELS - 1 - 2 * batch  # a row has two labels
    assert unseen > 0
    assert needs["all"] - needs["uniform"] >= 3 * 4 * unseen * (hidden + batch)


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_a_model_may_have_more_labels_than_the_data(job_of: Any) -> None:
    prepared = prepared_of(job_of({"labels": LABELS + 7, "start": "data"}, exclude=["hidden"]))
    output = dict(prepared.module.named_parameters())["output.weight"]
    assert not output[LABELS:].any()
    assert output[:LABELS].any(1).all()
    assert prepared.test is not None
    train, tests = prepared.program.source.open(), prepared.test.open()
    assert len(rank_labels(prepared.module, tests, train).propensity_precision) == 5


def test_classes_beyond_a_wide_output_are_refused() -> None:
    x, y = torch.randn(40, 8), torch.arange(40)
    training = TrainingSettings(loss="sampled_softmax", optimizer={"name": "row-adagrad", "lr": 0.1}, subnets=2)
    module = nn.Sequential(nn.Linear(8, 8), SparseLinear(8, 30))
    with pytest.raises(JobError, match=r"label 39 is beyond the model's 30 outputs"):
        prepare(
            module,
            Given(x, y),
            None,
            "sampled_softmax",
            training,
            table={"1.weight": ["labels", None], "1.bias": ["labels"]},
        )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"1.weight": ["labels", None]}, "a subnet does not run"),  # and a label's bias is another's
        ({"1.weight": ["labels", "hidden"], "1.bias": ["labels"]}, "a subnet does not run"),
    ],
)
def test_groups_that_leave_out_what_a_wide_output_s_labels_index_are_refused(
    table: dict[str, list[str | None]], message: str
) -> None:
    x, y = torch.randn(40, 8), torch.arange(40) % 30
    training = TrainingSettings(loss="sampled_softmax", optimizer={"name": "row-adagrad", "lr": 0.1}, subnets=2)
    module = nn.Sequential(nn.Linear(8, 8), SparseLinear(8, 30))
    with pytest.raises(JobError, match=message):
        prepare(module, Given(x, y), None, "sampled_softmax", training, table=table)


@pytest.mark.parametrize("settings", [{"copies": 2}, {"finish_whole": 0.2}], ids=lambda settings: next(iter(settings)))
def test_a_label_in_several_subnets_is_refused_by_the_setting_that_asks_for_it(settings: dict[str, Any]) -> None:
    x, y = torch.randn(40, 8), torch.arange(40) % 30
    optimizer = {"name": "row-adagrad", "lr": 0.1}
    training = TrainingSettings(loss="sampled_softmax", optimizer=optimizer, subnets=3, **settings)
    module = nn.Sequential(nn.Linear(8, 8), SparseLinear(8, 30))
    table = {"1.weight": ["labels", None], "1.bias": ["labels"]}
    (name,) = settings
    with pytest.raises(JobError, match=rf"training.{name}: the labels of a very wide output are each in one subnet"):
        prepare(module, Given(x, y), None, "sampled_softmax", training, table=table)


def test_several_positions_a_sample_are_scored_each_but_for_ignored_ones() -> None:
    module = SparseLinear(4, 3, sampler="all")
    with torch.no_grad():
        module.weight.copy_(torch.eye(3, 4))
    x = torch.eye(4)[torch.tensor([[0, 1, 2], [0, 1, 0]])]
    y = torch.tensor([[0, 1, 1], [0, -100, -100]])
    result = score(module, as_samples((x, y)), named_loss("sampled_softmax"))
    accuracy, loss = result.accuracy, result.loss
    assert accuracy == 3 / 4
    assert np.isfinite(loss)
