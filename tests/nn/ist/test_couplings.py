"""Ids of neurons are united, kept whole and marked."""

from __future__ import annotations

import torch

from idletrain.nn.ist.couplings import Couplings, compressed, merged, met, varying


def roots(couplings: Couplings, family: torch.Tensor) -> list[int]:
    return couplings.find(family.numpy().ravel()).tolist()


def test_united_ids_stand_for_one_neuron_however_long_the_chain() -> None:
    couplings = Couplings()
    ids = couplings.new(100)
    couplings.unite(ids[:-1], ids[1:])
    assert set(roots(couplings, ids)) == {0}


def test_heads_beside_a_weight_that_all_share_stay_apart_and_the_weight_whole() -> None:
    couplings = Couplings()
    heads, shared = couplings.new(12).view(1, 3, 4), couplings.new(4).view(1, 1, 4)
    family = met(couplings, heads, shared)
    assert tuple(family.shape) == (1, 3, 1)
    assert len(set(roots(couplings, heads))) == 3
    assert set(couplings.reasons()) == set(roots(couplings, shared))


def test_channels_beside_a_weight_of_each_are_one_neuron_for_all_pixels() -> None:
    couplings = Couplings()
    pixels, weight = couplings.new(12).view(1, 3, 4), couplings.new(3).view(1, 3, 1)
    assert varying(met(couplings, pixels, weight)) == {1}
    assert roots(couplings, pixels)[::4] == roots(couplings, weight)
    assert couplings.reasons() == {}


def test_what_code_makes_follows_and_never_joins_neurons() -> None:
    couplings = Couplings()
    first, second = couplings.new(4), couplings.new(4)
    table = couplings.new(4, known=False)
    for family in (first, second):
        assert merged(couplings, [[family], [table]]) == [family]
    assert roots(couplings, first) != roots(couplings, second)


def test_a_family_has_length_1_where_it_does_not_vary() -> None:
    ids = torch.arange(3).view(1, 3, 1).expand(2, 3, 4)
    assert tuple(compressed(ids).shape) == (1, 3, 1)
    assert tuple(compressed(ids.contiguous()).shape) == (1, 3, 1)


def test_the_last_reason_given_is_the_one_that_is_told() -> None:
    couplings = Couplings()
    ids = couplings.new(2)
    for reason in ("", "first", "last", ""):
        couplings.hold(ids, reason)
    assert couplings.reasons() == {0: "last", 1: "last"}
