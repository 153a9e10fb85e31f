"""Our line in a crontab, and everybody else's left alone; `crontab` is a script that keeps a file, as cron's does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from idletrain.errors import RunError
from idletrain.schedules import crontab

# What python-crontab alone would change or fail on, all of it good for cron.
FOREIGN = """# a crontab of many years
MAILTO="me@example.org"
PATH = /usr/local/bin:/usr/bin:/bin
CRON_TZ=UTC
0 2 * * 7 backup --all  # hello
*/5 * * * sun,7 poll % with input
0  5 * *  1   spaced
# 0 5 * * * switched off # idletrain:was-here-once is only a remark

@reboot start-something
~ 3 * * * at-random
"""
COMMAND = ["/opt/my env/bin/python", "-m", "idletrain", "schedule", "run", "nightly", "--if-due", "--directory", "/a%b"]
OURS = (
    "0,15,30,45 * * * * '/opt/my env/bin/python' -m idletrain schedule run nightly --if-due --directory /a\\%b"
    " # idletrain:nightly"
)
FAKE = """#!/bin/sh
case "$1" in
-l) cat "$FAKE_CRONTAB" 2>/dev/null || { echo "no crontab for me" >&2; exit 1; } ;;
-) [ ! -e "$FAKE_CRONTAB.refuse" ] || { echo "errors in crontab file" >&2; exit 1; }; cat >"$FAKE_CRONTAB" ;;
esac
"""


@pytest.fixture
def tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a crontab command that stands first in the path."""
    command = tmp_path / "bin" / "crontab"
    command.parent.mkdir()
    command.write_text(FAKE)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CRONTAB", str(tmp_path / "tab"))
    return tmp_path / "tab"


def test_our_line_has_quotes_and_escapes_that_cron_and_the_shell_undo() -> None:
    assert crontab.line("nightly", (0, 15, 30, 45), COMMAND) == OURS


def test_other_lines_stay_as_they_are_byte_for_byte(tab: Path) -> None:
    tab.write_text(FOREIGN)
    crontab.install("nightly", (0, 15, 30, 45), COMMAND)
    assert tab.read_text() == f"{FOREIGN}{OURS}\n"
    crontab.remove("nightly")
    assert tab.read_text() == FOREIGN


def test_a_line_is_replaced_and_not_doubled_and_other_schedules_stay(tab: Path) -> None:
    crontab.install("nightly", (0,), ["a"])
    crontab.install("nightly-too", (1,), ["b"])
    crontab.install("nightly", (2,), ["c"])
    assert tab.read_text() == "1 * * * * b # idletrain:nightly-too\n2 * * * * c # idletrain:nightly\n"
    crontab.remove("nightly")
    crontab.remove("nightly")
    assert tab.read_text() == "1 * * * * b # idletrain:nightly-too\n"


def test_a_last_line_without_an_end_gets_one() -> None:
    assert crontab.with_line("0 1 * * * x", "n", "ours") == "0 1 * * * x\nours\n"


def test_every_minute_is_a_star() -> None:
    assert crontab.line("n", range(60), ["x"]) == "* * * * * x # idletrain:n"


def test_a_refusal_is_a_sentence_and_changes_nothing(tab: Path) -> None:
    tab.write_text(FOREIGN)
    tab.with_name("tab.refuse").touch()
    with pytest.raises(RunError, match=r"errors in crontab file.*nothing was changed"):
        crontab.install("nightly", (0,), COMMAND)
    assert tab.read_text() == FOREIGN


def test_without_the_command_there_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert crontab.fault() == "--on: there is no crontab command here; install cron, or use --on systemd or --on loop"


def test_with_the_command_there_is_no_fault(tab: Path) -> None:
    assert crontab.fault() is None
