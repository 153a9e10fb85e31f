"""Store what a snapshot's state_dict needs without the module's code: `state.safetensors` in the snapshot's folder.

It holds the tensors of the module's state_dict that are no parameters or do not train, and, as metadata, where the
other parameters are in the snapshot's `network`: the name, the first of its numbers and the shape of each.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from idletrain.errors import DamageError, RunError
from idletrain.rounds.durable import snapshots
from idletrain.storage import write_whole

STATE_FILE = "state.safetensors"
PLACES = "parameters"  # in the file's metadata


def write(run_dir: Path, round_: int, module: nn.Module) -> None:
    """Write the state of a module beside the snapshot of its parameters.

    Raises:
        OSError: There is no room.
    """
    offsets, end = {}, 0
    for parameter in module.parameters():
        if parameter.requires_grad:  # the others are no part of the snapshot's network
            offsets[id(parameter)], end = end, end + parameter.numel()
    every = module.named_parameters(remove_duplicate=False)
    parameters = [(name, parameter) for name, parameter in every if id(parameter) in offsets]
    places = {name: (offsets[id(parameter)], list(parameter.shape)) for name, parameter in parameters}
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    others = {name: value.detach().clone().contiguous() for name, value in state.items() if name not in places}
    places = {name: place for name, place in places.items() if name in state}
    content = save(others, metadata={PLACES: json.dumps(places)})
    write_whole(_folder(run_dir, round_) / STATE_FILE, content)


def read(run_dir: Path, round_: int) -> dict[str, Tensor]:
    """Return the state_dict of a snapshot; nothing of the run's code is executed.

    Raises:
        DamageError: The files do not hold what was written.
    """
    folder = _folder(run_dir, round_)
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        network = np.memmap(folder / "network", np.float32, "c")
        if hashlib.sha256(network.data).hexdigest() != manifest["sha256"]:
            raise DamageError(f"{folder}: does not hold what was written to it")
        flat = torch.from_numpy(network)
        with safe_open(folder / STATE_FILE, "pt") as file:
            places = json.loads(file.metadata()[PLACES])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        parameters = {name: _cut(flat, at, shape) for name, (at, shape) in places.items()}
    except FileNotFoundError as error:
        raise DamageError(f"{error.filename or folder / STATE_FILE}: is missing") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError):
        raise DamageError(f"{folder}: cannot be read") from None
    return {**state, **parameters}


def newest(run_dir: Path) -> tuple[dict[str, Tensor], int]:
    """Return the state_dict of the newest sound snapshot, and its round.

    Raises:
        RunError: There is none.
    """
    damaged = []
    for round_ in reversed(snapshots.rounds(run_dir)):
        try:
            return read(run_dir, round_), round_
        except DamageError as error:
            damaged.append(str(error))
    why = "; ".join(damaged) or "there is no snapshot"
    raise RunError(f"{run_dir}: no network can be read without the run's code ({why}); export to a .pt file")


def _cut(flat: Tensor, at: int, shape: list[int]) -> Tensor:
    if at < 0:
        raise ValueError("no number has a place before the first")
    return flat.narrow(0, at, math.prod(shape)).view(shape)


def _folder(run_dir: Path, round_: int) -> Path:
    return run_dir / "snapshots" / f"{round_:08d}"
