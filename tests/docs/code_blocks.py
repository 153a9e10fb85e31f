"""The pages of README and docs, and their code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every page that people read."""
    docs = [page for page in sorted((ROOT / "docs").rglob("[a-z]*.md")) if not {"_build", "_generated"} & {*page.parts}]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs, *sorted((ROOT / "examples").glob("**/README.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    """A code block: its language, the other words behind the fence, and its text."""

    language: str
    arguments: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        return next((word.removeprefix("file=") for word in self.arguments if word.startswith("file=")), None)


def blocks(page: Path) -> list[Block]:
    code_blocks = []
    for match in FENCE.finditer(page.read_text()):
        language, *arguments = match[1].split()
        code_blocks.append(Block(language, tuple(arguments), match[2]))
    return code_blocks


def commands(text: str) -> Iterator[str]:
    """The lines of a console block that a person types, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        assert line.startswith("$ "), f"{line}: every line of a console block begins with `$ `"
        yield line[2:].split("  # ")[0].strip()


def shortened(job: dict[str, Any]) -> dict[str, Any]:
    """A job with less work: two workers, and two rounds of two subnets with five steps."""
    less = {"rounds": 2, "local_steps": 5, "evaluate_every": 2, "subnets": 2}
    return {**job, "training": {**job["training"], **less}, "nodes": {**job.get("nodes", {}), "count": 2}}
