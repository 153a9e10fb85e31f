"""Write RESULTS.md from the benches' own files, so that no number in it was typed by hand.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
HEAD = """# Results

Made by `python -m benchmarks.tables` from `results/*.json`, which `python -m benchmarks` writes; every file holds the
raw samples. Medians of several runs; the machines are shared and noisy, so read ratios before absolute times.
"""


def page(results: list[dict[str, Any]]) -> str:
    """The page, one table a bench."""
    return "\n".join([HEAD, *(line for result in results for line in _section(result))])


def _section(result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"## {result['benchmark'].replace('_', ' ')}\n"
    yield f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 2**30:.0f} GiB; {result['date'][:10]};"
    yield f"{versions}.\n"
    yield "| figure | value | target | |\n|---|---|---|---|"
    for figure in result["figures"]:
        verdict = {None: "", True: "met", False: "**missed**"}[figure["met"]]
        yield f"| {figure['what']} | {figure['value']:.4g} {figure['unit']} | {figure['target']} | {verdict} |"
    yield ""


def main() -> None:
    """Write RESULTS.md."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    (Path(__file__).parent / "RESULTS.md").write_text(page(results))


if __name__ == "__main__":
    main()
