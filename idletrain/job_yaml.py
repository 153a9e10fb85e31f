"""Read the YAML of job files and of a sweep's values: that of version 1.2, with no key twice."""

from __future__ import annotations

import re
from typing import Any

import yaml

from idletrain.errors import JobError

# What the texts of numbers and of true and false look like, and the characters that they begin with.
_CORE = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in (*_CORE, "timestamp")}


class _JobLoader(yaml.SafeLoader):
    """A safe loader that refuses a key which is there twice, of which YAML's own keep the last.

    As in YAML 1.2, `on`, `017`, `1:30` and dates are text, and not true, 15, 90 and a date as in YAML 1.1.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's way)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise JobError(f"{key.value}: is there twice, in lines {lines[key.value]} and {line}; join them")
            lines[str(key.value)] = line
        return node


for _kind, (_pattern, _first) in _CORE.items():
    _JobLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), [*_first])


def parse_yaml(text: str) -> Any:
    """Return what a text of YAML says, as plain values.

    Raises:
        JobError: a key is there twice.
        yaml.YAMLError: it is not YAML.
    """
    return yaml.load(text, _JobLoader)  # noqa: S506 (a safe loader)
