"""Networks that out-of-core training is measured on: for 32x32 images, in their papers' shapes, some thinner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def vgg16(first: int) -> nn.Module:
    """Build VGG-16 (arXiv 1409.1556, table 1, column D: `first` is 64) with BatchNorm and one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for times in (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0):
        width = times * first
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


class Residual(nn.Module):
    """A block whose result is added to its input; the input is projected where the shape changes."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.short: nn.Module = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.short(x) + self.body(x)
        return y


def _bottleneck(inputs: int, width: int, stride: int) -> nn.Module:
    """Build arXiv 1512.03385's block (figure 5, right), with BatchNorm and ReLU first in each layer (1603.05027)."""
    layers: list[nn.Module] = []
    shapes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
    for i, (a, b, kernel, step) in enumerate(shapes):
        layers += [nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, kernel, step, kernel // 2, bias=i == len(shapes))]
    return Residual(nn.Sequential(*layers), inputs, 4 * width, stride)


def _basic(inputs: int, width: int, stride: int) -> nn.Module:
    """Build the block of wide residual networks (arXiv 1605.07146, figure 1a)."""
    layers: list[nn.Module] = []
    for a, step in ((inputs, stride), (width, 1)):
        layers += [nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, width, 3, step, 1, bias=False)]
    return Residual(nn.Sequential(*layers), inputs, width, stride)


def resnet(depths: Sequence[int], width: int) -> nn.Module:
    """Build bottleneck blocks, `width` inside the first stage's; (3, 4, 6, 3) and 64 are ResNet-50."""
    blocks: list[nn.Module] = []
    channels = width
    for stage, depth in enumerate(depths):
        inside = width << stage
        for block in range(depth):
            blocks.append(_bottleneck(channels, inside, 2 if stage and not block else 1))
            channels = 4 * inside
    return _classifier(width, blocks, channels)


def resnet18(channels: int, planes: int = 64) -> nn.Module:
    """Build ResNet-18's basic blocks (64 `planes` in the first stage) for images of so many channels, with BatchNorm
    and ReLU first.
    """
    blocks: list[nn.Module] = []
    before = planes
    for stage in range(4):
        for block in range(2):
            blocks.append(_basic(before, planes << stage, 2 if stage and not block else 1))
            before = planes << stage
    return _classifier(planes, blocks, before, channels)


def wide_resnet(depth: int, widening: int) -> nn.Module:
    """Build WRN-`depth`-`widening` (arXiv 1605.07146, table 1)."""
    blocks: list[nn.Module] = []
    channels = 16
    for stage in range(3):
        width = (16 << stage) * widening
        for block in range((depth - 4) // 6):
            blocks.append(_basic(channels, width, 2 if stage and not block else 1))
            channels = width
    return _classifier(16, blocks, channels)


def _classifier(stem: int, blocks: Sequence[nn.Module], channels: int, inputs: int = 3) -> nn.Module:
    head = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(inputs, stem, 3, padding=1, bias=False), *blocks, head, nn.Linear(channels, 10))


class UNet(nn.Module):
    """Skip connections across the depth (arXiv 1505.04597, figure 1): units that are no chain.

    Args:
        width: Channels of the first level, doubled at each.
        levels: How many.
    """

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(_twice(2 * b, b) for _, b in pairs)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        across: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if i else x)
            across.append(x)
        for grow, block, skip in zip(self.grow, self.up, across[-2::-1], strict=True):
            x = block(torch.cat([skip, grow(x)], 1))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _twice(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a in (inputs, outputs):
        layers += [nn.Conv2d(a, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
