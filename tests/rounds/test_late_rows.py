"""Rows that come late change what they would have changed in time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from idletrain.exchange.codec import ROW_BYTES
from idletrain.exchange.messages import LeaseId, PartialPayload
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.rounds.late_rows import LateRows
from idletrain.worker import encoding
from idletrain.worker.encoding import ROUNDS_KEPT

LEASE = LeaseId("run", 1, 3, 1, 7)
WIDTHS = (40, 300, 300, 3)


def test_what_is_taken_without_some_rows_and_those_make_the_whole(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(widths=WIDTHS, norm="batch", exchange={"push": "int8"})
    program = prepared.program
    (subnet, _) = program.subnets(3, (0.5, 0.5))
    flat = Network.of(program, prepared.network).pull(subnet)
    content = encoding.encode_update(program, subnet, flat + 0.01 * torch.randn(len(flat)), flat, LEASE)
    codec = encoding.codec(program, subnet, "push")
    assert codec
    got = np.random.default_rng(0).random(codec.rows) < 0.8
    rows = content[codec.first_row :].view(-1, ROW_BYTES)
    came = content.clone()
    came[codec.first_row :].view(-1, ROW_BYTES)[torch.from_numpy(~got)] = 0
    owed = LateRows(program)
    owed.add(LEASE, subnet, PartialPayload(memoryview(came.numpy()), got, 1.0))
    late = rows[torch.from_numpy(~got)].contiguous()
    told = np.unpackbits(np.frombuffer(owed.missing(LEASE), np.uint8), count=codec.rows, bitorder="little")
    assert np.array_equal(told.astype(bool), ~got)
    lacking = owed.pop(LEASE)
    assert lacking
    change = owed.change(lacking, memoryview(late.numpy()).cast("B"))
    assert change is not None
    in_time = codec.decode(content, flat)[: subnet.parameters]
    taken = codec.decode(came, flat, got)[: subnet.parameters]
    assert not torch.equal(taken, in_time)
    assert torch.allclose(taken + change, in_time, atol=1e-6)
    assert owed.pop(LEASE) is None  # once
    assert owed.missing(LEASE) == b""


def test_rows_that_nobody_owes_or_too_few_change_nothing(small_program: Callable[..., Prepared]) -> None:
    program = small_program(widths=WIDTHS, norm="batch", exchange={"push": "int8"}).program
    (subnet, _) = program.subnets(3, (0.5, 0.5))
    codec = encoding.codec(program, subnet, "push")
    assert codec
    got = np.arange(codec.rows) < codec.rows - 2
    owed = LateRows(program)
    owed.add(LEASE, subnet, PartialPayload(memoryview(bytearray(codec.nbytes)), got, 1.0))
    assert owed.pop(LeaseId("run", 1, 3, 0, 7)) is None
    later = LeaseId("run", 1, 4 + ROUNDS_KEPT, 0, 9)
    lacking = owed.pop(LEASE)
    assert lacking
    assert owed.change(lacking, memoryview(bytearray(ROW_BYTES))) is None
    assert owed.change(lacking, memoryview(bytearray(2 * ROW_BYTES))) is not None
    owed.add(LEASE, subnet, lacking.partial)
    owed.add(later, subnet, lacking.partial)
    assert owed.pop(LEASE) is None
    assert owed.pop(later)
