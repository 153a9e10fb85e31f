"""Layers of torch that keep a width in an attribute, changed to take it from their parameters.

A copy of such a layer with the parameters of a subnet then runs as it is: grouped convolutions and GroupNorm with fewer
groups, attention with fewer heads, recurrent layers with fewer hidden units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize


def take_widths(module: nn.Module) -> nn.Module:
    """Change a module's layers to take their widths from their parameters; return it."""
    for layer in module.modules():
        kind = _KINDS.get(type(layer)) or (Conv1D if _is_conv1d(layer) else None)
        if kind is not None and not parametrize.is_parametrized(layer):
            if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == 1:
                continue
            if isinstance(layer, nn.MultiheadAttention) and not _is_plain(layer):
                continue
            vars(layer)["whole"] = _whole(layer)
            layer.__class__ = kind
    return module


def _whole(layer: Any) -> int:
    """Return the number of values of one group or head."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        return len(layer.weight) // layer.groups
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels // layer.num_groups
    return layer.head_dim if isinstance(layer, nn.MultiheadAttention) else 1


class _Grouped:
    """A convolution whose number of groups follows its weight `[O, C / groups, ...]`, transposed `[C, O / groups]`."""

    weight: Tensor
    whole: int

    @property
    def groups(self) -> int:
        return len(self.weight) // self.whole

    @groups.setter
    def groups(self, _value: int) -> None:
        pass


class Conv1d(_Grouped, nn.Conv1d):
    """A convolution of groups."""


class Conv2d(_Grouped, nn.Conv2d):
    """A convolution of groups."""


class Conv3d(_Grouped, nn.Conv3d):
    """A convolution of groups."""


class ConvTranspose1d(_Grouped, nn.ConvTranspose1d):
    """A transposed convolution of groups."""


class ConvTranspose2d(_Grouped, nn.ConvTranspose2d):
    """A transposed convolution of groups."""


class ConvTranspose3d(_Grouped, nn.ConvTranspose3d):
    """A transposed convolution of groups."""


class GroupNorm(nn.GroupNorm):
    """A GroupNorm of as many groups as its inputs `[B, C, ...]` have."""

    whole: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """See `torch.nn.GroupNorm`."""
        return functional.group_norm(input, input.shape[1] // self.whole, self.weight, self.bias, self.eps)


class _Recurrent:
    """A recurrent layer of as many inputs and hidden units as its weights have."""

    _parameters: Any
    _flat_weights_names: list[str]

    @property
    def input_size(self) -> int:
        return int(self._parameters["weight_ih_l0"].shape[1])

    @input_size.setter
    def input_size(self, _value: int) -> None:
        pass

    @property
    def hidden_size(self) -> int:
        return int(self._parameters["weight_hh_l0"].shape[1])

    @hidden_size.setter
    def hidden_size(self, _value: int) -> None:
        pass

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        return [self._parameters.get(name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, _value: Any) -> None:
        pass


class LSTM(_Recurrent, nn.LSTM):
    """An LSTM of any width."""


class GRU(_Recurrent, nn.GRU):
    """A GRU of any width."""


class RNN(_Recurrent, nn.RNN):
    """An RNN of any width."""


class MultiheadAttention(nn.MultiheadAttention):
    """Attention of as many heads as its parameters have."""

    whole: int

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # noqa: ARG002 (a hint beside attn_mask)
    ) -> tuple[Tensor, Tensor | None]:
        """See `torch.nn.MultiheadAttention`."""
        batched, swapped = query.ndim == 3, query.ndim == 3 and not self.batch_first
        one_each = [x if batched else x[None] for x in (query, key, value)]
        q, k, v = (
            self._by_head(functional.linear(x.transpose(0, 1) if swapped else x, weight, bias))
            for x, (weight, bias) in zip(one_each, self._projections(), strict=True)
        )  # each [B, H, T, whole]
        mask = self._mask(q, attn_mask, key_padding_mask)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) / self.whole**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, self.dropout, self.training)
            mixed = weights @ v
        else:
            dropout = self.dropout if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        out = out.transpose(0, 1) if swapped else out
        shown = weights.mean(1) if weights is not None and average_attn_weights else weights
        return (out, shown) if batched else (out[0], None if shown is None else shown[0])

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.whole).transpose(1, 2)

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of query, key and value."""
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(zip(weights, biases, strict=True))

    @staticmethod
    def _mask(q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
        """Return what is added to the scores `[B, H, T, T]`, with 1 for any dimension on which it does not depend."""
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask.view(len(q), -1, *attn_mask.shape[1:]) if attn_mask.ndim == 3 else attn_mask)
        if key_padding_mask is not None:
            masks.append(key_padding_mask.view(-1, 1, 1, key_padding_mask.shape[-1]))
        added = [
            mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))
            for mask in masks
        ]
        return sum(added[1:], added[0]) if added else None


class Conv1D(nn.Module):
    """The linear layer of GPT-2 and others, with a weight `[inputs, outputs]`."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs `[..., outputs]` of inputs `[..., inputs]`."""
        return x @ self.weight + self.bias


def _is_conv1d(layer: nn.Module) -> bool:
    """Return True for the layer of that name in transformers, which need not be installed."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _is_plain(layer: nn.MultiheadAttention) -> bool:
    return layer.bias_k is None and not layer.add_zero_attn


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
    nn.GroupNorm: GroupNorm,
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.MultiheadAttention: MultiheadAttention,
}
