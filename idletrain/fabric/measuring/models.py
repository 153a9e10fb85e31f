"""Networks whose training steps are timed, in their papers' shapes, and random batches for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.nn import models

CLASSES, PIXELS, VOCABULARY, CONTEXT = 1000, 784, 1000, 64
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # channels; 0: max pooling


class Bottleneck(nn.Module):
    """The block of ResNet-50 (arXiv 1512.03385, figure 5, right)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        layers: list[nn.Module] = []
        for a, b, kernel, step in shapes:
            layers += [nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.short = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x))


def resnet50(depths: Sequence[int] = (3, 4, 6, 3)) -> nn.Module:
    """Build ResNet-50 (arXiv 1512.03385, table 1): 25.6 million parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    channels = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            blocks.append(Bottleneck(channels, 64 << stage, 2 if stage and not block else 1))
            channels = 256 << stage
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def vgg16() -> nn.Module:
    """Build VGG-16 (arXiv 1409.1556, table 1, column D): 138 million parameters, most of them in one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG16:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    head = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(channels * 49, 4096), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES))


def timed_mlp() -> nn.Module:
    """Build a small MLP with BatchNorm: 0.7 million parameters."""
    return models.mlp([PIXELS, 512, 512, 10])


def timed_transformer() -> nn.Module:
    """Build a small causal language model: 0.7 million parameters."""
    return models.transformer(VOCABULARY, context=CONTEXT)


TIMED_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": timed_mlp,
    "resnet50": resnet50,
    "vgg16": vgg16,
    "transformer": timed_transformer,
}


def on_meta(name: str) -> nn.Module:
    """Build a network on torch's meta device, without values."""
    with torch.device("meta"):
        return TIMED_NETWORKS[name]()


def materialized(module: nn.Module, device: torch.device) -> nn.Module:
    """Fill a meta network with zeros on a device: steps take as long with any values, and zeros are quick to make."""
    module = module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    return module


def batch(name: str, size: int, image: int) -> tuple[Tensor, Tensor]:
    """Draw `size` inputs and labels for a network; images are `image` pixels wide and high."""
    if name == "transformer":
        tokens = torch.randint(VOCABULARY, (size, CONTEXT + 1))
        return tokens[:, :-1], tokens[:, 1:]
    if name == "mlp":
        return torch.rand(size, PIXELS), torch.randint(10, (size,))
    return torch.rand(size, 3, image, image), torch.randint(CLASSES, (size,))
