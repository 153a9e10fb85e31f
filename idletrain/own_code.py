"""Notice that the user's own code has changed since a run's start."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
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
    return {named.__qualname__: digest for named, digest in _digests(module, functions)}


def _digests(module: nn.Module, functions: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    called = (item if inspect.isroutine(item) else type(item) for item in functions)
    for named in dict.fromkeys((*map(type, module.modules()), *called)):
        try:
            if inspect.getfile(named).startswith(NOT_THE_USER_S):
                continue
            source = inspect.getsource(named)
        except (OSError, TypeError):  # there is no file, or it is built in
            continue
        yield named, hashlib.sha256(source.encode()).hexdigest()[:DIGEST_LETTERS]


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of those classes and functions whose source differs; one in only one of both counts, too."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def changed_imports(before: Mapping[str, str], module: nn.Module, functions: Iterable[Any]) -> list[str]:
    """Return the names of the classes and functions of a run that has been read whose source differs.

    Only what Python imports counts: what was pickled whole, such as a script's own classes, is as it was.

    Args:
        before: What `own_code` returned for the run.
        module: See `own_code`.
        functions: See `own_code`.
    """
    now = {named.__qualname__: digest for named, digest in _digests(module, functions) if _is_imported(named)}
    return sorted(name for name, digest in now.items() if before.get(name, digest) != digest)


def _is_imported(named: Any) -> bool:
    found: Any = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is getattr(named, "__func__", named)
