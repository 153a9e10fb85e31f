"""What out-of-core training of a subnet takes, foreseen."""

from __future__ import annotations

from collections.abc import Callable

from idletrain.nn.outofcore.executing.requirements import OutOfCoreForecast
from idletrain.nn.prepare import Prepared


def test_a_wider_subnet_takes_more_and_less_memory_takes_longer(small_program: Callable[..., Prepared]) -> None:
    program = small_program(widths=(6, 2048, 2048, 3), norm="batch", batch_size=32).program
    foresight = OutOfCoreForecast(program)
    assert foresight.least_bytes(0.25) < foresight.least_bytes(1.0)
    assert foresight.profile(1.0).compute_seconds > foresight.profile(0.25).compute_seconds
    roomy = foresight.seconds(1.0, 1 << 40)
    assert roomy == foresight.profile(1.0).compute_seconds
    assert foresight.seconds(1.0, 1 << 20) == float("inf")
    assert foresight.profile(1.0).across_batch.endswith("uses the statistics of the whole batch")
    assert foresight.plan(1.0, 1 << 40).unit_modes == ("K",) * len(foresight.profile(1.0).units)
