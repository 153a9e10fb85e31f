"""Networks that job files can name: an MLP, a residual CNN and a transformer. No forward pass fixes a width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(widths: Sequence[int], norm: str | None = "batch") -> nn.Module:
    """Build linear layers with ReLU between them, and BatchNorm before each ReLU but not on the logits.

    Args:
        widths: Numbers of inputs, of neurons in every hidden layer, and of outputs.
        norm: `batch`, or None for none.

    Raises:
        ValueError: fewer than two widths, a width below 1, or an unknown norm.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise ValueError(f"widths {list(widths)} should be at least two positive numbers: inputs, hidden..., outputs")
    if norm not in ("batch", None):
        raise ValueError(f"norm {norm!r} should be batch or null")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths[:-1]):
        layers.append(nn.Linear(inputs, outputs, bias=norm is None))
        if norm:
            layers.append(nn.BatchNorm1d(outputs))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class ResidualBlock(nn.Module):
    """Add two 3x3 convolutions of the input to it and apply ReLU: `[B, C, H, W]` to the same shape."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, hidden, 3, padding=1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = x_BCHW + self.body(x_BCHW)
        return functional.relu(x_BCHW)


class ResidualCNN(nn.Module):
    """A small residual CNN: images `[B, H, W]` or `[B, C, H, W]` to logits `[B, classes]`."""

    def __init__(self, in_channels: int, channels: int, hidden: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.blocks = nn.Sequential(*(ResidualBlock(channels, hidden) for _ in range(blocks)))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x_BCHW = x.unsqueeze(1) if x.ndim == 3 else x
        logits_BO: Tensor = self.head(self.blocks(self.stem(x_BCHW)).mean((2, 3)))
        return logits_BO


def residual_cnn(
    in_channels: int = 1, channels: int = 32, hidden: int = 64, blocks: int = 3, classes: int = 10
) -> nn.Module:
    """Build a residual CNN with `channels` channels between its blocks and `hidden` channels within each."""
    return ResidualCNN(in_channels, channels, hidden, blocks, classes)


class TransformerBlock(nn.Module):
    """Causal attention and feed-forward, each after a norm (pre-LN, as in GPT-2): `[B, T, D]` to the same shape.

    The number of heads follows from the width of the projections, so a subnet may hold some of the heads.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.norm1(x_BTD)
        q, k, v = (p(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(attended)
        out_BTD: Tensor = x_BTD + self.down(functional.gelu(self.up(self.norm2(x_BTD))))
        return out_BTD


class Transformer(nn.Module):
    """A causal language model: tokens `[B, T]` to logits `[B, T, vocabulary]`."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, hidden) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        places = torch.arange(x_BT.shape[1], device=x_BT.device)
        logits_BTV: Tensor = self.head(self.norm(self.blocks(self.tokens(x_BT) + self.places(places))))
        return logits_BTV


def transformer(
    vocabulary: int, context: int = 128, width: int = 128, heads: int = 4, hidden: int = 512, blocks: int = 2
) -> nn.Module:
    """Build a small causal transformer whose attention heads and feed-forward neurons can be split.

    Raises:
        ValueError: `heads` does not divide `width`.
    """
    if width % heads:
        raise ValueError(f"heads {heads} should divide width {width}")
    return Transformer(vocabulary, context, width, heads, hidden, blocks)
