"""Layers that take their widths from their parameters compute what torch's do, and run with fewer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from idletrain.nn.ist.any_width import take_widths
from idletrain.nn.ist.modules import copied

X = torch.randn(2, 4, 12)
PADDING = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
ATTENTION: dict[str, tuple[dict[str, Any], tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "batch first": ({"batch_first": True}, (X, X, X), {}),
    "time first, with a mask": ({}, (X, X, X), {"attn_mask": torch.randn(2, 2)}),
    "padding": ({"batch_first": True}, (X, X, X), {"key_padding_mask": PADDING, "average_attn_weights": False}),
    "other widths, a mask for each head": (
        {"batch_first": True, "kdim": 5, "vdim": 7},
        (X, torch.randn(2, 6, 5), torch.randn(2, 6, 7)),
        {"attn_mask": torch.rand(6, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.3},
    ),
    "no batch": ({"bias": False}, (X[0], X[0], X[0]), {"need_weights": False}),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_computes_what_torch_s_does(case: str) -> None:
    options, inputs, arguments = ATTENTION[case]
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, **options)
    expected, got = layer(*inputs, **arguments), take_widths(copied(layer))(*inputs, **arguments)
    for one, other in zip(tree_leaves(expected), tree_leaves(got), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


LAYERS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "LSTM": (nn.LSTM(12, 8, 2, bidirectional=True), X),
    "GRU": (nn.GRU(12, 8), X),
    "RNN": (nn.RNN(12, 8), X),
    "GroupNorm": (nn.GroupNorm(2, 4), X),
    "Conv1d": (nn.Conv1d(4, 8, 3, groups=2), X),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 8, 3, groups=2), X),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_torch_s_do_also_after_a_pickle(name: str) -> None:
    layer, x = LAYERS[name]
    changed = pickle.loads(pickle.dumps(take_widths(copied(layer))))
    assert type(changed) is not type(layer)
    torch.testing.assert_close(changed(x), layer(x))


def test_fewer_groups_heads_and_hidden_units_run() -> None:
    attention = take_widths(nn.MultiheadAttention(12, 3, batch_first=True))
    fewer = {
        "in_proj_weight": torch.randn(24, 12),
        "in_proj_bias": torch.randn(24),
        "out_proj.weight": torch.randn(12, 8),
        "out_proj.bias": torch.randn(12),
    }
    out, weights = functional_call(attention, fewer, (X, X, X))
    assert (tuple(out.shape), tuple(weights.shape)) == ((2, 4, 12), (2, 4, 4))
    lstm = take_widths(nn.LSTM(12, 8))
    narrow = dict(nn.LSTM(12, 5).named_parameters())
    assert tuple(functional_call(lstm, narrow, (X,))[0].shape) == (2, 4, 5)
    conv = take_widths(nn.Conv1d(4, 4, 3, groups=4))
    assert tuple(
        functional_call(conv, {"weight": torch.randn(3, 1, 3), "bias": torch.zeros(3)}, (X[:, :3],)).shape
    ) == (2, 3, 10)


def test_attention_with_tokens_of_its_own_is_left_as_it_is() -> None:
    assert type(take_widths(nn.MultiheadAttention(12, 3, add_bias_kv=True))) is nn.MultiheadAttention
