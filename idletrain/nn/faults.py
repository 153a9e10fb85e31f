"""Collect the faults of a job's model and data, so that all are reported at once."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from idletrain.errors import JobError, user_code

FAULTY: Any = object()  # in place of the result of a check that failed or could not run


class FaultCollector:
    """Run checks that depend on each other as far as possible, and report all faults together."""

    def __init__(self) -> None:
        self._faults: dict[str, None] = {}
        self._cause: BaseException | None = None  # what the user's own code raised first

    def check(self, step: Callable[..., Any], *inputs: Any, after: Any = None) -> Any:
        """Return the step's result for the inputs; FAULTY if it raises a JobError or follows a FAULTY one."""
        if any(value is FAULTY for value in (*inputs, after)):
            return FAULTY
        try:
            return step(*inputs)
        except JobError as error:
            self._faults |= dict.fromkeys(error.faults)
            self._cause = self._cause or error.__cause__
            return FAULTY

    def raise_all(self) -> None:
        """Raise all faults at once, if there are any.

        Raises:
            JobError: with every fault, once.
        """
        if self._faults:
            raise JobError(tuple(self._faults)) from self._cause


def resolve(path: str, field: str) -> Any:
    """Import `package.module:attribute`.

    Raises:
        JobError: there is no such module or attribute, or importing it fails.
    """
    module, _, attribute = path.replace(":", ".").rpartition(".")
    remedy = "write it as package.module:name, and run idletrain in the module's folder"
    if module and _is_there(module):
        remedy = "correct it, or install what it imports"
    with user_code(f"{field}: {path!r} cannot be imported (", f"); {remedy}"):
        found = importlib.import_module(module)
    if not hasattr(found, attribute):
        own = [name for name in vars(found) if not name.startswith("_")]
        close = difflib.get_close_matches(attribute, own, n=1)
        raise JobError(f"{field}: {module} has no {attribute}; {f'did you mean {close[0]}?' if close else 'define it'}")
    return getattr(found, attribute)


def _is_there(module: str) -> bool:
    """Return whether Python finds a module, whatever importing that leads to."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        package = module.rpartition(".")[0]
        return not (error.name == package or package.startswith(f"{error.name}."))  # one that it imports is missing
    except Exception:  # noqa: BLE001 (what a package's own code raises)
        return True


def made(factory: Callable[..., Any], path: str, args: Mapping[str, Any], section: str) -> Any:
    """Call the factory that a section of the job names.

    Raises:
        JobError: it does not take the arguments, or fails without any.
    """
    if fault := _unfit(factory, args):
        raise JobError(f"{section}.args: {path} does not take {args}: {fault}")
    with user_code(f"{section}.args: {path} fails with {args}: " if args else f"{section}.factory: {path} fails: "):
        return factory(**args)


def _unfit(factory: Callable[..., Any], args: Mapping[str, Any]) -> str:
    """Return why a factory does not take arguments, those too many before those that are missing; else ""."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # it tells none, as some that are written in C
        return ""
    try:
        signature.bind_partial(**args)
        signature.bind(**args)
    except TypeError as error:
        return str(error)
    return ""
