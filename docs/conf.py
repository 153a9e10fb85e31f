"""How `make docs` builds this documentation.

IDLETRAIN_DOCS_ONLINE=1 links into the documentation of Python, torch, NumPy and Dask; without it, the build needs no
network.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

from idletrain.observe import records
from idletrain.observe.metrics import COUNTERS, GAUGES

GENERATED = Path(__file__).parent / "_generated"
FEWEST_EVENTS = 20  # kinds of events; fewer mean that the docstring has another form

online = os.environ.get("IDLETRAIN_DOCS_ONLINE") == "1"

project = "idletrain"
author = "the idletrain authors"
release = version = importlib.metadata.version("idletrain")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.autodoc_pydantic",
    "sphinxcontrib.typer",
]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = "idletrain"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
add_module_names = False
napoleon_use_ivar = True

autodoc_pydantic_model_show_json = False
autodoc_pydantic_model_show_config_summary = False
autodoc_pydantic_model_show_validator_summary = False
autodoc_pydantic_model_show_validator_members = False
autodoc_pydantic_model_show_field_summary = False
autodoc_pydantic_model_member_order = "bysource"
autodoc_pydantic_model_signature_prefix = "section"
autodoc_pydantic_model_hide_paramlist = True
autodoc_pydantic_field_show_alias = False
autodoc_pydantic_field_signature_prefix = "field"

# Names of other projects resolve only with their inventories; names that are not public here are shown as text.
nitpick_ignore_regex = [("py:.*", r"idletrain\..*"), ("py:.*", r"(Loss|Event|_Settings|Paths)")]
if online:
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "distributed": ("https://distributed.dask.org/en/stable", None),
    }
else:
    nitpick_ignore_regex.append(("py:.*", r".*"))


def _metrics_table() -> list[str]:
    """The table of metrics that reference/metrics.md includes."""
    rows = ["| name | kind | label | meaning |", "|---|---|---|---|"]
    for kind, suffix, families in (("counter", "_total", COUNTERS), ("gauge", "", GAUGES)):
        rows += [f"| `idletrain_{name}{suffix}` | {kind} | {label} | {text} |" for name, text, label, _ in families]
    return rows


def _records_table() -> list[str]:
    """The table of events that reference/records.md includes, from the docstring of `idletrain.observe.records`."""
    events: list[list[str]] = []
    for line in (records.__doc__ or "").splitlines():
        if match := re.match(r"    (\w+(?:, \w+)*)  +(\S.*)", line):
            events.append([match[1], match[2]])
        elif events and line.startswith("     "):
            events[-1][1] += " " + line.strip()
    if len(events) < FEWEST_EVENTS:
        raise ValueError("the docstring of idletrain.observe.records does not list `kind  fields` any more")
    return ["| kind | fields |", "|---|---|", *(f"| `{kind}` | {fields} |" for kind, fields in events)]


GENERATED.mkdir(exist_ok=True)
for name, rows in (("metrics", _metrics_table()), ("records", _records_table())):
    GENERATED.joinpath(f"{name}.md").write_text("\n".join(rows) + "\n")
