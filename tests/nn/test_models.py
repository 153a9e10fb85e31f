"""Networks that job files name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from idletrain.nn import models


def test_an_mlp_has_batch_norm_before_each_relu_and_none_on_the_logits() -> None:
    kinds = [type(layer) for layer in models.mlp([4, 8, 6, 3])]
    norm = [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert kinds == [nn.Flatten, *norm, *norm, nn.Linear]
    assert models.mlp([4, 8, 3], norm=None)(torch.zeros(5, 2, 2)).shape == (5, 3)


def test_an_mlp_of_two_widths_is_one_layer() -> None:
    assert len(models.mlp([4, 3])) == 2


@pytest.mark.parametrize("args", [{"widths": [4]}, {"widths": [4, 0, 3]}, {"widths": [4, 3], "norm": "layer"}])
def test_an_mlp_refuses_what_it_cannot_be(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"should be"):
        models.mlp(**args)


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 1, 8, 8)])
def test_a_residual_cnn_takes_images_with_or_without_channels(shape: tuple[int, ...]) -> None:
    assert models.residual_cnn(channels=4, hidden=6, blocks=1, classes=5)(torch.zeros(shape)).shape == (2, 5)


def test_a_transformer_does_not_look_ahead() -> None:
    module = models.transformer(10, context=6, width=8, heads=2, hidden=12, blocks=1)
    tokens = torch.arange(6).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 9
    assert torch.equal(module(tokens)[:, :5], module(changed)[:, :5])
    assert not torch.equal(module(tokens)[:, 5], module(changed)[:, 5])


def test_a_transformer_refuses_heads_that_do_not_divide_its_width() -> None:
    with pytest.raises(ValueError, match="heads 3 should divide width 8"):
        models.transformer(10, width=8, heads=3)
