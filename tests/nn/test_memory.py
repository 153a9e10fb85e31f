"""What training a subnet takes, known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idletrain.nn.memory import SCRATCH_BYTES, subnet_need, subnet_of_share
from idletrain.nn.prepare import Prepared


def test_need_grows_with_the_share_and_never_less_than_the_scratch(small_program: Callable[..., Prepared]) -> None:
    need = subnet_need(small_program(widths=(6, 64, 64, 3)).program)
    needs = [need(share / 16) for share in range(1, 17)]
    assert needs == sorted(needs)
    assert needs[0] < needs[-1]
    assert needs[0] > SCRATCH_BYTES


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        ({"name": "sgd", "lr": 0.1}, 1),
        ({"name": "sgd", "lr": 0.1, "momentum": 0.9}, 2),
        ({"name": "adamw", "lr": 0.1}, 3),
    ],
)
def test_need_counts_what_is_pulled_kept_sent_and_differentiated(
    small_program: Callable[..., Prepared], optimizer: dict[str, Any], slots: int
) -> None:
    program = small_program(widths=(6, 64, 64, 3), optimizer=optimizer).program
    whole = 4 * (6 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3)
    assert len(program.slots) == slots
    assert subnet_need(program)(1.0) - SCRATCH_BYTES >= (2 * slots + 2) * whole


def test_need_counts_every_layer_s_output_for_a_batch(small_program: Callable[..., Prepared]) -> None:
    one, eight = (subnet_need(small_program(widths=(6, 64, 64, 3), batch_size=b).program)(1.0) for b in (2, 16))
    outputs = 6 + 64 + 64 + 64 + 64 + 3  # flatten, linear, ReLU, linear, ReLU, linear
    assert eight - one == 2 * 4 * outputs * 14


def test_a_share_is_of_every_group(small_program: Callable[..., Prepared]) -> None:
    subnet = subnet_of_share(small_program(widths=(6, 64, 32, 3)).program, 0.25)
    assert subnet.shapes == ((16, 6), (16,), (8, 16), (8,), (3, 8), (3,))
