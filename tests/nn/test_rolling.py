"""Subnets without rounds: the order of commits alone decides the bits, and what is left out of account is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import flowers

from idletrain.errors import JobError
from idletrain.nn import alone
from idletrain.nn.evaluate import assembled, score
from idletrain.nn.ist.partition import Mask
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.nn.rolling import OpenSubnet, RollingSubnets, check_rolling, equal_specs
from idletrain.optimizer_settings import OuterOptimizerSettings

Programs = Callable[..., Prepared]


def rolling_of(prepared: Prepared) -> tuple[RollingSubnets, Network]:
    network = Network.of(prepared.program, prepared.network)
    return RollingSubnets(prepared.program, network, equal_specs(prepared.program)), network


def train(prepared: Prepared, order: Sequence[tuple[int, int]]) -> tuple[RollingSubnets, Network]:
    """Commit subnets of these lanes, with these steps."""
    rolling, network = rolling_of(prepared)
    samples = prepared.program.source.open()
    for lane, steps in order:
        rolling.commit(lane, alone.train_open(prepared.program, rolling, lane, steps, samples), steps)
    return rolling, network


ORDER = [(0, 3), (0, 3), (1, 3), (0, 2), (1, 1), (1, 3)]


def test_who_trains_when_changes_no_bit_and_the_order_of_commits_does(small_program: Programs) -> None:
    prepared = small_program(widths=(6, 12, 12, 3), subnets=2)
    program, samples = prepared.program, prepared.program.source.open()
    rolling, network = rolling_of(prepared)
    early = [alone.train_open(program, rolling, lane, 3, samples) for lane in (0, 1)]  # both before any commit
    for lane in (0, 1):
        rolling.commit(lane, early[lane], 3)
    assert network.sha256() == train(prepared, [(0, 3), (1, 3)])[1].sha256()
    in_order, otherwise = (train(prepared, [*first, (0, 3)])[1] for first in ([(0, 3), (1, 3)], [(1, 3), (0, 3)]))
    assert in_order.sha256() != otherwise.sha256()


def test_neurons_that_are_held_change_by_their_own_subnet_s_commit_alone(small_program: Programs) -> None:
    prepared = small_program(widths=(6, 12, 12, 3), subnets=2)
    rolling, network = rolling_of(prepared)
    samples = prepared.program.source.open()
    other = rolling.opened[1]
    before = network.pull(other.subnet)
    assert torch.equal(before, other.began)
    rolling.commit(0, alone.train_open(prepared.program, rolling, 0, 3, samples), 3)
    tensors, after = other.subnet.layout.tensors, _pieces(network.pull(other.subnet), other)
    pieces = zip(tensors, _pieces(before, other), after, strict=True)
    changed = {tensor.name for tensor, was, now in pieces if not torch.equal(was, now)}
    shared = {tensor.name for tensor in other.subnet.layout.tensors if tensor.shared}
    assert shared
    assert changed == shared


def _pieces(flat: torch.Tensor, opened: OpenSubnet) -> Sequence[torch.Tensor]:
    subnet = opened.subnet
    return torch.split(flat[: subnet.parameters], [int(np.prod(shape)) for shape in subnet.shapes])


def test_a_round_is_over_when_neurons_have_had_its_steps_on_average(small_program: Programs) -> None:
    prepared = small_program(widths=(6, 12, 12, 3), subnets=2, rounds=3, slack=0.5)
    rolling, _ = rolling_of(prepared)
    assert rolling.neurons == (8, 8)
    samples, rounds, first_steps = prepared.program.source.open(), [], []
    for n in range(9):
        update = alone.train_open(prepared.program, rolling, n % 2, 3, samples)
        assert rolling.rounds_after(n % 2, 3) == (n + 1) // 3
        rolling.commit(n % 2, update, 3)
        rounds.append(rolling.rounds)
        first_steps.append(rolling.opened[n % 2].first_step)
    assert rounds == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert first_steps == [1, 2, 3, 4, 5, 6, 6, 6, 6], "a schedule ends with the run"
    assert rolling.pace.mean() == pytest.approx(1)


@pytest.mark.parametrize("settings", [{}, {"ema": 0.5}, {"outer_optimizer": {"name": "nesterov", "lr": 0.7}}])
@pytest.mark.parametrize("norm", [None, "batch"])
def test_what_a_snapshot_holds_goes_on_alike(small_program: Programs, settings: dict, norm: str | None) -> None:
    prepared = small_program(widths=(6, 12, 12, 3), norm=norm, subnets=2, rounds=3, **settings)
    whole, network = train(prepared, ORDER)
    rolling, half = train(prepared, ORDER[:3])
    arrays = {name: array.copy() for name, array in rolling.arrays().items()}
    resumed = Network.of(prepared.program)
    resumed.flat.copy_(half.flat)
    again = RollingSubnets(prepared.program, resumed, equal_specs(prepared.program))
    again.restore(arrays)
    samples = prepared.program.source.open()
    for lane, steps in ORDER[3:]:
        again.commit(lane, alone.train_open(prepared.program, again, lane, steps, samples), steps)
    assert torch.equal(resumed.flat, network.flat)
    assert (again.commits, again.neuron_steps) == (whole.commits, whole.neuron_steps)
    assert all((a.members == b.members).all() for a, b in zip(again.opened, whole.opened, strict=True))


def test_a_snapshot_of_other_lanes_is_refused(small_program: Programs) -> None:
    two, four = (rolling_of(small_program(widths=(6, 12, 12, 3), subnets=n))[0] for n in (2, 4))
    with pytest.raises(ValueError, match="other lanes"):
        two.restore(four.arrays())


def test_an_average_is_taken_once_a_round(small_program: Programs) -> None:
    """As often as of rounds, whatever number of subnets they have."""
    prepared = small_program(widths=(6, 12, 12, 3), subnets=2, rounds=3, ema=0.5)
    rolling, network = rolling_of(prepared)
    samples, seen = prepared.program.source.open(), []
    for n in range(6):
        rolling.commit(n % 2, alone.train_open(prepared.program, rolling, n % 2, 3, samples), 3)
        if n in (2, 5):
            seen.append([value.clone() for value in network.values])
    for first, last, mean in zip(*seen, network.averaged, strict=True):
        torch.testing.assert_close(mean, first / 3 + 2 * last / 3)


def test_an_outer_optimizer_moves_what_all_share_further(small_program: Programs) -> None:
    prepared = small_program(widths=(6, 12, 12, 3), subnets=2, rounds=3)
    outer = OuterOptimizerSettings(name="nesterov", lr=1.0, momentum=0.5)
    training = prepared.program.training.model_copy(update={"outer_optimizer": outer})
    with_outer = replace(prepared, program=replace(prepared.program, training=training))
    (_, plain), (_, moved) = train(prepared, ORDER[:1]), train(with_outer, ORDER[:1])
    tensors = prepared.program.layout.tensors
    for tensor, old, value, further in zip(tensors, prepared.network, plain.values, moved.values, strict=True):
        factor = 1.5 if tensor.shared else 1.0
        torch.testing.assert_close(further - old, factor * (value - old))


def test_it_learns_as_rounds_of_the_same_width_do(small_program: Programs) -> None:
    given, losses = flowers(512, 6, 3), {"rounds": 0.0, "rolling": 0.0}
    for kind, seed in itertools.product(losses, range(4)):  # from one start they differ by a third, either way
        torch.manual_seed(seed)
        subnets = 3 if kind == "rounds" else 2
        prepared = small_program(
            widths=(6, 24, 24, 3), source=given, subnets=subnets, rounds=40, local_steps=10, norm="batch"
        )
        network, samples = Network.of(prepared.program, prepared.network), prepared.program.source.open()
        if kind == "rounds":
            alone.train_rounds(prepared.program, network, samples, 40)
        else:
            alone.train_rolling(prepared.program, network, samples)
        end = assembled(prepared.module, network.averaged).train()
        losses[kind] += score(end, samples, prepared.program.loss).loss / 4
    assert losses["rolling"] < 1.25 * losses["rounds"]
    assert losses["rounds"] < 0.5


def test_every_neuron_is_trained_about_as_often_as_others(small_program: Programs) -> None:
    prepared = small_program(widths=(6, 30, 30, 3), subnets=3, rounds=10, local_steps=2)
    rolling, _ = rolling_of(prepared)
    held: list[Mask] = [opened.members for opened in rolling.opened]
    order = np.random.default_rng(0).choice(3, 60, p=[0.15, 0.35, 0.5])  # one lane is three times as slow
    for lane in order:
        rolling.commit(lane, rolling.opened[lane].began, 2)
        held[lane] = rolling.opened[lane].members
        assert (np.sum(held, axis=0) <= 1).all()
    assert rolling.pace.min() > 0.6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "local-sgd"}, "shares out neurons, and the subnets have all of the network's"),
        ({"subnets": 6, "slack": 1.0}, "6 subnets with training.slack: 1 need 12 neurons in each group, and 1 has 8;"),
    ],
)
def test_what_cannot_be_trained_so_is_told(small_program: Programs, settings: dict, words: str) -> None:
    with pytest.raises(JobError) as refused:
        check_rolling(small_program(**settings).program)
    assert words in str(refused.value)
