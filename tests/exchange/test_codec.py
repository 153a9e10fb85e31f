"""What travels in fewer bytes: how far off it is, on average not at all, and never a surprise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.exchange.codec import BLOCK, LEVELS, Codec, K, spans_of

KINDS = ("bf16", "int8", "int4")
SIZE = 3 * K + 17
WHOLE = ((0, SIZE),)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[tuple[int, int], ...], int]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 700), st.booleans()), max_size=6))
    return spans_of(sizes), sum(size for size, _ in sizes)


@settings(deadline=None, max_examples=60)
@given(layouts(), st.sampled_from(KINDS), st.booleans(), st.integers(0, 9))
def test_what_is_coded_is_near_and_what_is_not_is_the_same(
    layout: tuple[tuple[tuple[int, int], ...], int], kind: str, from_base: bool, seed: int
) -> None:
    spans, size = layout
    codec = Codec(kind, spans, size)
    flat = torch.randn(size, generator=chance(seed))
    base = torch.randn(size, generator=chance(seed + 1)) if from_base else None
    content = codec.encode(flat, base, chance(seed) if kind != "bf16" else None)
    assert content.dtype == torch.uint8
    assert len(content) == codec.nbytes
    back = codec.decode(content, base)
    coded = torch.zeros(size, dtype=torch.bool)
    for start, stop in spans:
        coded[start:stop] = True
    assert torch.equal(back[~coded], flat[~coded])
    if coded.any():
        change = flat if base is None else flat - base
        step = change[coded].abs().max() / LEVELS.get(kind, 128)
        assert (back - flat)[coded].abs().max() <= 1.01 * step + 1e-6


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounding_by_chance_is_right_on_average_and_the_same_for_the_same_generator(kind: str) -> None:
    codec, flat = Codec(kind, WHOLE, SIZE), torch.randn(SIZE, generator=chance(5))
    backs = torch.stack([codec.decode(codec.encode(flat, None, chance(seed))) for seed in range(400)])
    step = flat.abs().max() / LEVELS[kind]
    noise = step / 2 / 400**0.5  # a rounding's deviation is half a step at most
    assert (backs.mean(0) - flat).abs().max() < 5 * noise + step / 256
    assert (backs.mean(0) - flat).mean().abs() < 4 * noise / SIZE**0.5 + step / 512
    assert torch.equal(codec.encode(flat, None, chance(3)), codec.encode(flat, None, chance(3)))
    assert not torch.equal(codec.encode(flat, None, chance(3)), codec.encode(flat, None, chance(4)))


def test_to_the_nearest_is_off_by_half_a_step_at_most_and_whole_steps_by_nothing() -> None:
    codec, flat = Codec("int8", WHOLE, SIZE), torch.randn(SIZE, generator=chance(6))
    steps = torch.nn.functional.pad(flat, (0, 4 * K - SIZE)).view(4, K).abs().amax(1) / 127
    limit = steps.repeat_interleave(K)[:SIZE] / 2
    assert ((codec.decode(codec.encode(flat)) - flat).abs() <= 1.001 * limit).all()
    whole = torch.randint(-7, 8, (SIZE,), generator=chance(7)).float()
    whole[::K] = 7
    assert torch.equal(
        Codec("int4", WHOLE, SIZE).decode(Codec("int4", WHOLE, SIZE).encode(whole, None, chance())), whole
    )


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_denormals_and_many_blocks(kind: str) -> None:
    size = (2 * BLOCK + 3) * K + 1
    codec = Codec(kind, ((0, size),), size)
    zeros = torch.zeros(size)
    assert torch.equal(codec.decode(codec.encode(zeros, None, chance())), zeros)
    tiny = torch.full((size,), 1e-39)
    assert codec.decode(codec.encode(tiny, None, chance())).abs().max() <= 1e-30
    flat = torch.randn(size)
    assert (codec.decode(codec.encode(flat)) - flat).abs().max() < 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_on_the_other_side(kind: str, odd: float) -> None:
    codec, flat = Codec(kind, WHOLE, SIZE), torch.randn(SIZE)
    flat[K + 3] = odd
    assert not codec.decode(codec.encode(flat, None, chance())).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_as_few_as_they_should_be(kind: str) -> None:
    size = 1 << 20
    share = Codec(kind, ((0, size),), size).nbytes / (4 * size)
    assert share == pytest.approx({"bf16": 0.5, "int8": 0.254, "int4": 0.129}[kind], abs=0.001)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.binary(min_size=0, max_size=4000))
def test_any_bytes_are_values_or_refused(kind: str, content: bytes) -> None:
    codec = Codec(kind, ((5, SIZE),), SIZE)
    given_bytes = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    )
    if len(content) != codec.nbytes:
        with pytest.raises(ValueError, match="bytes, where"):
            codec.decode(given_bytes)
    filled = torch.frombuffer(bytearray((content + bytes(codec.nbytes))[: codec.nbytes]), dtype=torch.uint8)
    assert codec.decode(filled).shape == (SIZE,)
