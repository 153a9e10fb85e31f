"""How `make docs` builds this documentation.

IDLETRAIN_DOCS_ONLINE=1 links into the documentation of Python, torch, NumPy and Dask; without it, the build needs no
network.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import generate

GENERATED = Path(__file__).parent / "_generated"

online = os.environ.get("IDLETRAIN_DOCS_ONLINE") == "1"

project = "idletrain"
author = "the idletrain authors"
release = version = importlib.metadata.version("idletrain")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
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

# Names of other projects resolve only with their inventories; names that are not public here are shown as text.
nitpick_ignore_regex = [("py:.*", r"idletrain\..*"), ("py:.*", r"(Loss|Event|drawn_batches|fallback_batches)")]
if online:
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "distributed": ("https://distributed.dask.org/en/stable", None),
    }
else:
    nitpick_ignore_regex.append(("py:.*", r"(torch|numpy|np|nn|pathlib|collections|typing)\..*"))

GENERATED.mkdir(exist_ok=True)
for name in ("job_fields", "metrics", "events"):
    GENERATED.joinpath(f"{name}.md").write_text(getattr(generate, name)() + "\n")
