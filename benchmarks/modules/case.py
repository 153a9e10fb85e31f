"""One module of the catalogue."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.modules.data import Make


@dataclass(frozen=True)
class Case:
    """A module as its package builds it, without weights from elsewhere.

    Attributes:
        name: Its name in the table.
        package: The package on PyPI that it comes from.
        build: Builds it.
        data: Makes data that it can learn.
        loss: The job's `training.loss`; None for the default.
        lr: The learning rate of AdamW.
    """

    name: str
    package: str
    build: Callable[[], Any]
    data: Make
    loss: str | None = None
    lr: float = 1e-3


def built(path: str, *positional: Any, **named: Any) -> Any:
    """Call what `package.module:name` is: the packages are not there where this code is checked."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(*positional, **named)


def from_config(name: str, config: str, **settings: Any) -> Any:
    """Build a model of Hugging Face's transformers from its configuration."""
    return built(f"transformers:{name}", built(f"transformers:{config}", **settings))
