"""Test the builder of a real data set of rare labels, on a dictionary of our own."""

from __future__ import annotations

import gzip
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from idletrain.nn.data.extreme import SparseFiles

BUILDER = Path(__file__).parents[2] / "workflows" / "build_headword.py"
DICTIONARY = """Apple \\Ap"ple\\, n. [Etymology that is no text.]
   The fleshy fruit of a tree. [1913 Webster]

   1. Any tree that bears it. [1913 Webster]

   [1913 Webster]

Pear \\Pear\\, n.
   A fleshy fruit. --Bacon."""
NOUNS = """  1 This software and database is being provided to you
00001740 03 n 02 Apple_tree 0 malus(a) 0 001 @ 00001930 n 0000 | a tree
"""


@pytest.fixture
def builder() -> Any:
    spec = importlib.util.spec_from_file_location("build_headword", BUILDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packages(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(DICTIONARY.encode()))
    (tmp_path / "wordnet").mkdir()
    (tmp_path / "wordnet" / "data.noun").write_text(NOUNS)
    return tmp_path / "gcide.dict.dz", tmp_path / "wordnet"


def test_texts_are_paragraphs_and_glosses_with_their_headwords(builder: Any, packages: tuple[Path, Path]) -> None:
    assert list(builder.paragraphs(packages[0])) == [
        (["apple"], ["the", "fleshy", "fruit", "of", "a", "tree"]),
        (["apple"], ["any", "tree", "that", "bears", "it"]),
        (["pear"], ["a", "fleshy", "fruit", "bacon"]),
    ]
    assert list(builder.glosses(packages[1])) == [(["apple tree", "malus"], ["a", "tree"])]


def test_words_of_two_texts_are_weighted_by_tf_idf_and_rows_have_length_1(builder: Any) -> None:
    texts = [(["x"], ["a", "b", "b"]), (["y", "x"], ["a", "c", "b"]), (["z"], ["a", "c"]), (["z"], ["rare"])]
    lines, features, labels = builder.lines_of(texts, [0, 1, 2])
    assert (features, labels) == (3, 3)
    b, c = (math.log(3 / 2),) * 2  # a is in every training text, so it weighs nothing
    assert lines[0] == "0 0:0 1:1\n"
    assert lines[1] == f"0,1 0:0 1:{b / math.hypot(b, c):.4g} 2:{c / math.hypot(b, c):.4g}\n"
    assert lines[3] == ""


def test_both_files_have_the_same_sizes(builder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    drawn = [([f"label {n // 2}"], [f"w{i}" for i in random.integers(0, 20, 6)]) for n in range(100)]
    monkeypatch.setattr(builder, "paragraphs", lambda _: iter(drawn))
    monkeypatch.setattr(builder, "glosses", lambda _: iter(()))
    builder.main([str(tmp_path), "--gcide", str(tmp_path), "--wordnet", str(tmp_path)])
    train, test = (SparseFiles((str(tmp_path / f"{name}.txt.gz"),)).open() for name in ("train", "test"))
    assert (len(train), len(test)) == (95, 5)
    for part in (train, test):
        assert (part.census.features, part.census.labels) == (20, 50)
        assert part.x.values is not None
        np.testing.assert_allclose(np.add.reduceat(part.x.values**2, part.x.starts[:-1]), 1, rtol=1e-2)


def test_a_missing_package_is_named(builder: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="install the Debian package dict-gcide"):
        builder.main([str(tmp_path / "out"), "--gcide", str(tmp_path / "none")])
