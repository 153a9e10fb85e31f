"""Find which layers sum over which dimension of their weights."""

from __future__ import annotations

from torch import nn

from idletrain.nn.ist.groups import Scaling
from idletrain.nn.ist.modules import computed_weights

KNOWN = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.Bilinear)


def owners_of(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Return every layer that has a parameter, with the parameter's name in it.

    A parameter that a layer computes its weight from has that weight's name.
    """
    computed = [(weight.layer, weight.short) for weight in computed_weights(module) if name in weight.sources]
    if computed:
        return computed
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
    computed = {weight.path for weight in computed_weights(module) if name in weight.sources}
    wanted = module.get_parameter(name)
    return tuple(
        path
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
        and (path in computed or layer._parameters.get("weight") is wanted)
        and contracts(layer, "weight", dimension)
    )


def guessed_for_computed(module: nn.Module, name: str) -> Scaling | None:
    """Return how a sum over a parameter is likely scaled if a weight is computed from it, else None.

    A factor of what weight_norm normalizes does nothing; what other functions would make of it is unknown.
    """
    weight = next((w for w in computed_weights(module) if name in w.sources), None)
    if weight is None:
        return None
    if not weight.has_fixed_length:
        return "inputs"
    return "input_roots" if name == weight.sources[-1] else "weights"
