"""The builder of a real data set, on a dictionary of our own; and the job files beside it."""

from __future__ import annotations

import gzip
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from idletrain.job_file import load_job
from idletrain.nn.data.extreme import SparseFiles
from idletrain.nn.faults import resolve
from idletrain.nn.wide.samplers import sampler_of

WORKFLOWS = Path(__file__).parents[2] / "workflows"
NOUNS = """  1 This software and database is being provided to you
00001740 03 n 01 entity 0 000 | that which is perceived to have its own existence
00001930 03 n 01 thing 0 000 | that which has its own weight
"""


@pytest.fixture
def builder() -> Any:
    spec = importlib.util.spec_from_file_location("build_centre_word", WORKFLOWS / "build_centre_word.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packages(tmp_path: Path) -> list[str]:
    random = np.random.default_rng(0)
    vocabulary = np.array([a + b for a in "bcdfglmnprst" for b in ("a", "e", "ix", "or", "um")])
    paragraphs = [" ".join(random.choice(vocabulary, 12)) for _ in range(200)]
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress("\n\n".join(paragraphs).encode()))
    (tmp_path / "wordnet").mkdir()
    (tmp_path / "wordnet" / "data.noun").write_text(NOUNS)
    return ["--gcide", str(tmp_path / "gcide.dict.dz"), "--wordnet", str(tmp_path / "wordnet")]


def test_rows_are_words_with_those_around_them(builder: Any, packages: list[str], tmp_path: Path, capsys: Any) -> None:
    builder.main([str(tmp_path / "out"), "--rows", "500", "--vocabulary", "50", "--window", "2", *packages])
    assert "50 words" in capsys.readouterr().out
    train, test = (SparseFiles((str(tmp_path / "out" / f"{name}.txt.gz"),)).open() for name in ("train", "test"))
    assert (train.census.features, train.census.labels) == (50, 50)
    assert len(train) > len(test) > 0
    assert (np.diff(train.y.starts) == 1).all()
    assert 1 <= np.diff(train.x.starts).max() <= 4
    assert train.x.values is not None
    assert np.add.reduceat(train.x.values, train.x.starts[:-1]).max() <= 4


def test_the_licence_of_wordnet_is_no_gloss(builder: Any, packages: list[str]) -> None:
    extracted = list(builder.texts(Path(packages[1]), Path(packages[3])))
    assert extracted[-2:] == ["that which is perceived to have its own existence", "that which has its own weight"]


def test_a_context_does_not_reach_into_another_paragraph(builder: Any, tmp_path: Path) -> None:
    vocabulary, owner = np.arange(6, dtype=np.int32), np.array([0, 0, 0, 1, 1, 1], np.int32)
    builder.write(tmp_path / "rows.txt.gz", vocabulary, owner, np.array([2, 3, 4]), 6, 2)
    with gzip.open(tmp_path / "rows.txt.gz", "rt") as file:
        assert file.read().splitlines() == ["3 6 6", "2 0:1 1:1", "3 4:1 5:1", "4 3:1 5:1"]


def test_a_missing_package_is_named(builder: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="install the Debian package dict-gcide"):
        builder.main([str(tmp_path / "out"), "--gcide", str(tmp_path / "none")])


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_job_file_is_sound_and_names_a_factory_that_takes_its_sizes(path: Path) -> None:
    job = load_job(path)
    assert job.name == path.stem
    inspect.signature(resolve(job.model.factory, "model.factory")).bind(**job.model.args)
    if sampler := job.model.args.get("sampler"):
        sampler_of(sampler)
