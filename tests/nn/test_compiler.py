"""A C++ compiler is tried before it is relied on, and what it makes is kept where only this user can write."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest

from idletrain.nn import compiler as tools
from idletrain.nn.compiler import Compiler, compiler, private_cache, tried_compiler


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tools.CACHE_VARIABLE, raising=False)


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
    began = time.monotonic()
    wrapper = script(tmp_path, "hanging", f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    assert "for a line of C++" in tried_compiler(wrapper).fault
    assert time.monotonic() - began < 30
    behind = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(behind) and psutil.Process(behind).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_compiled_code_is_kept_in_a_folder_that_nobody_else_can_enter(cache: Path) -> None:
    folder = private_cache.__wrapped__()
    assert folder.parent == cache / "torch"
    assert folder.stat().st_mode & folder.parent.stat().st_mode & 0o777 == 0o700


def test_machines_of_other_kinds_that_share_a_home_have_folders_of_their_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "compiler", lambda: Compiler("g++ 12"))
    folders = {private_cache.__wrapped__()}
    assert private_cache.__wrapped__() in folders
    monkeypatch.setattr(tools, "compiler", lambda: Compiler("g++ 13"))
    folders.add(private_cache.__wrapped__())
    monkeypatch.setattr(tools, "CPU_INFO", tmp_path / "cpuinfo")
    for flags in ("sse4_2 avx2", "sse4_2 avx2 avx512f"):
        (tmp_path / "cpuinfo").write_text(f"model name\t: Made up\nflags\t\t: {flags}\n")
        folders.add(private_cache.__wrapped__())
    assert len(folders) == len(list((cache / "torch").iterdir())) == 4


def test_a_folder_that_the_user_names_is_kept_if_nobody_else_can_enter_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    monkeypatch.setenv(tools.CACHE_VARIABLE, str(named))
    assert private_cache.__wrapped__().parent == cache / "torch"
    named.mkdir(mode=0o700)
    assert private_cache.__wrapped__() == named
    named.chmod(0o777)
    own = private_cache.__wrapped__()
    assert own.parent == cache / "torch"
    monkeypatch.setenv(tools.CACHE_VARIABLE, str(own.with_name("another-machine-s")))
    own.with_name("another-machine-s").mkdir(mode=0o700)
    assert private_cache.__wrapped__() == own


def test_a_folder_that_others_may_have_made_is_not_used(cache: Path, tmp_path: Path) -> None:
    folder = cache / "torch"
    folder.mkdir()
    folder.chmod(0o770)
    taken = private_cache.__wrapped__()
    assert not taken.is_relative_to(folder)
    assert taken.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert not private_cache.__wrapped__().resolve().is_relative_to((tmp_path / "elsewhere").resolve())
