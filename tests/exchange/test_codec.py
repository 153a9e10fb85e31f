"""What travels in fewer bytes: how far off it is, on average not at all, and of use before it is whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.exchange.codec import ROW_BYTES, VALUES_PER_CHUNK, Codec, spans_of
from idletrain.exchange.quantize_kernels import BATCH

KINDS = ("bf16", "int8", "int4")
LEVELS = {"bf16": 128, "int8": 119, "int4": 7}
SCALE = 1 + 2**-7  # a scale is rounded up to eight bits
SIZE = 3 * VALUES_PER_CHUNK + 17
WHOLE = ((0, SIZE),)


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def uneven(chunks: int, seed: int = 0) -> torch.Tensor:
    """Chunks of very different norms, in no order."""
    spread = torch.rand(chunks, 1, generator=torch.Generator().manual_seed(seed)).pow(4) + 1e-3
    return (normal(chunks * VALUES_PER_CHUNK, seed).view(chunks, VALUES_PER_CHUNK) * spread).view(-1)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[tuple[int, int], ...], int]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 700), st.booleans()), max_size=6))
    return spans_of(sizes), sum(size for size, _ in sizes)


@settings(deadline=None, max_examples=60)
@given(layouts(), st.sampled_from(KINDS), st.booleans(), st.booleans(), st.integers(0, 9))
def test_coded_values_are_near_and_others_are_the_same(
    layout: tuple[tuple[tuple[int, int], ...], int], kind: str, from_base: bool, ranked: bool, seed: int
) -> None:
    spans, size = layout
    codec = Codec(kind, spans, size, ranked)
    flat = normal(size, seed)
    base = normal(size, seed + 1) if from_base else None
    content = codec.encode(flat, base, seed)
    assert content.dtype == torch.uint8
    assert len(content) == codec.nbytes
    onto = None if base is None else base.clone()
    back = codec.decode(content, onto)
    assert onto is None or back is onto
    coded = torch.zeros(size, dtype=torch.bool)
    for start, stop in spans:
        coded[start:stop] = True
    assert torch.equal(back[~coded], flat[~coded])
    if coded.any():
        change = flat if base is None else flat - base
        step = change[coded].abs().max() / LEVELS[kind]
        assert (back - flat)[coded].abs().max() <= SCALE * step + 1e-6


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_random_rounding_is_unbiased_and_the_same_for_the_same_key(kind: str) -> None:
    codec, flat = Codec(kind, WHOLE, SIZE), normal(SIZE, 5)
    backs = torch.stack([codec.decode(codec.encode(flat, None, key)) for key in range(400)])
    step = SCALE * flat.abs().max() / LEVELS[kind]
    noise = step / 2 / 400**0.5  # a rounding's deviation is half a step at most
    assert (backs.mean(0) - flat).abs().max() < 5 * noise + step / 256
    assert (backs.mean(0) - flat).mean().abs() < 4 * noise / SIZE**0.5 + step / 512
    assert torch.equal(codec.encode(flat, None, 3), codec.encode(flat, None, 3))
    assert not torch.equal(codec.encode(flat, None, 3), codec.encode(flat, None, 4))


def test_random_rounding_is_independent_for_every_value() -> None:
    """A value halfway between two steps goes up as often as down, and not in step with its neighbours."""
    chunks = 64
    flat = torch.full((chunks * VALUES_PER_CHUNK,), 0.5)
    flat[::VALUES_PER_CHUNK] = 7  # the scale is 1
    codec = Codec("int4", ((0, len(flat)),), len(flat))
    up = codec.decode(codec.encode(flat, None, 1)).view(chunks, VALUES_PER_CHUNK)[:, 1:]
    assert set(up.unique().tolist()) == {0.0, 1.0}
    assert up.mean() == pytest.approx(0.5, abs=0.02)
    pairs = (up[:, 1:] * up[:, :-1]).mean()
    assert pairs == pytest.approx(0.25, abs=0.02)
    assert not torch.equal(up[0], up[1])


def test_rounding_to_nearest_errs_by_half_a_step_at_most() -> None:
    codec, flat = Codec("int8", WHOLE, SIZE), normal(SIZE, 6)
    steps = (
        torch.nn.functional.pad(flat, (0, 4 * VALUES_PER_CHUNK - SIZE)).view(4, VALUES_PER_CHUNK).abs().amax(1)
        / LEVELS["int8"]
    )
    limit = SCALE * steps.repeat_interleave(VALUES_PER_CHUNK)[:SIZE] / 2
    assert ((codec.decode(codec.encode(flat)) - flat).abs() <= 1.01 * limit).all()
    whole = torch.randint(-7, 8, (SIZE,), generator=torch.Generator().manual_seed(7)).float()
    whole[::VALUES_PER_CHUNK] = 7
    assert torch.equal(Codec("int4", WHOLE, SIZE).decode(Codec("int4", WHOLE, SIZE).encode(whole, None, 1)), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_equals_torch_s_and_zeros_and_denormals_are_harmless(kind: str) -> None:
    codec = Codec(kind, WHOLE, SIZE)
    zeros = torch.zeros(SIZE)
    assert torch.equal(codec.decode(codec.encode(zeros, None, 1)), zeros)
    tiny = torch.full((SIZE,), 1e-39)
    assert codec.decode(codec.encode(tiny, None, 1)).abs().max() <= 1e-30
    if kind == "bf16":
        flat = torch.cat([normal(SIZE - 3, 2), torch.tensor([3.4e38, -1e-40, 65535.0])])
        assert torch.equal(codec.decode(codec.encode(flat)), flat.bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_decode_as_not_finite(kind: str, odd: float) -> None:
    codec, flat = Codec(kind, WHOLE, SIZE), normal(SIZE)
    flat[VALUES_PER_CHUNK + 3] = odd
    content = codec.encode(flat, None, 1)
    assert not codec.decode(content).isfinite().all()
    if codec.rows:  # also if nothing of it is there but its head, and nobody calls it a part that is of use
        assert not codec.decode(content, None, np.zeros(codec.rows, bool)).isfinite().all()
        assert not codec.gains(content).any()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_as_few_as_they_should_be(kind: str) -> None:
    size = 1 << 20
    share = Codec(kind, ((0, size),), size).nbytes / (4 * size)
    assert share == pytest.approx({"bf16": 0.5, "int8": 0.254, "int4": 0.129}[kind], abs=0.001)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["int8", "int4"]), st.integers(0, 99), st.data())
def test_missing_rows_count_as_no_change_and_the_others_decode_as_usual(
    kind: str, seed: int, data: st.DataObject
) -> None:
    chunks = 12
    codec = Codec(kind, ((0, chunks * VALUES_PER_CHUNK),), chunks * VALUES_PER_CHUNK)
    flat, base = uneven(chunks, seed), normal(chunks * VALUES_PER_CHUNK, seed + 1)
    content = codec.encode(base + flat, base, seed)
    received = np.array(data.draw(st.lists(st.booleans(), min_size=codec.rows, max_size=codec.rows)))
    spoilt = content.clone()
    spoilt[codec.first_row :].view(-1, ROW_BYTES)[torch.from_numpy(~received)] = 77  # what lies there does not count
    whole, part = (
        codec.decode(c, base.clone(), rows).view(chunks, VALUES_PER_CHUNK)
        for c, rows in ((content, None), (spoilt, received))
    )
    unchanged = (part == base.view(chunks, VALUES_PER_CHUNK)).all(1)
    same = (part == whole).all(1)
    bases = int(received[:chunks].sum())
    assert unchanged.sum() >= chunks - bases
    full = bases if kind == "int4" else int((received[:chunks] & received[chunks:]).sum())
    assert same.sum() >= full
    off = (part - whole)[~unchanged]
    assert off.abs().max() <= SCALE * flat.abs().max() / 7 if len(off) else True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [1, BATCH, 2 * BATCH + 1])
def test_a_change_decodes_alike_onto_values_and_alone(kind: str, chunks: int) -> None:
    """Rows are fetched in batches, whatever their order."""
    codec = Codec(kind, ((0, chunks * VALUES_PER_CHUNK),), chunks * VALUES_PER_CHUNK)
    base = normal(codec.size, 1)
    content = codec.encode(base + uneven(chunks), base, 2)
    assert torch.equal(codec.decode(content, base.clone()), base + codec.decode(content))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_first_rows_are_worth_most_and_gains_say_how_much(kind: str) -> None:
    chunks = 200
    codec = Codec(kind, ((0, chunks * VALUES_PER_CHUNK),), chunks * VALUES_PER_CHUNK)
    change = uneven(chunks)
    content = codec.encode(change, None, 1)
    gains = codec.gains(content)
    assert gains.sum() == pytest.approx(1)
    assert (gains[1:chunks] <= 1.1 * gains[: chunks - 1]).all()
    for rows in (0, 20, 100, chunks, codec.rows):
        back = codec.decode(content, None, np.arange(codec.rows) < rows)
        arrived = 1 - float((back - change).square().sum() / change.square().sum())
        assert gains[:rows].sum() == pytest.approx(arrived, abs=0.06)
    in_place = Codec(kind, ((0, chunks * VALUES_PER_CHUNK),), chunks * VALUES_PER_CHUNK, ranked=False)
    assert gains[:50].sum() > 2 * in_place.gains(in_place.encode(change, None, 1))[:50].sum()


def test_a_base_layer_of_four_bits_comes_first_and_is_nearly_all() -> None:
    chunks = 400
    codec = Codec("int8", ((0, chunks * VALUES_PER_CHUNK),), chunks * VALUES_PER_CHUNK)
    change = uneven(chunks, 3)
    content = codec.encode(change, None, 1)
    assert (codec.first_row + ROW_BYTES * chunks) / (4 * codec.size) < 0.13
    back = codec.decode(content, None, np.arange(codec.rows) < chunks)
    assert float((back - change).square().sum() / change.square().sum()) < 0.05


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.binary(min_size=0, max_size=4000), st.booleans())
def test_any_bytes_decode_or_are_refused(kind: str, content: bytes, half: bool) -> None:
    codec = Codec(kind, ((5, SIZE),), SIZE)
    given_bytes = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    if len(content) != codec.nbytes:
        with pytest.raises(ValueError, match="bytes, where"):
            codec.decode(given_bytes)
    filled = torch.from_numpy(np.frombuffer((content + bytes(codec.nbytes))[: codec.nbytes], np.uint8).copy())
    received = np.arange(codec.rows) % 2 == 0 if half else None
    assert codec.decode(filled, None, received).shape == (SIZE,)
    assert codec.gains(filled).shape == (codec.rows,)
