"""A C++ compiler is tried before it is relied on, and what it makes is kept where only this user can write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from idletrain.nn import compiler as tools
from idletrain.nn.compiler import compiler, private_cache, tried_compiler


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")
def test_a_compiler_that_works_tells_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    found = compiler()
    assert found.version.startswith("g++")
    assert not found.fault


def test_one_that_is_missing_fails_or_hangs_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert compiler() == ("", "/no/such/compiler cannot be run (No such file or directory)")
    failing = script(tmp_path, "failing", "echo 'x.cpp:1: fatal error: Python.h: No such file' >&2; exit 1")
    assert "a line of C++ (x.cpp:1: fatal error: Python.h: No such file)" in tried_compiler(failing).fault
    monkeypatch.setattr(tools, "CHECK_SECONDS", 0.1)
    assert "for a line of C++" in tried_compiler(script(tmp_path, "hanging", "exec sleep 60")).fault


def test_compiled_code_is_kept_in_a_folder_that_nobody_else_can_enter(cache: Path) -> None:
    folder = private_cache.__wrapped__()
    assert folder == cache / "torch"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_have_made_is_not_used(cache: Path, tmp_path: Path) -> None:
    folder = cache / "torch"
    folder.mkdir()
    folder.chmod(0o770)
    taken = private_cache.__wrapped__()
    assert taken != folder
    assert taken.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert private_cache.__wrapped__().resolve() != (tmp_path / "elsewhere").resolve()
