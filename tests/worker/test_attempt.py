"""What a subnet is trained in: memory that begins where torch's own does, so that attempts end in the same bits.

Whole attempts are in tests/chaos and in test_out_of_core.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from idletrain.worker.attempt import ALIGNMENT_BYTES, aligned, all_slots


@pytest.mark.parametrize("size", [1, 7, 1000, 26_388, 300_001])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_buffer_begins_where_torch_s_own_would(size: int, slots: int) -> None:
    received = np.zeros(4 * size + ALIGNMENT_BYTES, np.uint8)
    first = 4 - received.ctypes.data % ALIGNMENT_BYTES % 4
    pulled = torch.from_numpy(received[first : first + 4 * size].view(np.float32)).copy_(torch.arange(float(size)))
    flat = all_slots(pulled, slots * size)
    assert flat.data_ptr() % ALIGNMENT_BYTES == 0
    assert torch.equal(flat[:size], torch.arange(float(size)))
    assert torch.equal(flat[size:], torch.zeros((slots - 1) * size))


def test_a_product_is_the_same_bits_wherever_its_matrix_was_received() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(64, 64, generator=generator), torch.randn(64, generator=generator)
    room = torch.empty(64 * 64 + 32)
    first = -room.data_ptr() % ALIGNMENT_BYTES // 4
    for offset in range(ALIGNMENT_BYTES // 4):
        received = room[first + offset : first + offset + 64 * 64].view(64, 64)
        received.copy_(matrix)
        assert (aligned(received) is received) == (offset == 0)
        assert torch.equal(aligned(received) @ vector, matrix @ vector)
