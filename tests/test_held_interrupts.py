"""Ctrl-C while modules are imported waits until they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from idletrain import held_interrupts
from idletrain.held_interrupts import interrupts_held, lost_interrupts_repeated, notice_if_slow


def test_an_interrupt_is_raised_after_what_it_would_have_torn() -> None:
    done: list[bool] = []

    def work() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_ends_a_command_that_imports_at_once() -> None:
    text = """
import os, signal
from idletrain.held_interrupts import quit_by_interrupt
before = signal.getsignal(signal.SIGINT)
with quit_by_interrupt():
    pass
assert signal.getsignal(signal.SIGINT) is before
try:
    with quit_by_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        while True:  # as an import that takes long
            pass
finally:
    print("an import was torn")
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_an_interrupt_that_python_ignores_is_raised_again() -> None:
    class Torn:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def wait() -> None:
        Torn()  # given to no function: where torch has a frame hook, the caller holds what it gives until the end
        time.sleep(60)  # the interrupt ends it; a busy machine may be late with it

    before = sys.unraisablehook
    with lost_interrupts_repeated():
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert sys.unraisablehook is not before
    assert sys.unraisablehook is before


def test_other_errors_that_python_ignores_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty:
        def __del__(self) -> None:
            raise ValueError("of a destructor")

    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_value))
    with lost_interrupts_repeated():
        Faulty()
    assert [str(error) for error in told] == ["of a destructor"]


def test_an_error_within_is_raised_as_it_is() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ImportError, match="gone"), interrupts_held():
        raise ImportError("gone")
    assert signal.getsignal(signal.SIGINT) is before


def test_it_works_in_another_thread_and_where_interrupts_are_ignored() -> None:
    done: list[bool] = []

    def work() -> None:
        with interrupts_held():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [True, True]


def test_only_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(held_interrupts, "SILENT_SECONDS", 0.05)
    with notice_if_slow("importing"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "idletrain: importing ...\n"
    monkeypatch.setattr(held_interrupts, "SILENT_SECONDS", 5.0)
    with notice_if_slow("importing"):
        pass
    assert capsys.readouterr().err == ""


def test_fit_can_be_used_after_a_ctrl_c_while_it_was_loaded() -> None:
    program = (
        "import os, signal, sys, threading, idletrain\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n    idletrain.fit\n"
        "except KeyboardInterrupt:\n    print('interrupted', 'idletrain.api' in sys.modules)\n"
        "idletrain.fit\n"
        "import dask.utils\n"
        "print('usable')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "interrupted True\nusable\n", done.stderr
