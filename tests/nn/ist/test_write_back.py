"""Extract then merge is the identity, and what is merged is exactly what its owners sent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.nn.ist.groups import Group, Layout, TensorLayout
from idletrain.nn.ist.partition import draw as draw_masks
from idletrain.nn.ist.subnets import Subnet, cut, gather, views
from idletrain.nn.ist.write_back import add_change, merge, write_one


def tensor_of(name: str, *dimensions: np.ndarray | int, trainable: bool = True) -> TensorLayout:
    """A tensor whose dimensions are numbers (never cut) or the neurons at every position."""
    shape = tuple(d if isinstance(d, int) else len(d) for d in dimensions)
    neurons = tuple(None if isinstance(d, int) else np.asarray(d, dtype=np.int64) for d in dimensions)
    return TensorLayout(name, shape, neurons, trainable)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """The cuts of an MLP, a convolution before a flatten, a concatenation with uncut features, and attention heads."""
    first, second, heads = (draw(st.integers(4, 9)) for _ in range(3))
    pixels, width, inputs = (draw(st.integers(1, 4)) for _ in range(3))
    a = np.arange(first)
    b = first + np.arange(second)
    h = first + second + np.arange(heads)
    before, after = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    mixed = np.concatenate([np.full(before, -1), a, np.full(after, -1)])
    tensors = [
        tensor_of("input", a, inputs),
        tensor_of("bias", a),
        tensor_of("conv", b, a, 3, 3),
        tensor_of("flattened", inputs, b.repeat(pixels)),
        tensor_of("concatenated", b, mixed),
        tensor_of("vector", mixed),
        tensor_of("twice", mixed, mixed),
        tensor_of("qkv", np.tile(h.repeat(width), 3), inputs),
        tensor_of("out", inputs, h.repeat(width)),
        tensor_of("shared", inputs, 2),
        tensor_of("scalar"),
        tensor_of("frozen", inputs, trainable=False),
    ]
    chosen = draw(st.permutations(tensors).flatmap(lambda t: st.integers(1, len(t)).map(lambda n: t[:n])))
    return Layout((Group("a", first), Group("b", second), Group("h", heads)), tuple(chosen))


def random_network(layout: Layout) -> list[torch.Tensor]:
    return [torch.randn(t.shape) for t in layout.tensors]


def extracted(network: list[torch.Tensor], subnet: Subnet) -> torch.Tensor:
    flat = torch.full((subnet.parameters,), math.nan)
    gather(network, subnet, flat)
    return flat


SUBNETS = st.sampled_from([1, 2, 4])  # powers of two: their mean of one value is that value, to the bit


@settings(deadline=None)
@given(layouts(), SUBNETS, st.integers(0, 1000))
def test_extract_then_merge_is_the_identity(layout: Layout, count: int, seed: int) -> None:
    network = random_network(layout)
    before = [t.clone() for t in network]
    subnets = [cut(layout, mask) for mask in draw_masks(seed, 0, layout.sizes, [1 / count] * count)]
    merge(network, [(s, extracted(network, s), 50) for s in subnets])
    for tensor, old in zip(network, before, strict=True):
        assert torch.equal(tensor, old)


@settings(deadline=None)
@given(layouts(), st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(0, 1000))
def test_merged_values_are_their_owners_and_what_all_have_is_the_mean_by_steps(
    layout: Layout, steps: list[int], seed: int
) -> None:
    """Against a loop over every single value of the network."""
    network = random_network(layout)
    before = [t.clone() for t in network]
    masks = draw_masks(seed, 0, layout.sizes, [1 / len(steps)] * len(steps))
    subnets = [cut(layout, mask) for mask in masks]
    sent = [torch.randn(s.parameters) for s in subnets]
    merge(network, list(zip(subnets, sent, steps, strict=True)))
    for t, tensor in enumerate(layout.tensors):
        parts = [list(views(flat, s.shapes))[t] for flat, s in zip(sent, subnets, strict=True)]
        expected, owned = before[t].clone(), []
        for index in np.ndindex(tensor.shape):
            owners = [
                {k for k, mask in enumerate(masks) if n is None or n[i] < 0 or mask[n[i]]}
                for n, i in zip(tensor.neurons, index, strict=True)
            ]
            having = sorted(set(range(len(steps))).intersection(*owners))
            if not tensor.trainable or not having:
                continue
            values = [float(parts[k][within(subnets[k].positions[t], index)]) for k in having]
            if len(having) == 1 and len(steps) > 1:
                expected[index] = values[0]
                owned.append(index)
            else:
                assert having == list(range(len(steps)))
                expected[index] = sum(v * s for v, s in zip(values, steps, strict=True)) / sum(steps)
        torch.testing.assert_close(network[t], expected, rtol=1e-5, atol=1e-6)
        assert all(network[t][index] == expected[index] for index in owned)


def within(positions: tuple[torch.Tensor | None, ...], index: tuple[int, ...]) -> tuple[int, ...]:
    """Where a subnet has a value of the network."""
    return tuple(i if at is None else at.tolist().index(i) for at, i in zip(positions, index, strict=True))


@settings(deadline=None)
@given(layouts(), st.sampled_from([(4, 2), (4, 3), (3, 3)]), st.integers(0, 1000))
def test_copies_are_averaged_by_steps_wherever_any_subnet_has_them(
    layout: Layout, counts: tuple[int, int], seed: int
) -> None:
    subnets_count, copies = counts
    network = random_network(layout)
    before = [t.clone() for t in network]
    shares = [copies / subnets_count] * subnets_count
    masks = draw_masks(seed, 0, layout.sizes, shares, copies=copies)
    subnets = [cut(layout, mask, sharing=copies) for mask in masks]
    steps = [50, 20, 30, 40][:subnets_count]
    updates = [(s, torch.randn(s.parameters), n) for s, n in zip(subnets, steps, strict=True)]
    merge(network, updates)
    for i, (tensor, old) in enumerate(zip(network, before, strict=True)):
        if not layout.tensors[i].trainable:
            assert torch.equal(tensor, old)
            continue
        total, counted = torch.zeros(tensor.shape, dtype=torch.float64), torch.zeros(tensor.shape)
        for subnet, flat, n in updates:
            own = list(views(flat, subnet.shapes))[i]
            index = np.ix_(*(range(m) if p is None else p for m, p in zip(old.shape, subnet.positions[i], strict=True)))
            index = tuple(torch.from_numpy(np.asarray(p)) for p in index)
            total[index] += n * own.double()
            counted[index] += n
        expected = torch.where(counted > 0, total / counted.clamp(min=1), old.double())
        assert torch.allclose(tensor.double(), expected, atol=1e-6)


def test_subnets_of_some_neurons_leave_the_rest_as_it_is() -> None:
    layout = Layout((Group("a", 8),), (tensor_of("w", np.arange(8), 3),))
    network = random_network(layout)
    before = network[0].clone()
    mask = np.array([True, False, False, True, False, False, False, False])
    subnet = cut(layout, mask)
    merge(network, [(subnet, torch.zeros(6), 10)])
    assert network[0][[0, 3]].abs().sum() == 0
    assert torch.equal(network[0][[1, 2, 4, 5, 6, 7]], before[[1, 2, 4, 5, 6, 7]])


def test_a_change_that_comes_late_moves_the_network_as_much_as_in_time() -> None:
    """A scaled weight by the change over its factor; what every subnet has by its share of the steps."""
    tensors = (
        tensor_of("up", np.arange(8), 3),
        replace(tensor_of("down", 2, np.arange(8)), scaled=((1, 1.0),)),
        replace(tensor_of("beside", 2, np.append(np.arange(8), [-1, -1])), scaled=((1, 1.0),)),
        tensor_of("shared", 2),
    )
    layout = Layout((Group("h", 8),), tensors)
    network = random_network(layout)
    in_time, late = [t.clone() for t in network], [t.clone() for t in network]
    subnets = [cut(layout, mask) for mask in draw_masks(0, 0, layout.sizes, [0.25, 0.75])]
    flats = [extracted(network, subnet) for subnet in subnets]
    steps, change = (10, 30), torch.randn(subnets[0].parameters)
    merge(in_time, [(subnets[0], flats[0] + change, steps[0]), (subnets[1], flats[1], steps[1])])
    merge(late, list(zip(subnets, flats, steps, strict=True)))
    add_change(late, subnets[0], change, steps[0] / sum(steps))
    for one, other in zip(late, in_time, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    _, down, _, _ = views(change, subnets[0].shapes)
    torch.testing.assert_close((late[1] - network[1])[:, subnets[0].positions[1][1]], down / 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_state", [False, True])
def test_one_update_replaces_what_it_alone_holds_and_moves_what_all_have_by_its_weight(is_state: bool) -> None:
    """Others changed the network since it began; of a state the mean moves, which no negative number comes of."""
    a = np.arange(6)
    layout = Layout(
        (Group("a", 6),), (tensor_of("in", a, 3), tensor_of("mixed", np.append(a, -1)), tensor_of("all", 4))
    )
    members = np.array([True, False, True, False, False, True])
    subnet, network = cut(layout, members), random_network(layout)
    began, update = extracted(network, subnet), torch.randn(subnet.parameters)
    for tensor in network:
        tensor.add_(1)  # what others did meanwhile; its own neurons are nobody else's
    network[0][members] -= 1
    network[1][:6][members] -= 1
    before = [tensor.clone() for tensor in network]
    write_one(network, (subnet, update), began, 0.25, is_state=is_state)
    new, old = list(views(update, subnet.shapes)), list(views(began, subnet.shapes))
    assert torch.equal(network[0][members], new[0])
    assert torch.equal(network[0][~members], before[0][~members])
    assert torch.equal(network[1][:6][members], new[1][:3])

    def moved(value: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return 0.75 * value + 0.25 * last if is_state else value + 0.25 * (last - first)

    torch.testing.assert_close(network[2], moved(before[2], old[2], new[2]))
    torch.testing.assert_close(network[1][6], moved(before[1][6], old[1][3], new[1][3]))


def test_one_update_adds_all_of_its_change_where_changes_are_summed() -> None:
    layout = Layout((Group("a", 2),), (tensor_of("all", 4),), common="sum")
    subnet, network = cut(layout, np.array([True, False])), random_network(layout)
    began, before = extracted(network, subnet), network[0].clone()
    write_one(network, (subnet, began + 2), began, 0.25, "sum")
    torch.testing.assert_close(network[0], before + 2)


def test_merging_nothing_changes_nothing() -> None:
    network = [torch.ones(2)]
    merge(network, [])
    assert network[0].tolist() == [1, 1]
