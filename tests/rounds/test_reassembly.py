"""What comes of a push: whole, in parts, scattered, broken off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from idletrain.exchange.codec import Codec
from idletrain.exchange.messages import AcceptanceRule, LeaseId, PushHeader, Reply, checksum
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
    """A subnet, its update as it travels, and an inbox."""

    inbox: Reassembly
    begun: Baseline
    codec: Codec
    content: Tensor
    flat: Tensor
    trained: Tensor

    def header(self, **other: Any) -> PushHeader:
        asked = {"steps": STEPS, "train_seconds": 1.5, "checksum": checksum([self.content.numpy().data.cast("B")])}
        return PushHeader(LEASE, **(asked | other))

    def part(self, start: int, stop: int) -> bool:
        frames = [memoryview(self.content[start:stop].numpy())]
        return self.inbox.hold(self.header(), start, frames, self.begun.subnet)


@pytest.fixture
def world(small_program: Callable[..., Prepared]) -> Callable[..., World]:
    def make(*, salvage: bool = True, push: str = "int8", loss: float = 0.0) -> World:
        prepared = small_program(widths=WIDTHS, norm="batch", local_steps=STEPS, exchange={"push": push, "loss": loss})
        program = prepared.program
        (subnet, _) = program.subnets(0, (0.5, 0.5))
        network = Network.of(program, prepared.network)
        flat = network.pull(subnet)
        trained = flat + 0.01 * torch.randn(len(flat), generator=torch.Generator().manual_seed(0))
        codec = encoding.codec(program, subnet, "push")
        assert codec
        content = encoding.encode_update(program, subnet, trained, flat, LEASE)
        return World(Reassembly(program, salvage=salvage), Baseline(subnet, network), codec, content, flat, trained)

    return make


def values_of(frames: Any) -> Tensor:
    return torch.frombuffer(bytearray().join(frames), dtype=torch.float32)


def test_parts_in_any_order_make_what_was_sent(world: Callable[..., World]) -> None:
    made = world()
    middle = len(made.content) // 2
    assert made.part(middle, len(made.content))
    assert made.part(0, middle)
    taken = made.inbox.read(made.header(), [], made.begun)
    assert (taken.fault, taken.norm_fraction, taken.missing_rows) == (None, 1.0, None)
    assert torch.equal(values_of(taken.payload.frames), made.codec.decode(made.content, made.flat))
    at_once = made.inbox.read(made.header(), [memoryview(made.content.numpy())], made.begun)
    assert at_once.payload.checksum == taken.payload.checksum


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_damaged_or_not_whole_is_refused(world: Callable[..., World], whole: bool) -> None:
    made = world()
    made.part(0, len(made.content) if whole else len(made.content) - 200)
    fault = made.inbox.read(made.header(checksum=1), [], made.begun).fault
    assert fault is (Reply.CORRUPT if whole else Reply.WRONG_SHAPE)


def test_the_more_has_come_the_more_is_covered_and_salvaged(world: Callable[..., World]) -> None:
    made = world()
    asked, off = [], []
    for stop in (made.codec.first_row - 1, made.codec.first_row + 700, 3 * len(made.content) // 4, len(made.content)):
        made.part(0, stop)
        asked.append(made.inbox.norm_fraction(7, STEPS, made.begun.subnet))
        if asked[-1]:
            payload = made.inbox.salvaged(made.inbox.arrived(7, STEPS, made.begun), made.begun)
            off.append(float((values_of(payload.frames) - made.trained).square().sum()))
            assert payload.train_seconds == 1.5
    assert asked[0] == 0
    assert asked == sorted(asked)
    assert asked[-1] == pytest.approx(1)
    assert off == sorted(off, reverse=True)
    made.inbox.drop(7)
    assert made.inbox.norm_fraction(7, STEPS, made.begun.subnet) == 0


def test_without_salvage_and_without_codes_nothing_is_of_use_before_it_is_whole(world: Callable[..., World]) -> None:
    for made in (world(salvage=False), world(push="bf16")):
        made.part(0, len(made.content) - 1)
        assert made.inbox.norm_fraction(7, STEPS, made.begun.subnet) == 0
        assert not made.inbox.is_enough(7, STEPS, made.begun.subnet)


def test_pieces_in_any_order_are_what_their_whole_rows_are(world: Callable[..., World]) -> None:
    made = world()
    pieces = np.ones(-(-len(made.content) // PIECE), bool)
    arguments = made.header(), memoryview(made.content.numpy()), pieces, PIECE, made.begun.subnet
    pieces[0] = False
    made.inbox.note(*arguments)
    assert made.inbox.norm_fraction(7, STEPS, made.begun.subnet) == 0  # without the head nothing is of use
    pieces[0], pieces[-3] = True, False
    made.inbox.note(*arguments)
    assert 0.5 < made.inbox.norm_fraction(7, STEPS, made.begun.subnet) < 1
    came = made.inbox.arrived(7, STEPS, made.begun)
    assert 8 <= (~came.received).sum() <= 12


def test_a_mark_that_is_coming_is_no_update(world: Callable[..., World]) -> None:
    """Not even where as many of its bytes have come as an update has."""
    made = world(loss=0.3)
    mark = torch.rand(made.inbox._program.buffer_size(made.begun.subnet, persistent=False))
    header, frames = made.header(update=False), [memoryview(mark.numpy()).cast("B")]
    assert made.inbox.hold(header, 0, frames, made.begun.subnet)
    assert made.inbox.norm_fraction(7, STEPS, made.begun.subnet) == 0
    assert not made.inbox.is_enough(7, STEPS, made.begun.subnet)
    made.part(0, len(made.content))
    assert made.inbox.read(made.header(), [], made.begun).fault is None


def test_what_came_as_datagrams_and_then_in_parts_is_the_larger_of_both(world: Callable[..., World]) -> None:
    made = world()
    pieces = np.ones(-(-len(made.content) // PIECE), bool)
    pieces[-3:] = False
    made.inbox.note(made.header(), memoryview(made.content.numpy()), pieces, PIECE, made.begun.subnet)
    made.part(0, len(made.content))
    taken = made.inbox.read(made.header(), [], made.begun)
    assert (taken.fault, taken.missing_rows) == (None, None)


def test_of_a_mark_only_what_travels_is_an_update() -> None:
    mark = Payload([memoryview(bytes(range(10))), memoryview(bytes(range(10, 20)))], 2.5, 0)
    cut = persistent_part(mark, 13)
    assert b"".join(cut.frames) == bytes(range(13))
    assert (cut.train_seconds, cut.checksum) == (2.5, checksum(cut.frames))
    assert persistent_part(mark, 20) is mark


def test_a_bounded_part_may_come_later_and_is_named(world: Callable[..., World]) -> None:
    made = world(loss=0.2)
    rows = made.codec.rows
    few = made.codec.first_row + 128 * (rows // 2)
    made.part(0, few)
    assert not made.inbox.is_enough(7, STEPS, made.begun.subnet)
    assert made.inbox.read(made.header(), [], made.begun).fault is Reply.WRONG_SHAPE
    many = made.codec.first_row + 128 * (rows - rows // 10)
    made.part(few, many)
    assert made.inbox.is_enough(7, STEPS, made.begun.subnet)
    taken = made.inbox.read(made.header(), [], made.begun)
    assert taken.fault is None
    assert taken.missing_rows is not None
    assert (~taken.missing_rows.received).sum() == rows // 10
    assert 0.98 <= taken.norm_fraction < 1


def test_the_same_bound_holds_for_pieces(world: Callable[..., World]) -> None:
    made = world(loss=0.2)
    bound = made.inbox.acceptance_rule(made.header(), len(made.content), made.begun.subnet)
    assert isinstance(bound, AcceptanceRule)
    assert (bound.required_bytes, bound.min_fraction) == (made.codec.first_row, 0.8)
    assert bound.is_acceptable
    pieces = np.ones(-(-len(made.content) // PIECE), bool)
    content = memoryview(made.content.numpy())
    assert bound.is_acceptable(content, pieces, PIECE)
    pieces[-1] = False
    assert bound.is_acceptable(content, pieces, PIECE)
    pieces[len(pieces) // 2 :] = False
    assert not bound.is_acceptable(content, pieces, PIECE)
    size = 4 * made.inbox._program.buffer_size(made.begun.subnet, persistent=False)
    assert made.inbox.acceptance_rule(made.header(update=False), size, made.begun.subnet) == AcceptanceRule(size, 1.0)
    assert made.inbox.acceptance_rule(made.header(), size, made.begun.subnet) is Reply.WRONG_SHAPE


def test_an_update_of_fewer_steps_is_taken_under_salvage_alone(world: Callable[..., World]) -> None:
    for salvage in (True, False):
        made = world(salvage=salvage)
        made.inbox.hold(made.header(steps=2), 0, [memoryview(made.content.numpy())], made.begun.subnet)
        fault = made.inbox.read(made.header(steps=2), [], made.begun).fault
        assert fault is (None if salvage else Reply.WRONG_SHAPE)


def test_what_cannot_be_a_push_is_refused(world: Callable[..., World]) -> None:
    made = world()
    frames = [memoryview(made.content.numpy())]
    for header in (made.header(steps=0), made.header(steps=STEPS + 1), made.header(update=False)):
        assert made.inbox.read(header, frames, made.begun).fault is Reply.WRONG_SHAPE
    assert made.inbox.read(made.header(), frames, None).fault is Reply.WRONG_SHAPE
    spoilt = made.content.clone()
    spoilt[: made.codec.first_row] = 255
    made.content = spoilt
    taken = made.inbox.read(made.header(), [memoryview(spoilt.numpy())], made.begun)
    assert (taken.fault, taken.where) == (Reply.NOT_FINITE, made.begun.subnet.layout.tensors[0].name)
    made.part(0, len(spoilt) - 128)
    assert made.inbox.norm_fraction(7, STEPS, made.begun.subnet) == 0
