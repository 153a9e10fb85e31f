"""Every place in the code that the glossary and the newcomer's map name exists."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
ROW = re.compile(r"^\| ([\w -]+) \| ([^|]+\.) \| `(idletrain[\w.]*):([\w.]+)` \|$", re.MULTILINE)
ROWS = ROW.findall(GLOSSARY.read_text())


MAP = (ROOT / "CONTRIBUTING.md").read_text()


def check(module: str, name: str) -> None:
    """Find the place by importing it."""
    place: Any = importlib.import_module(module)
    for part in name.split("."):
        assert member(place, part), f"{module} has no {name}"
        place = getattr(place, part, None)


def member(owner: Any, name: str) -> bool:
    """Whether a module or class has a member, fields without a value included."""
    return hasattr(owner, name) or name in getattr(owner, "__annotations__", {})


def test_every_row_has_a_word_a_sentence_and_a_place() -> None:
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(lines) - 1  # the head
    terms = [word for word, *_ in ROWS]
    assert len(set(terms)) == len(terms) > 30


@pytest.mark.parametrize(("word", "sentence", "module", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_word_stands_where_it_says(word: str, sentence: str, module: str, name: str) -> None:
    check(module, name)
    assert sentence[0].isupper(), word
    source = re.sub(r"(?<=[a-z])(?=[A-Z])|[_-]|\s+", " ", inspect.getsource(importlib.import_module(module))).lower()
    assert word.lower().replace("-", " ").removesuffix("s") in source


def test_the_newcomers_map_leads_somewhere() -> None:
    places = re.findall(r"`(idletrain[\w.]*):(\w+)`", MAP)
    assert len(places) > 10
    for module, name in places:
        check(module, name)
    for path in re.findall(r"`((?:tests|docs|infra|benchmarks|workflows|examples)/[\w./]*)`", MAP):
        assert (ROOT / path).exists(), path
