"""Notice that the user's own code has changed between a run's start and its resumption."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from idletrain.errors import NOT_THE_USER_S

DIGEST_LETTERS = 16


def own_code(module: nn.Module, functions: Iterable[Any]) -> dict[str, str]:
    """Return a digest of the source of each of the user's own classes and functions, by name.

    What comes from an installed package is left out, and what has no source, as in a console.

    Args:
        module: Its class and its submodules' classes are looked at.
        functions: Functions and methods, or objects, whose class then counts; None among them is nothing.
    """
    found = {}
    called = (item if inspect.isroutine(item) else type(item) for item in functions)
    for named in dict.fromkeys((*map(type, module.modules()), *called)):
        try:
            if inspect.getfile(named).startswith(NOT_THE_USER_S):
                continue
            source = inspect.getsource(named)
        except (OSError, TypeError):  # there is no file, or it is built in
            continue
        found[named.__qualname__] = hashlib.sha256(source.encode()).hexdigest()[:DIGEST_LETTERS]
    return found


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of those classes and functions whose source differs; one in only one of both counts, too."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
