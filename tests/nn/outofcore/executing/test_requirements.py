"""Test the forecast of out-of-core training of a subnet."""

from __future__ import annotations

from collections.abc import Callable

from idletrain.nn.outofcore.executing.requirements import OutOfCoreForecast
from idletrain.nn.prepare import Prepared


def test_a_wider_subnet_takes_more_and_less_memory_takes_longer(small_program: Callable[..., Prepared]) -> None:
    program = small_program(widths=(6, 2048, 2048, 3), norm="batch", batch_size=32).program
    forecast = OutOfCoreForecast(program)
    assert forecast.least_bytes(0.25) < forecast.least_bytes(1.0)
    assert forecast.profile(1.0).compute_seconds > forecast.profile(0.25).compute_seconds
    roomy = forecast.seconds(1.0, 1 << 40)
    assert roomy == forecast.profile(1.0).compute_seconds
    assert forecast.seconds(1.0, 1 << 20) == float("inf")
    assert forecast.profile(1.0).across_batch.endswith("uses the statistics of the whole batch")
    assert forecast.plan(1.0, 1 << 40).unit_modes == ("K",) * len(forecast.profile(1.0).units)
