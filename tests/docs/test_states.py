"""The states of a run that the package can give are those that the docs explain."""

from __future__ import annotations

import re
from pathlib import Path

from idletrain.observe.records import DONE_STATUSES

ROOT = Path(__file__).parents[2]
GIVEN = re.compile(
    r'Finish\("([a-z]+)"\)|_ended\(state, "([a-z]+)"|status(?:: str|, [\w.]+)? = "([a-z ]+)"|status="([a-z]+)"'
)


def test_every_state_is_explained_and_every_explained_state_is_given() -> None:
    sources = [path for folder in ("observe", "rounds", "cli") for path in (ROOT / "idletrain" / folder).rglob("*.py")]
    found = [GIVEN.findall(path.read_text()) for path in (*sources, ROOT / "idletrain/run.py")]
    given = {state for groups in found for group in groups for state in group if state}
    given -= {"deadly"}  # recorded as `failed`, with the reason
    table = (ROOT / "docs/guides/watching.md").read_text().partition("## The state of a run")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| `([a-z -]+)` \| \S", table, re.MULTILINE)
    assert given >= {"starting", "stopped", "taken down", "interrupted", "failed", "diverged"}
    assert sorted(explained) == sorted(given | {*DONE_STATUSES})
