"""idletrain trains one neural network by independent subnets on machines that come and go.

import idletrain
result = idletrain.fit(module, (x, y), test=(x_test, y_test), subnets=4, rounds=120)
result.module  # trained
"""

# No import happens here, not even of typing: `python -m idletrain` runs this file while modules of the working
# directory, which may be a stranger's, still hide the standard library's (see __main__).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from idletrain.api import fit
    from idletrain.errors import DamageError, IdletrainError, JobError, RefusedError, RunError
    from idletrain.estimators import IdletrainClassifier, IdletrainRegressor
    from idletrain.fit_result import FitResult

__all__ = [
    "DamageError",
    "FitResult",
    "IdletrainClassifier",
    "IdletrainError",
    "IdletrainRegressor",
    "JobError",
    "RefusedError",
    "RunError",
    "fit",
]


def __getattr__(name: str) -> "Any":
    """Load the API on first use: torch takes seconds to import, and the command line's help needs none of it."""
    import importlib

    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("idletrain")
    if name in __all__:
        from idletrain.held_interrupts import interrupts_held, notice_if_slow

        own = {"fit": "api", "FitResult": "fit_result"}
        module = own.get(name) or ("errors" if name.endswith("Error") else "estimators")
        with interrupts_held(), notice_if_slow("loading torch and Dask"):
            return getattr(importlib.import_module(f"idletrain.{module}"), name)
    raise AttributeError(f"module 'idletrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that a notebook completes."""
    return [*__all__, "__version__"]
