"""On a terminal, sentences break between words; elsewhere they are one line."""

from __future__ import annotations

import io

import pytest

from idletrain.cli.printing import in_lines, show, tell


class Terminal(io.StringIO):
    """A terminal of 40 columns."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


LONG = "expected 0.029 s a round on this fleet: 0.002 s pull, 0.018 s compute"


def test_a_long_line_breaks_between_words_on_a_terminal_only() -> None:
    assert in_lines(LONG, Terminal()).split("\n") == [
        "expected 0.029 s a round on this fleet:",
        "0.002 s pull, 0.018 s compute",
    ]
    assert in_lines(LONG, io.StringIO()) == LONG


def test_lines_keep_their_ends_and_their_indentation() -> None:
    assert in_lines(f"  {LONG}\n\nnext", Terminal()).split("\n") == [
        "  expected 0.029 s a round on this",
        "  fleet: 0.002 s pull, 0.018 s compute",
        "",
        "next",
    ]


@pytest.mark.parametrize(
    "whole", ["http://127.0.0.1:8787/idletrain?token=0123456789", "a-word-of-more-than-forty-letters-and-so-on"]
)
def test_what_has_no_spaces_stays_whole(whole: str) -> None:
    assert in_lines(f"watch it at {whole} now", Terminal()).split("\n") == ["watch it at", whole, "now"]


def test_a_command_stays_in_one_piece() -> None:
    command = "idletrain launch a/rather/long/path/job.yaml --resume --name other"
    assert in_lines(f"stopped; go on with: {command}", Terminal()).split("\n") == ["stopped; go on with:", command]


def test_what_happens_goes_to_stderr_and_results_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    tell("reading")
    show("done")
    assert capsys.readouterr() == ("done\n", "idletrain: reading\n")
