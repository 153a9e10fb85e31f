"""Random numbers are keyed by what they are for."""

from __future__ import annotations

from idletrain.nn.ist.randomness import generator, key


def test_keys_are_64_bits_and_the_same_everywhere() -> None:
    assert key(0, "order", 0) == 6942163024847554866
    assert all(0 <= key(seed, "x") < 2**64 for seed in range(50))


def test_every_label_makes_another_stream() -> None:
    keys = {key(0), key(1), key(0, "a"), key(0, "b"), key(0, "a", 1), key(0, "a", 2), key(0, "a", "b"), key(0, "ab")}
    assert len(keys) == 8


def test_a_generator_starts_at_the_same_number_each_time() -> None:
    assert generator(7, "x", 3).integers(1 << 60) == generator(7, "x", 3).integers(1 << 60)
    assert generator(7, "x", 3).integers(1 << 60) != generator(7, "x", 4).integers(1 << 60)
