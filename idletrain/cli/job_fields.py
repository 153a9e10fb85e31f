"""Describe the fields of a job file from the settings' classes, for `idletrain fields` and the documentation."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from idletrain.errors import JobError
from idletrain.job import Job

KINDS = (("Seconds", "duration"), ("parse_bytes", "size"), ("MinimumBytes", "size"), ("Paths", "path, or two paths"))
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class JobField:
    """A field of a job file.

    Attributes:
        path: Its place, such as `training.subnets`.
        kind: What it takes, in words; `section` if it has fields of its own.
        default: Its default as a job file writes it, `required` without one, "" of a section that is always there.
        meaning: What it is.
    """

    path: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class JobSection:
    """A section of a job file, with its fields; its path is "" for the whole job."""

    path: str
    meaning: str
    fields: tuple[JobField, ...]


def named(path: str) -> list[JobField]:
    """Return a section's fields, or those of a field's name; its last parts are enough.

    Raises:
        JobError: there is none.
    """
    every = list(sections())
    for section in every:
        if section.path == path:
            return list(section.fields)
    known = [field for section in every for field in section.fields]
    exact = [field for field in known if field.path == path]
    if found := exact or [field for field in known if field.path.endswith(f".{path}")]:
        return found
    names = {name for field in known for name in (field.path, field.path.rpartition(".")[2])}
    close = difflib.get_close_matches(path, sorted(names), n=1)
    hint = f"did you mean {close[0]}?" if close else "`idletrain fields` shows the sections"
    raise JobError(f"{path}: is no field of a job file; {hint}")


def sections() -> Iterator[JobSection]:
    """Yield the whole job and every section in it, each before those within.

    Raises:
        ValueError: a field has no docstring.
    """
    yield from _sections(Job, "")


def _sections(settings: type[BaseModel], path: str) -> Iterator[JobSection]:
    schema, found, inner = settings.model_json_schema(), [], []
    for name, field in settings.model_fields.items():
        here = f"{path}.{name}" if path else name
        meaning = _meanings(sys.modules[settings.__module__]).get((settings.__name__, name))
        if not meaning:
            raise ValueError(f"{settings.__name__}.{name} has no docstring; add one")
        if (part := _section_of(field.annotation)) is not None:
            inner.append((part, here))
            kind, default = "section", "" if part is field.annotation else "null"
        else:
            kind = _kind(settings.__annotations__[name], schema["properties"][name])
            default = "required" if field.default is PydanticUndefined else _as_yaml(field.default, kind)
        found.append(JobField(here, kind, default, meaning))
    yield JobSection(path, inspect.getdoc(settings) or "", tuple(found))
    for part, here in inner:
        yield from _sections(part, here)


@functools.cache
def _meanings(module: Any) -> dict[tuple[str, str], str]:
    """Return the docstrings of the fields of a module's classes, by the names of both."""
    found = {}
    for defined in ast.parse(inspect.getsource(module)).body:
        if isinstance(defined, ast.ClassDef):
            for field, text in itertools.pairwise(defined.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                        found[defined.name, name] = " ".join(meaning.split())
    return found


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the settings that a field is, or may be in place of null."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


def _kind(annotation: str, schema: dict[str, Any]) -> str:
    """Return a field's type in words."""
    for part, kind in KINDS:
        if re.search(rf"\b{part}\b", annotation):
            return kind
    choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
    return " or ".join(filter(None, map(_one_kind, choices)))


def _one_kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = {"integer": "integer", "number": "number", "string": "text", "array": "list"}
    kind |= {"object": "mapping", "boolean": "`true` or `false`"}
    bounds = [f"{sign} {schema[bound]:g}" for bound, sign in BOUNDS.items() if bound in schema]
    return " ".join([kind[schema["type"]], ", ".join(bounds)]).strip()


def _as_yaml(value: object, kind: str) -> str:
    """Return a default as a job file writes it."""
    if kind == "duration":
        return f"{value:g}s"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
