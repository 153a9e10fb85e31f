"""A subnet's values keep their order, and lie in one flat buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from idletrain.nn.ist.groups import Group, Layout, TensorLayout
from idletrain.nn.ist.subnets import cut, views


def test_views_share_the_flat_buffer_s_memory() -> None:
    flat = torch.zeros(10)
    first, second = views(flat, [(2, 3), (4,)])
    first.fill_(1)
    second.fill_(2)
    assert flat.tolist() == [1] * 6 + [2] * 4


@pytest.mark.parametrize("members", [[True, False, True], [False, True, False]])
def test_a_cut_keeps_the_order_of_positions(members: list[bool]) -> None:
    """A flatten after the cut must find the pixels of a channel beside each other."""
    layout = Layout((Group("a", 3),), (TensorLayout("flattened", (6,), (np.arange(3).repeat(2),), trainable=True),))
    (positions,) = cut(layout, np.array(members)).positions[0]
    assert positions is not None
    assert positions.tolist() == [i for i in range(6) if members[i // 2]]
