"""A run is this user's own if this user wrote all in it that can run code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from idletrain.ownership import CODE_FILES, started_here, write_signed


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def run(tmp_path: Path, state: Path) -> Path:
    """A run with both files that can run code."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in CODE_FILES:
        write_signed(folder / name, b"of " + name.encode())
    return folder


def test_the_key_is_the_user_s_alone(run: Path, state: Path) -> None:
    key = state / "idletrain" / "key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert len(key.read_bytes()) == 32
    assert list(key.parent.iterdir()) == [key]


def test_a_run_stays_one_s_own_where_it_is_moved_and_copied(run: Path, tmp_path: Path) -> None:
    assert started_here(run)
    shutil.copytree(run, tmp_path / "copy")
    assert started_here(tmp_path / "copy")


def test_another_user_s_run_is_not_one_s_own(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another's"))
    assert not started_here(run)


@pytest.mark.parametrize("name", CODE_FILES)
def test_what_is_changed_is_not_one_s_own(name: str, run: Path) -> None:
    (run / name).write_bytes(b"changed")
    assert not started_here(run)


@pytest.mark.parametrize("name", CODE_FILES)
def test_what_is_added_is_not_one_s_own(name: str, run: Path) -> None:
    (run / f"{name}.signature").unlink()
    assert not started_here(run)
    (run / name).unlink()
    assert started_here(run)
    (run / name).symlink_to(run / "nowhere")
    assert not started_here(run)


def test_a_signature_is_of_one_file_s_name(run: Path) -> None:
    for suffix in ("", ".signature"):
        shutil.copy(run / f"job.json{suffix}", run / f"program.pkl{suffix}")
    assert not started_here(run)


def test_a_directory_without_any_of_it_is_nobody_s(tmp_path: Path, state: Path) -> None:
    assert not started_here(tmp_path)


def test_without_a_state_directory_a_run_is_written_and_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    write_signed(tmp_path / "job.json", b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "job.json"]
    assert not started_here(tmp_path)
