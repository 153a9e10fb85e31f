"""Small networks with what makes out-of-core execution hard: BatchNorm, dropout, in-place ReLU, shared tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.nn import models
from idletrain.nn.outofcore.executing.execute import Executor
from idletrain.nn.outofcore.executing.measure import measure_units
from idletrain.nn.outofcore.executing.saved_tensors import Swap
from idletrain.nn.outofcore.planning.profile import Unit
from idletrain.nn.outofcore.planning.simulate import Footprint
from idletrain.nn.units import Piece, pieces_of

ROOMY = 1 << 40


class Vgg(nn.Module):
    """Convolutions with BatchNorm and in-place ReLU, pooling, and a head with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (8, 16, 16):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers += [nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 64, 64), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(64, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class Unet(nn.Module):
    """Two levels with a skip connection: units that are no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self._block(3, 8), self._block(8, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), self._block(16, 4)
        self.head = nn.Linear(4, 10)

    def _block(self, inputs: int, outputs: int) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

            def forward(self, x: Tensor) -> Tensor:
                return functional.gelu(self.norm(self.conv(x)))

        return Block()

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down(x)
        deep = self.deep(functional.max_pool2d(wide, 2))
        y = self.out(torch.cat([wide, self.up(deep)], 1))
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


class Case:
    """A network with a batch, its units measured, and one step of it in core."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        torch.manual_seed(0)
        images, tokens = torch.randn(32, 3, 16, 16), torch.randint(50, (8, 16))
        makers: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
            "mlp": (lambda: models.mlp([48, 256, 256, 256, 10]), torch.randn(128, 48)),
            "vgg": (Vgg, images),
            "unet": (Unet, images),
            "residual": (lambda: models.residual_cnn(3, 8, 16, 3), images),
            "transformer": (lambda: models.transformer(50, 16, 64, 4, 128, 3), tokens),
        }
        make, x = makers[name]
        self.x, self.module = x.to(device), make().to(device).train()
        outputs = copy.deepcopy(self.module)(self.x)
        self.y = torch.randint(10, outputs.shape[:-1], device=device)
        pieces, self.units = measure_units(self.module, pieces_of(self.module), self.x, self.loss)
        self.names = [piece.name for piece in pieces]
        self.reference = copy.deepcopy(self.module)
        torch.manual_seed(7)
        self.value = self.loss(self.reference(self.x))
        self.value.backward()

    def loss(self, outputs: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), self.y.flatten())

    def fresh(self) -> tuple[nn.Module, list[Piece]]:
        """A copy of the module as it was, and its units."""
        module = copy.deepcopy(self.module)
        named = {piece.name: piece for piece in pieces_of(module)}
        return module, [named[name] for name in self.names]

    def footprint(self, modes: Sequence[str], budget: int = ROOMY, units: Sequence[Unit] | None = None) -> Footprint:
        return Footprint(units or self.units, modes, budget, 0, streamed=False)

    def run(self, modes: Sequence[str], swap: Swap, budget: int = ROOMY) -> tuple[nn.Module, Executor, Tensor]:
        """One step by a plan."""
        module, pieces = self.fresh()
        executor = Executor(module, pieces, self.footprint(modes, budget), swap)
        torch.manual_seed(7)
        with executor.step():
            value = self.loss(module(self.x))
            value.backward()
        executor.close()
        return module, executor, value

    def differences(self, module: nn.Module, value: Tensor) -> list[str]:
        """Where a step's loss, gradients and buffers are not the same bits as in core."""
        differing = [] if torch.equal(value, self.value) else ["loss"]
        for (name, ours), theirs in zip(module.named_parameters(), self.reference.parameters(), strict=True):
            if ours.grad is None or theirs.grad is None or not torch.equal(ours.grad, theirs.grad):
                differing.append(name)
        for (name, mine), its in zip(module.named_buffers(), self.reference.buffers(), strict=True):
            if not torch.equal(mine, its):
                differing.append(name)
        return differing


def plans(case: Case, count: int, seed: int = 0) -> list[Any]:
    """Uniform plans and random ones."""
    from idletrain.nn.outofcore.planning.plan import legal

    n = len(case.units)
    generator = torch.Generator().manual_seed(seed)
    drawn = [["KSRQm"[i] for i in torch.randint(5, (n,), generator=generator).tolist()] for _ in range(count)]
    return [
        legal(case.units, modes)
        for modes in (["K"] * n, ["S"] * n, ["R"] * n, ["Q"] * n, ["Q"] + ["m"] * (n - 1), *drawn)
    ]
