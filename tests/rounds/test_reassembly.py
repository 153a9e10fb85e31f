"""Pushes that arrive whole, in parts, in scattered pieces, or not to their end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from idletrain.exchange.codec import Codec
from idletrain.exchange.messages import AcceptanceRule, LeaseId, PushHeader, Reply, checksum
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.rounds.durable.run_directory import Payload
from idletrain.rounds.reassembly import Baseline, Reassembly, persistent_part
from idletrain.worker import encoding

LEASE = LeaseId("run", 1, 0, 0, 7)
WIDTHS = (40, 300, 300, 3)
STEPS = 5
PIECE = 1280


@dataclass
class World:
    """A subnet, its update as it travels, and a reassembly."""

    reassembly: Reassembly
    baseline: Baseline
    codec: Codec
    content: Tensor
    flat: Tensor
    trained: Tensor

    def header(self, **other: Any) -> PushHeader:
        fields = {"steps": STEPS, "train_seconds": 1.5, "checksum": checksum([self.content.numpy().data.cast("B")])}
        return PushHeader(LEASE, **(fields | other))

    def part(self, start: int, stop: int) -> bool:
        frames = [memoryview(self.content[start:stop].numpy())]
        return self.reassembly.hold(self.header(), start, frames, self.baseline.subnet)


@pytest.fixture
def world(small_program: Callable[..., Prepared]) -> Callable[..., World]:
    def make(*, salvage: bool = True, push: str = "int8", loss: float = 0.0) -> World:
        prepared = small_program(widths=WIDTHS, norm="batch", local_steps=STEPS, exchange={"push": push, "loss": loss})
        program = prepared.program
        (subnet, _) = program.subnets(0, by_neurons((0.5, 0.5)))
        network = Network.of(program, prepared.network)
        flat = network.pull(subnet)
        trained = flat + 0.01 * torch.randn(len(flat), generator=torch.Generator().manual_seed(0))
        codec = encoding.codec(program, subnet, "push")
        assert codec
        content = encoding.encode_update(program, subnet, trained, flat, LEASE)
        return World(
            Reassembly(program, salvage=salvage),
            Baseline(subnet, functools.partial(network.pull, subnet)),
            codec,
            content,
            flat,
            trained,
        )

    return make


def values_of(frames: Any) -> Tensor:
    return torch.frombuffer(bytearray().join(frames), dtype=torch.float32)


def test_parts_in_any_order_make_what_was_sent(world: Callable[..., World]) -> None:
    setup = world()
    middle = len(setup.content) // 2
    assert setup.part(middle, len(setup.content))
    assert setup.part(0, middle)
    decoded = setup.reassembly.read(setup.header(), [], setup.baseline)
    assert (decoded.fault, decoded.norm_fraction, decoded.missing_rows) == (None, 1.0, None)
    assert torch.equal(values_of(decoded.payload.frames), setup.codec.decode(setup.content, setup.flat.clone()))
    at_once = setup.reassembly.read(setup.header(), [memoryview(setup.content.numpy())], setup.baseline)
    assert at_once.payload.checksum == decoded.payload.checksum


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_or_incomplete_push_is_refused(world: Callable[..., World], whole: bool) -> None:
    setup = world()
    setup.part(0, len(setup.content) if whole else len(setup.content) - 200)
    fault = setup.reassembly.read(setup.header(checksum=1), [], setup.baseline).fault
    assert fault is (Reply.CORRUPT if whole else Reply.WRONG_SHAPE)


def test_the_more_has_arrived_the_more_is_salvaged(world: Callable[..., World]) -> None:
    setup = world()
    fractions, off = [], []
    for stop in (
        setup.codec.first_row - 1,
        setup.codec.first_row + 700,
        3 * len(setup.content) // 4,
        len(setup.content),
    ):
        setup.part(0, stop)
        fractions.append(setup.reassembly.norm_fraction(7, STEPS, setup.baseline.subnet))
        if fractions[-1]:
            payload = setup.reassembly.salvaged(setup.reassembly.arrived(7, STEPS, setup.baseline), setup.baseline)
            off.append(float((values_of(payload.frames) - setup.trained).square().sum()))
            assert payload.train_seconds == 1.5
    assert fractions[0] == 0
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1)
    assert off == sorted(off, reverse=True)
    setup.reassembly.drop(7)
    assert setup.reassembly.norm_fraction(7, STEPS, setup.baseline.subnet) == 0


def test_without_salvage_and_without_codes_nothing_is_of_use_before_it_is_whole(world: Callable[..., World]) -> None:
    for setup in (world(salvage=False), world(push="bf16")):
        setup.part(0, len(setup.content) - 1)
        assert setup.reassembly.norm_fraction(7, STEPS, setup.baseline.subnet) == 0
        assert not setup.reassembly.is_enough(7, STEPS, setup.baseline.subnet)


def test_pieces_in_any_order_are_what_their_whole_rows_are(world: Callable[..., World]) -> None:
    setup = world()
    pieces = np.ones(-(-len(setup.content) // PIECE), bool)
    arguments = setup.header(), memoryview(setup.content.numpy()), pieces, PIECE, setup.baseline.subnet
    pieces[0] = False
    setup.reassembly.note(*arguments)
    assert setup.reassembly.norm_fraction(7, STEPS, setup.baseline.subnet) == 0  # without the head nothing is of use
    pieces[0], pieces[-3] = True, False
    setup.reassembly.note(*arguments)
    assert 0.5 < setup.reassembly.norm_fraction(7, STEPS, setup.baseline.subnet) < 1
    partial = setup.reassembly.arrived(7, STEPS, setup.baseline)
    assert 8 <= (~partial.received).sum() <= 12


def test_a_checkpoint_that_is_arriving_is_no_update(world: Callable[..., World]) -> None:
    """Not even where as many of its bytes have arrived as an update has."""
    setup = world(loss=0.3)
    checkpoint = torch.rand(setup.reassembly._program.buffer_size(setup.baseline.subnet, persistent=False))
    header, frames = setup.header(update=False), [memoryview(checkpoint.numpy()).cast("B")]
    assert setup.reassembly.hold(header, 0, frames, setup.baseline.subnet)
    assert setup.reassembly.norm_fraction(7, STEPS, setup.baseline.subnet) == 0
    assert not setup.reassembly.is_enough(7, STEPS, setup.baseline.subnet)
    setup.part(0, len(setup.content))
    assert setup.reassembly.read(setup.header(), [], setup.baseline).fault is None


def test_an_update_in_datagrams_and_then_in_parts_is_the_larger_of_both(world: Callable[..., World]) -> None:
    setup = world()
    pieces = np.ones(-(-len(setup.content) // PIECE), bool)
    pieces[-3:] = False
    setup.reassembly.note(setup.header(), memoryview(setup.content.numpy()), pieces, PIECE, setup.baseline.subnet)
    setup.part(0, len(setup.content))
    decoded = setup.reassembly.read(setup.header(), [], setup.baseline)
    assert (decoded.fault, decoded.missing_rows) == (None, None)


def test_only_the_persistent_part_of_a_checkpoint_is_an_update() -> None:
    checkpoint = Payload([memoryview(bytes(range(10))), memoryview(bytes(range(10, 20)))], 2.5, 0)
    cut = persistent_part(checkpoint, 13)
    assert b"".join(cut.frames) == bytes(range(13))
    assert (cut.train_seconds, cut.checksum) == (2.5, checksum(cut.frames))
    assert persistent_part(checkpoint, 20) is checkpoint


def test_a_bounded_part_may_arrive_later_and_is_named(world: Callable[..., World]) -> None:
    setup = world(loss=0.2)
    rows = setup.codec.rows
    few = setup.codec.first_row + 128 * (rows // 2)
    setup.part(0, few)
    assert not setup.reassembly.is_enough(7, STEPS, setup.baseline.subnet)
    assert setup.reassembly.read(setup.header(), [], setup.baseline).fault is Reply.WRONG_SHAPE
    many = setup.codec.first_row + 128 * (rows - rows // 10)
    setup.part(few, many)
    assert setup.reassembly.is_enough(7, STEPS, setup.baseline.subnet)
    decoded = setup.reassembly.read(setup.header(), [], setup.baseline)
    assert decoded.fault is None
    assert decoded.missing_rows is not None
    assert (~decoded.missing_rows.received).sum() == rows // 10
    assert 0.98 <= decoded.norm_fraction < 1


def test_the_same_bound_holds_for_pieces(world: Callable[..., World]) -> None:
    setup = world(loss=0.2)
    rule = setup.reassembly.acceptance_rule(setup.header(), len(setup.content), setup.baseline.subnet)
    assert isinstance(rule, AcceptanceRule)
    assert (rule.required_bytes, rule.min_fraction) == (setup.codec.first_row, 0.8)
    assert rule.is_acceptable
    pieces = np.ones(-(-len(setup.content) // PIECE), bool)
    content = memoryview(setup.content.numpy())
    assert rule.is_acceptable(content, pieces, PIECE)
    pieces[-1] = False
    assert rule.is_acceptable(content, pieces, PIECE)
    pieces[len(pieces) // 2 :] = False
    assert not rule.is_acceptable(content, pieces, PIECE)
    size = 4 * setup.reassembly._program.buffer_size(setup.baseline.subnet, persistent=False)
    assert setup.reassembly.acceptance_rule(setup.header(update=False), size, setup.baseline.subnet) == AcceptanceRule(
        size, 1.0
    )
    assert setup.reassembly.acceptance_rule(setup.header(), size, setup.baseline.subnet) is Reply.WRONG_SHAPE


def test_an_update_of_fewer_steps_is_taken_under_salvage_alone(world: Callable[..., World]) -> None:
    for salvage in (True, False):
        setup = world(salvage=salvage)
        setup.reassembly.hold(setup.header(steps=2), 0, [memoryview(setup.content.numpy())], setup.baseline.subnet)
        fault = setup.reassembly.read(setup.header(steps=2), [], setup.baseline).fault
        assert fault is (None if salvage else Reply.WRONG_SHAPE)


def test_what_cannot_be_a_push_is_refused(world: Callable[..., World]) -> None:
    setup = world()
    frames = [memoryview(setup.content.numpy())]
    for header in (setup.header(steps=0), setup.header(steps=STEPS + 1), setup.header(update=False)):
        assert setup.reassembly.read(header, frames, setup.baseline).fault is Reply.WRONG_SHAPE
    assert setup.reassembly.read(setup.header(), frames, None).fault is Reply.WRONG_SHAPE
    spoilt = setup.content.clone()
    spoilt[: setup.codec.first_row] = 255
    setup.content = spoilt
    decoded = setup.reassembly.read(setup.header(), [memoryview(spoilt.numpy())], setup.baseline)
    assert (decoded.fault, decoded.where) == (Reply.NOT_FINITE, setup.baseline.subnet.layout.tensors[0].name)
    setup.part(0, len(spoilt) - 128)
    assert setup.reassembly.norm_fraction(7, STEPS, setup.baseline.subnet) == 0
