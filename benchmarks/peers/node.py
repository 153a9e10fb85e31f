"""The parts that every peer's script shares: the task, one training step, the clock, snapshots for later evaluation.

A script gets a `Spec` as JSON in its one argument and prints JSON lines: `ready` when it could begin, `step` at every
synchronisation (steps done, seconds spent in local work: gradients and the local optimizer), `done`. Model, first
values, data, order of samples and batch are idletrain's own, by the same seed. A snapshot is the parameters as flat
float32, in the module's order, as idletrain's own snapshots are; it is evaluated after the run, off the clock.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.given import FactorySource
from idletrain.nn.data.known import digits, fashion_mnist
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.program import cross_entropy


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The orders of one node.

    Attributes:
        address: This node's.
        root: Address of the first node, or of the head where a method has a process there.
        port: Free at `root` (and at every node).
        steps: Local steps after which to end.
        settings: The method's own: lr, momentum, sync_every, ...
        snapshots: A directory for them; only rank 0 writes.
        snapshot_every: Steps.
    """

    rank: int
    nodes: int
    address: str
    root: str
    port: int
    model: dict[str, Any]
    data: dict[str, Any]
    batch_size: int
    seed: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    snapshots: str = ""
    snapshot_every: int = 0


def read_spec() -> Spec:
    """Read the spec in this process' argument, and set what must be set before any network is touched."""
    spec = Spec(**json.loads(sys.argv[1]))
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(spec.address)
    torch.set_num_threads(1)
    return spec


def interface_of(address: str) -> str:
    """Return the network interface with an address; gloo would look the host's name up instead."""
    return next(name for name, has in psutil.net_if_addrs().items() if address in {entry.address for entry in has})


def say(kind: str, **fields: Any) -> None:
    """Print one line, with the time."""
    sys.stdout.write(json.dumps({"kind": kind, "t": time.time(), **fields}) + "\n")
    sys.stdout.flush()


class Task:
    """The network and the data of a comparison, with their first values, on one node."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        torch.manual_seed(spec.seed)
        self.module = build(spec.model)
        self._samples = open_data(spec.data)[0]
        self._order = BatchOrder(spec.seed, len(self._samples), spec.batch_size, spec.nodes)
        self._reported = 0
        self.backward_seconds = self.optimizer_seconds = 0.0

    def optimizer(self, parameters: Iterable[nn.Parameter] | None = None) -> torch.optim.Optimizer:
        """Make the local optimizer that all methods share, by the settings of a job; its steps are timed."""
        settings, parameters = self.spec.settings, parameters or self.module.parameters()
        local: torch.optim.Optimizer
        if settings.get("name") == "adamw":
            local = torch.optim.AdamW(parameters, lr=settings["lr"], weight_decay=settings.get("weight_decay", 0.0))
        else:
            local = torch.optim.SGD(parameters, lr=settings["lr"], momentum=settings.get("momentum", 0.0))
        self._time(local)
        return local

    def _time(self, optimizer: torch.optim.Optimizer) -> None:
        """Time its steps, without what a method hangs on them later: hooks run in the order in which they came."""
        started = 0.0

        def begin(*_: object) -> None:
            nonlocal started
            started = time.perf_counter()

        def end(*_: object) -> None:
            self.optimizer_seconds += time.perf_counter() - started

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)

    def share_of_lr(self, step: int) -> float:
        """Return the schedule's factor of the learning rate at a step, as in idletrain."""
        if self.spec.settings.get("schedule") != "cosine":
            return 1.0
        return (1 + math.cos(math.pi * step / self.spec.settings.get("horizon", self.spec.steps))) / 2

    def set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate of a step by the schedule."""
        for group in optimizer.param_groups:
            group["lr"] = self.spec.settings["lr"] * self.share_of_lr(step)

    def backward(self, step: int, module: nn.Module | None = None) -> None:
        """Compute the gradients of one step's batch."""
        started = time.perf_counter()
        module = module or self.module
        index = self._order.batch(self.spec.rank % self.spec.nodes, step)
        inputs, labels = self._samples.batch(index)
        module.zero_grad(set_to_none=True)
        cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self.backward_seconds += time.perf_counter() - started

    def report(self, steps: int, **more: Any) -> None:
        """Tell that `steps` are done, and keep the parameters if it is time."""
        say("step", steps=steps, local_seconds=self.backward_seconds + self.optimizer_seconds, **more)
        every = self.spec.snapshot_every
        if self.spec.snapshots and every and steps // every > self._reported:
            self._reported = steps // every
            write_snapshot(Path(self.spec.snapshots), steps, list(self.module.parameters()))


@torch.no_grad()
def write_snapshot(folder: Path, steps: int, parameters: list[Tensor]) -> None:
    """Keep the parameters; the file has its name only when it is whole."""
    part = folder / f"{steps:08d}.part"
    torch.cat([p.detach().flatten() for p in parameters]).numpy().tofile(part)
    part.rename(part.with_suffix(""))


def build(model: dict[str, Any]) -> nn.Module:
    """Build the module that a job's `model` section describes."""
    path, _, name = model["factory"].partition(":")
    module: nn.Module = getattr(importlib.import_module(path), name)(**model.get("args", {}))
    return module.train()


def open_data(data: dict[str, Any]) -> tuple[Samples, Samples]:
    """Open the training and test samples that a job's `data` section describes."""
    if data.get("name") == "digits":
        return FactorySource(digits, 0).open(), FactorySource(digits, 1).open()
    if data.get("name") == "fashion-mnist":
        train, test = fashion_mnist(None)
        return train.open(), test.open()
    path, _, name = data["factory"].partition(":")
    factory = getattr(importlib.import_module(path), name)
    return FactorySource(factory, 0, data.get("args", {})).open(), FactorySource(
        factory, 1, data.get("args", {})
    ).open()
