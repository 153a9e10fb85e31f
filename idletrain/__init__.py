"""idletrain trains one neural network by independent subnets on machines that come and go.

import idletrain
result = idletrain.fit(module, (x, y), test=(x_test, y_test), subnets=4, rounds=120)
result.module  # trained
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from idletrain.errors import DamageError, IdletrainError, JobError, RefusedError, RunError

if TYPE_CHECKING:
    from idletrain.api import FitResult, fit

__all__ = ["DamageError", "FitResult", "IdletrainError", "JobError", "RefusedError", "RunError", "fit"]


def __getattr__(name: str) -> Any:
    """Load the API on first use: torch takes seconds to import, and the command line's help needs none of it."""
    if name == "__version__":
        return importlib.metadata.version("idletrain")
    if name in ("fit", "FitResult"):
        return getattr(importlib.import_module("idletrain.api"), name)
    raise AttributeError(f"module 'idletrain' has no attribute {name!r}")
