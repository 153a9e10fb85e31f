"""Tables that pages include, made from the code: each function returns Markdown."""

from __future__ import annotations

import re

from idletrain.cli.job_fields import sections
from idletrain.observe import records
from idletrain.observe.metrics import COUNTERS, GAUGES

FEWEST_EVENTS = 20  # kinds of events; fewer mean that the docstring has another form


def job_fields() -> str:
    """Every section of a job file with its fields: type, default and docstring."""
    lines: list[str] = []
    for section in sections():
        lines += [f"\n## {section.path or 'The whole job'}\n\n{section.meaning}\n"]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        for field in section.fields:
            kind = f"[section](#{field.path.replace('.', '')})" if field.kind == "section" else field.kind
            default = f"`{field.default}`" if field.default not in ("", "required") else field.default
            lines.append(f"| `{field.path}` | {kind} | {default} | {field.meaning} |")
    return "\n".join(lines)


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
