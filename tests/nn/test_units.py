"""Where a network is cut."""

from __future__ import annotations

import pytest
from outofcore.networks import Unet, Vgg
from torch import nn

from idletrain.errors import JobError
from idletrain.nn import models
from idletrain.nn.units import pieces_of


def names(module: nn.Module) -> list[str]:
    return [piece.name for piece in pieces_of(module)]


def test_a_chain_is_cut_behind_heavy_operations_and_never_before_one_in_place() -> None:
    assert names(Vgg()) == [
        "features.0",
        "features.1-3",
        "features.4-6",
        "features.7-10",
        "features.11-12",
        "head.0-2",
        "head.3-4",
    ]
    assert [piece.follows for piece in pieces_of(Vgg())] == [False, True, True, True, True, False, True]
    assert names(models.mlp([4, 8, 8, 2])) == ["0-1", "2-4", "5-7"]


def test_a_container_of_blocks_is_opened_and_a_block_stays_whole() -> None:
    assert names(models.transformer(10, blocks=2)) == ["tokens", "places", "blocks.0", "blocks.1", "norm", "head"]
    assert names(models.residual_cnn(blocks=2)) == ["stem.0", "stem.1-2", "blocks.0", "blocks.1", "head"]
    assert names(Unet()) == ["down", "deep", "up", "out", "head"]


def test_a_sequential_within_another_is_one_chain_with_it() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert names(nn.Sequential(inner, nn.Linear(2, 2))) == ["0.0", "0.1-1"]


def test_a_sequential_with_a_hook_is_left_as_it_is() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inner.register_forward_hook(lambda *_: None)
    assert names(nn.Sequential(inner, nn.Linear(2, 2))) == ["0", "1"]


def test_units_can_be_named() -> None:
    assert [piece.name for piece in pieces_of(Vgg(), ["features", "head.1"])] == ["features", "head.1"]
    with pytest.raises(JobError, match=r"units: neck is not among the model's modules; it has features, features.0"):
        pieces_of(Vgg(), ["neck"])
    with pytest.raises(JobError, match=r"head.1 lies within head; name one of them"):
        pieces_of(Vgg(), ["head", "head.1"])


def test_a_parameter_that_a_unit_uses_twice_is_its_once() -> None:
    layer = nn.Linear(2, 2)
    (piece,) = pieces_of(nn.ModuleList([nn.ModuleDict({"a": nn.Identity()})]), [""]) or [None]
    assert list(piece.parameters()) == []
    tied = nn.Sequential(nn.Sequential(layer), nn.Tanh())
    assert sum(1 for piece in pieces_of(tied, ["0"]) for _ in piece.parameters()) == 2
