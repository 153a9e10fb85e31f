"""Let torchvision be imported where its operators cannot be loaded: its wheel on PyPI is linked to CUDA's libraries.

It then only describes two operators that do not exist. No model of the catalogue uses them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

_library: Any = torch.library.Library  # whose arguments torch does not declare
LIBRARY: Any = _library("torchvision", "FRAGMENT")  # what is declared in it lasts as long as it does
MISSING = (
    "nms(Tensor boxes, Tensor scores, float limit) -> Tensor",
    "qnms(Tensor boxes, Tensor scores, float limit) -> Tensor",
)


def declare_missing() -> None:
    """Declare the operators, unless torchvision is not installed or loads its own."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    load: Any = torch.ops.load_library
    try:
        load(Path(package.origin).with_name("_C.so"))
    except OSError:
        for operator in MISSING:
            LIBRARY.define(operator)
