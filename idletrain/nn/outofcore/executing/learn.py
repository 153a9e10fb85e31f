"""Learn the profile that a plan is made of: the seconds and bytes of a module's units, from one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from idletrain.nn.data.batches import device_of, length, map_parts
from idletrain.nn.outofcore.executing.execute import CHECKPOINT_BYTES
from idletrain.nn.outofcore.executing.measure import across_batch, measure_units
from idletrain.nn.outofcore.executing.trace import BETWEEN, trace
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink
from idletrain.nn.units import Piece, pieces_of


@dataclass(frozen=True)
class LearntProfile:
    """A module's profile from one batch.

    Attributes:
        pieces: Its units in the order in which they run.
        owners: For every parameter the only unit that uses it; None if several do or none does.
        profile: Its units' seconds and bytes.
    """

    pieces: list[Piece]
    owners: tuple[int | None, ...]
    profile: Profile


def learn_profile(
    module: nn.Module,
    inputs: Any,
    target: Any,
    loss: Callable[[Any, Any], Tensor],
    *,
    state_slots: int,
    resident_bytes: int,
    link: SwapLink,
    names: Sequence[str] = (),
    by_kernel: bool = False,
) -> LearntProfile:
    """Measure a module's units and profile with one batch.

    Args:
        module: The module in training mode; its buffers and torch's random state are restored.
        inputs: The batch.
        target: Its target.
        loss: `(outputs, target) -> scalar`.
        state_slots: Tensors of optimizer state per parameter.
        resident_bytes: Bytes in memory beside parameters and optimizer state.
        link: The link to the swap space.
        names: Submodules that are a unit each; automatic if empty.
        by_kernel: See `measure_units`.
    """
    outputs: list[Any] = []

    def end(out: Any) -> Tensor:
        if not outputs:
            outputs.append(map_parts(lambda part: part.detach(), out))
        return loss(out, target)

    pieces, measured = measure_units(module, pieces_of(module, names), inputs, end, state_slots, by_kernel=by_kernel)
    users, held, waiting = trace(module, pieces, inputs)
    owners = tuple(next(iter(using)) if len(using) == 1 and BETWEEN not in using else None for using in users)
    device = device_of(inputs)
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        across = across_batch(module, loss, outputs[0], target)
    parameters = list(zip(module.parameters(), owners, strict=True))
    units = list(measured)
    for u in range(len(pieces)):
        own = [p for p, owner in parameters if owner == u]
        state = state_slots * sum(p.nbytes for p in own if p.requires_grad)
        units[u] = replace(
            units[u],
            held=held[u],
            waiting_bytes=waiting[u],
            parameter_bytes=sum(p.nbytes for p in own),
            state_bytes=state,
        )
    others = sum(p.nbytes for p, owner in parameters if owner is None)
    resident = resident_bytes + (2 + state_slots) * others + (CHECKPOINT_BYTES if device.type == "cpu" else 0)
    return LearntProfile(pieces, owners, Profile(tuple(units), link, resident, length(inputs), across))
