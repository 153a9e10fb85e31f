"""Test the profile of a network."""

from __future__ import annotations

from dataclasses import replace

from idletrain.nn.outofcore.planning.profile import Held, micro_batch
from outofcore.made_up import made_up


def test_a_micro_batch_takes_its_part_of_time_and_activations_and_all_of_the_parameters() -> None:
    whole = made_up(3, 0, parameters=True)
    last = replace(whole.units[2], held=(Held(1, 100),), waiting_bytes=200)
    whole = replace(whole, units=(*whole.units[:2], last))
    quarter = micro_batch(whole, 4)
    assert (quarter.units[2].held, quarter.units[2].waiting_bytes) == ((Held(1, 25),), 50)
    assert abs(quarter.compute_seconds - whole.compute_seconds / 4) < 1e-12
    for part, unit in zip(quarter.units, whole.units, strict=True):
        assert part.inner_bytes == -(-unit.inner_bytes // 4)
        assert part.backward_bytes == -(-unit.backward_bytes // 4)
        assert (part.parameter_bytes, part.state_bytes) == (unit.parameter_bytes, unit.state_bytes)
