"""Make the bytes by which programs and data sources travel to workers, and find where in an object something has none.

They are cloudpickle's, also of what `torch.jit` has compiled, and of classes that torch has renamed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
from torch import nn

from idletrain.errors import JobError
from idletrain.nn.scripted import reduced_scripted


def dumps(value: Any, parts: Mapping[str, Any] | None = None) -> bytes:
    """Return the bytes of an object, which `pickle.loads` reads.

    Args:
        value: The object.
        parts: What in it may be a user's own, by the name by which the user knows it.

    Raises:
        JobError: something in it cannot be pickled: it names where that is, such as `model.blocks.0.lock`.
    """
    with naming(parts or {"it": value}, _dumps, "travel to workers"):
        return _dumps(value)


@contextlib.contextmanager
def naming(parts: Mapping[str, Any], attempt: Callable[[Any], Any], doing: str) -> Iterator[None]:
    """Do something with objects; where that fails, name the innermost object for which an attempt fails, too.

    Args:
        parts: The objects by the names by which a user knows them.
        attempt: Raises an exception for an object that holds a culprit.
        doing: What it attempts, after "cannot".

    Raises:
        JobError: the code within raised something.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        for name, part in parts.items():
            if outer := _error(attempt, part):
                raise _fault(*(_innermost(name, part, outer, attempt, {}) or (name, part, outer)), doing) from error
        raise JobError(f"{', '.join(parts)}: cannot {doing} ({_first_line(error)})") from error


def _fault(path: str, culprit: Any, error: Exception, doing: str) -> JobError:
    named = inspect.isroutine(culprit) or isinstance(culprit, type)
    kind = culprit.__name__ if named else type(culprit).__name__
    return JobError(
        f"{path}: a {kind} cannot {doing} ({_first_line(error)}); leave it out, or create it where it is used"
    )


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's, with more that it can pickle."""

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        own = _reduced_renamed(obj) or reduced_scripted(obj)
        return super().reducer_override(obj) if own is None else own


def _reduced_renamed(value: Any) -> tuple[Any, ...] | None:
    """Return how to find a class of pybind11, or a member of an enum, that has another name than it was made with.

    `torch.nn.attention.SDPBackend` is one: pickle looks for it by its first name, `_SDPBackend`.
    """
    if _is_renamed(value):
        return getattr, (sys.modules[value.__module__], value.__name__)
    if _is_renamed(type(value)) and hasattr(type(value), "__members__"):
        return getattr, (type(value), value.name)
    return None


def _is_renamed(cls: Any) -> bool:
    if type(cls).__name__ != "pybind11_type" or cls.__name__ == cls.__qualname__:
        return False
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


# --- the innermost object that fails ----------------------------------------------------------------------------------


def _error(attempt: Callable[[Any], Any], value: Any) -> Exception | None:
    try:
        attempt(value)
    except Exception as error:  # noqa: BLE001 (named where it is raised)
        return error
    return None


def _innermost(
    path: str, value: Any, error: Exception, attempt: Callable[[Any], Any], seen: dict[int, Any]
) -> tuple[str, Any, Exception] | None:
    """Return path, object and error of what fails although none of its parts does; None if all holds what was seen."""
    seen[id(value)] = value
    in_parts = False
    for name, part in _parts(path, value):
        if id(part) in seen:
            in_parts = True
        elif inner := _error(attempt, part):
            in_parts = True
            if found := _innermost(name, part, inner, attempt, seen):
                return found
    return None if in_parts else (path, value, error)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled of an object, each with its path."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, tuple | list | set | frozenset):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((path, part) for part in (value.func, *value.args, *value.keywords.values()))
    elif inspect.ismethod(value):
        yield path, value.__self__
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        yield from ((f"{path}.{name}", part) for name, part in {**used.nonlocals, **used.globals}.items())
    elif isinstance(value, type):
        yield from ((f"{path}.{name}", part) for name, part in vars(value).items() if inspect.isroutine(part))
    else:
        yield from _of_state(path, value)
        yield path, type(value)


def _of_state(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    try:
        reduced_value = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 (then nothing in it is at fault)
        return
    if not isinstance(reduced_value, tuple):
        return
    _, arguments, *rest = reduced_value
    state = rest[0] if rest else None
    for some in state if isinstance(state, tuple) else (state,):
        if isinstance(some, Mapping):
            own = dict(some)
            for kind in ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ():
                own |= own.pop(kind, {})
            yield from ((f"{path}.{name}", part) for name, part in own.items())
    yield from ((path, part) for part in arguments if part is not type(value))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
