"""Late rows change the values by as much as they would have in time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from idletrain.exchange.codec import ROW_BYTES
from idletrain.exchange.messages import LeaseId, PartialPayload
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.rounds.late_rows import LateRows
from idletrain.worker import encoding
from idletrain.worker.encoding import ROUNDS_KEPT

LEASE = LeaseId("run", 1, 3, 1, 7)
WIDTHS = (40, 300, 300, 3)


def test_an_update_without_some_rows_and_its_late_rows_make_the_whole(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(widths=WIDTHS, norm="batch", exchange={"push": "int8"})
    program = prepared.program
    (subnet, _) = program.subnets(3, by_neurons((0.5, 0.5)))
    flat = Network.of(program, prepared.network).pull(subnet)
    content = encoding.encode_update(program, subnet, flat + 0.01 * torch.randn(len(flat)), flat, LEASE)
    codec = encoding.codec(program, subnet, "push")
    assert codec
    received = np.random.default_rng(0).random(codec.rows) < 0.8
    rows = content[codec.first_row :].view(-1, ROW_BYTES)
    arrived = content.clone()
    arrived[codec.first_row :].view(-1, ROW_BYTES)[torch.from_numpy(~received)] = 0
    late_rows = LateRows(program)
    late_rows.add(LEASE, subnet, PartialPayload(memoryview(arrived.numpy()), received, 1.0))
    late = rows[torch.from_numpy(~received)].contiguous()
    missing = np.unpackbits(np.frombuffer(late_rows.missing(LEASE), np.uint8), count=codec.rows, bitorder="little")
    assert np.array_equal(missing.astype(bool), ~received)
    incomplete = late_rows.pop(LEASE)
    assert incomplete
    change = late_rows.change(incomplete, memoryview(late.numpy()).cast("B"))
    assert change is not None
    in_time = codec.decode(content, flat.clone())[: subnet.parameters]
    accepted = codec.decode(arrived, flat.clone(), received)[: subnet.parameters]
    assert not torch.equal(accepted, in_time)
    assert torch.allclose(accepted + change, in_time, atol=1e-6)
    assert late_rows.pop(LEASE) is None  # once
    assert late_rows.missing(LEASE) == b""


def test_rows_that_are_not_missing_or_too_few_change_nothing(small_program: Callable[..., Prepared]) -> None:
    program = small_program(widths=WIDTHS, norm="batch", exchange={"push": "int8"}).program
    (subnet, _) = program.subnets(3, by_neurons((0.5, 0.5)))
    codec = encoding.codec(program, subnet, "push")
    assert codec
    received = np.arange(codec.rows) < codec.rows - 2
    late_rows = LateRows(program)
    late_rows.add(LEASE, subnet, PartialPayload(memoryview(bytearray(codec.nbytes)), received, 1.0))
    assert late_rows.pop(LeaseId("run", 1, 3, 0, 7)) is None
    later = LeaseId("run", 1, 4 + ROUNDS_KEPT, 0, 9)
    incomplete = late_rows.pop(LEASE)
    assert incomplete
    assert late_rows.change(incomplete, memoryview(bytearray(ROW_BYTES))) is None
    assert late_rows.change(incomplete, memoryview(bytearray(2 * ROW_BYTES))) is not None
    late_rows.add(LEASE, subnet, incomplete.partial)
    late_rows.add(later, subnet, incomplete.partial)
    assert late_rows.pop(LEASE) is None
    assert late_rows.pop(later)
