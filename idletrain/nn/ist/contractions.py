"""Find which layers sum over which dimension of their weights."""

from __future__ import annotations

from torch import nn

KNOWN = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.Bilinear)


def owners_of(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Return every layer that has a parameter, with the parameter's name in it."""
    wanted = module.get_parameter(name)
    return [
        (owner, short)
        for owner in module.modules()
        for short, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter is wanted
    ]


def contracts(owner: nn.Module, short: str, dimension: int) -> bool:
    """Return True if a layer sums over this dimension of its parameter, as torch's layers do."""
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or short.endswith("bias"):
        return False
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):
        return dimension == 0
    if isinstance(owner, nn.Bilinear):
        return dimension > 0
    return dimension == 1


def contracting_layers(module: nn.Module, name: str, dimension: int) -> tuple[str, ...]:
    """Return the names of the layers that sum over their inputs along a dimension of this weight."""
    wanted = module.get_parameter(name)
    return tuple(
        path
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
        and layer.weight is wanted
        and contracts(layer, "weight", dimension)
    )
