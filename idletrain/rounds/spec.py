"""What a lease says to the worker that gets it, and whether head and worker are the same version."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from idletrain.exchange.wire import LeaseId
from idletrain.nn.partition import Block


@dataclass(frozen=True)
class Spec:
    """One lease as it is sent to a worker; picklable in under 1 KB.

    Attributes:
        alone: Whether the subnet is to be trained out of core, in all the memory that the worker has for it.
    """

    lease: LeaseId
    store: str
    blocks: tuple[Block, ...]
    alone: bool
    mark_seconds: float
    lease_seconds: float


def version() -> str:
    """The installed package's version."""
    return importlib.metadata.version("idletrain")
