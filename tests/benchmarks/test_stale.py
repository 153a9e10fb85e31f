"""Results that are older than the code they measure are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__ as every
from benchmarks import stale

CODE = '''"""Say what."""

LIMIT = 3  # at most


def half(x: float) -> float:
    """Return a half."""
    # of it
    return x / 2
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/page.py").write_text("SECONDS = 5\n")
    (tmp_path / "idletrain/observe/templates").mkdir(parents=True)
    (tmp_path / "idletrain/observe/display.py").write_text(CODE)
    (tmp_path / "idletrain/observe/templates/page.html").write_text("<p>\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("idletrain/observe/display.py", "/ 2", "/ 3"),
        ("idletrain/observe/display.py", "LIMIT = 3", "LIMIT = 4"),
        ("idletrain/observe/templates/page.html", "<p>", "<b>"),
        ("benchmarks/page.py", "5", "6"),
    ],
)
def test_what_computes_something_else_is_another_digest(root: Path, path: str, old: str, new: str) -> None:
    before = stale.digests("page", root)
    (root / path).write_text((root / path).read_text().replace(old, new))
    differ = {name for name, digest in stale.digests("page", root).items() if digest != before[name]}
    assert differ == {path if path.startswith("benchmarks") else "idletrain/observe"}


@pytest.mark.parametrize(
    ("old", "new"), [("Return a half", "Halve"), ("# of it", "# of all"), ("  # at most", ""), ("\n\n\n", "\n\n")]
)
def test_words_are_no_code(root: Path, old: str, new: str) -> None:
    before = stale.digests("page", root)
    path = root / "idletrain/observe/display.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert stale.digests("page", root) == before


def test_a_new_file_and_one_that_is_gone_are_changes(root: Path) -> None:
    before = stale.digests("page", root)
    assert before["idletrain/cluster/dask_scheduler.py"] == ""
    (root / "idletrain/observe/more.py").write_text("MORE = 1\n")
    assert stale.digests("page", root)["idletrain/observe"] != before["idletrain/observe"]
    (root / "benchmarks/page.py").unlink()
    assert stale.digests("page", root)["benchmarks/page.py"] == ""


def test_a_result_of_this_code_is_not_stale_and_one_of_other_code_is(tmp_path: Path) -> None:
    result = {"benchmark": "wide_labels, all", "code": stale.digests("wide_labels")}
    assert stale.changed(result) == []
    other = result["code"] | {"idletrain/nn/wide": "0"}
    assert stale.changed({**result, "code": other}) == ["idletrain/nn/wide"]
    assert len(stale.changed({"benchmark": "quality"})) == 1 + len(stale.MEASURES["quality"])


@pytest.mark.parametrize("name", stale.MEASURES)
def test_every_benchmark_measures_what_is_there(name: str) -> None:
    assert all(stale.digests(name).values())


def test_every_benchmark_says_what_it_measures() -> None:
    assert set(every.NAMES) <= set(stale.MEASURES)
    kept = {json.loads(path.read_text())["benchmark"].partition(",")[0] for path in stale.RESULTS.glob("*.json")}
    assert kept <= set(stale.MEASURES)


def test_the_command_names_stale_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stale, "RESULTS", tmp_path)
    result = {"benchmark": "offers", "date": "2026-11-01T00:00:00", "code": stale.digests("offers")}
    (tmp_path / "offers.json").write_text(json.dumps(result))
    assert stale.main() == 0
    assert "code as it is" in capsys.readouterr().out
    (tmp_path / "old.json").write_text(json.dumps({**result, "code": {}}))
    assert stale.main() == 1
    shown = capsys.readouterr().out
    assert "old.json" in shown
    assert "offers.json" not in shown
