"""Tables that pages include, made from the code: each function returns Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.pycode import ModuleAnalyzer

from idletrain.job import Job
from idletrain.machine_settings import NodeSettings
from idletrain.observe import records
from idletrain.observe.metrics import COUNTERS, GAUGES
from idletrain.optimizer_settings import OptimizerSettings

FEWEST_EVENTS = 20  # kinds of events; fewer mean that the docstring has another form
KINDS = (("Seconds", "duration"), ("parse_bytes", "size"), ("MinimumBytes", "size"), ("Paths", "path, or two paths"))
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def job_fields() -> str:
    """Every section of a job file with its fields: type, default and docstring."""
    docs = [
        ModuleAnalyzer.for_module(kind.__module__).find_attr_docs() for kind in (Job, NodeSettings, OptimizerSettings)
    ]
    texts = {
        place: " ".join(line.strip() for line in lines).strip() for module in docs for place, lines in module.items()
    }
    return "\n".join(_section(Job, "", texts))


def metrics() -> str:
    """The metrics that Prometheus reads."""
    rows = ["| name | kind | label | meaning |", "|---|---|---|---|"]
    for kind, suffix, families in (("counter", "_total", COUNTERS), ("gauge", "", GAUGES)):
        rows += [f"| `idletrain_{name}{suffix}` | {kind} | {label} | {text} |" for name, text, label, _ in families]
    return "\n".join(rows)


def events() -> str:
    """The kinds of events and their fields, from the docstring of the module that writes them."""
    rows: list[list[str]] = []
    for line in (records.__doc__ or "").splitlines():
        if match := re.match(r"    (\w+(?:, \w+)*)  +(\S.*)", line):
            rows.append([match[1], match[2]])
        elif rows and line.startswith("     "):
            rows[-1][1] += " " + line.strip()
    if len(rows) < FEWEST_EVENTS:
        raise ValueError(f"the docstring of {records.__name__} does not list `kind  fields` any more")
    return "\n".join(["| kind | fields |", "|---|---|", *(f"| `{kind}` | {fields} |" for kind, fields in rows)])


def _section(settings: type[BaseModel], path: str, texts: dict[tuple[str, str], str]) -> Iterator[str]:
    """A heading, the section's docstring and a table of its fields; then the sections in it."""
    yield f"\n## {path or 'The whole job'}\n\n{inspect.getdoc(settings)}\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    schema, inner = settings.model_json_schema(), []
    for name, field in settings.model_fields.items():
        here = f"{path}.{name}" if path else name
        text = texts.get((settings.__name__, name))
        if not text:
            raise ValueError(f"{settings.__name__}.{name} has no docstring; add one")
        if (part := _section_of(field.annotation)) is not None:
            inner.append((part, here))
            kind, default = f"[section](#{here.replace('.', '')})", "" if part is field.annotation else "`null`"
        else:
            kind = _kind(settings.__annotations__[name], schema["properties"][name])
            default = "required" if field.default is PydanticUndefined else f"`{_yaml(field.default, kind)}`"
        yield f"| `{here}` | {kind} | {default} | {text} |"
    for part, here in inner:
        yield from _section(part, here, texts)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The settings that a field is, or may be in place of null."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


def _kind(annotation: str, schema: dict[str, Any]) -> str:
    """A field's type in words."""
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


def _yaml(value: object, kind: str) -> str:
    """A default as a job file writes it."""
    if kind == "duration":
        return f"{value:g}s"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
