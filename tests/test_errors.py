"""Expected errors, and the exit codes that they become."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import traceback
from typing import Any

import pytest

import idletrain
from idletrain import errors


def test_a_job_error_holds_every_fault_a_line_each() -> None:
    assert errors.JobError(["a: x", "b: y"]).faults == ("a: x", "b: y")
    assert str(errors.JobError(["a: x", "b: y"])) == "a: x\nb: y"
    assert errors.JobError("a: x").faults == ("a: x",)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(errors.JobError, 2), (errors.RunError, 1), (errors.DamageError, 1), (errors.RefusedError, 1)],
)
def test_exit_codes(kind: type[errors.IdletrainError], code: int) -> None:
    assert kind("x").exit_code == code
    assert issubclass(kind, errors.IdletrainError)
    assert getattr(idletrain, kind.__name__) is kind


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (ValueError("a\nb"), "a"),
        (KeyError("a"), "KeyError: 'a'"),
        (AssertionError(), "AssertionError"),
        (SystemExit(2), "SystemExit: 2"),
    ],
)
def test_whatever_a_trial_of_user_code_raises_is_a_fault_of_its_reason(raised: BaseException, reason: str) -> None:
    with pytest.raises(errors.JobError) as caught, errors.tried_code():
        raise raised
    assert str(caught.value) == reason
    assert caught.value.__cause__ is raised


def test_a_fault_found_within_user_code_stays_as_it_is() -> None:
    with pytest.raises(errors.JobError, match=r"^b: y$"), errors.user_code("a: "):
        raise errors.JobError("b: y")


def test_a_fault_of_user_code_names_the_user_s_innermost_function_and_its_line() -> None:
    def parse(text: str) -> object:
        return json.loads(text)  # raises in a library

    with pytest.raises(errors.JobError) as caught, errors.user_code("model: ", "; correct it"):
        parse("{")
    line = parse.__code__.co_firstlineno + 1
    assert str(caught.value).startswith(f"model: parse at {__file__}:{line} raised JSONDecodeError: Expecting")
    assert str(caught.value).endswith("; correct it")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (PermissionError(13, "Permission denied"), "x cannot be read (Permission denied); fix that"),
        (KeyError("a"), "x is damaged (KeyError: 'a'); fix that"),
    ],
)
def test_whatever_a_damaged_file_leads_to_is_reported_by_what_was_read(raised: Exception, message: str) -> None:
    with pytest.raises(errors.DamageError) as caught, errors.reading("x", "fix that"):
        raise raised
    assert str(caught.value) == message


def test_an_expected_error_while_reading_stays_as_it_is() -> None:
    with pytest.raises(errors.JobError, match=r"^a: b$"), errors.reading("x", "fix that"):
        raise errors.JobError("a: b")


def test_a_notebook_shows_a_fault_in_its_own_lines_and_the_user_s_traceback() -> None:
    assert errors.JobError(["a: x", "b: y"])._render_traceback_() == ["JobError: a: x\nb: y"]
    with pytest.raises(errors.JobError) as caught, errors.user_code("model: (", ")"):
        raise ValueError("wrong")
    shown = caught.value._render_traceback_()
    assert shown[0].startswith("JobError: model: (test_a_notebook_shows_a_fault")
    assert shown[0].endswith("raised ValueError: wrong)")
    assert shown[1].startswith(f'  File "{__file__}", line ')
    assert shown[-1] == "ValueError: wrong"


@pytest.mark.parametrize("error", [errors.JobError(["a", "add --resume"]), errors.RunError("add --resume")])
def test_from_python_an_error_names_the_argument(error: errors.IdletrainError) -> None:
    @errors.in_python
    def deep(levels: int) -> None:
        if not levels:
            raise error
        deep.__wrapped__(levels - 1)  # type: ignore[attr-defined]

    with pytest.raises(type(error)) as caught:
        deep(5)
    assert [entry.name for entry in caught.traceback] == ["test_from_python_an_error_names_the_argument", "called"]
    assert str(caught.value).endswith("add resume=True")
    assert getattr(caught.value, "faults", ("add resume=True",))[-1] == "add resume=True"


def raised_while_a_class_was_made() -> BaseException:
    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    try:
        type("Table", (), {"field": Field()})
    except BaseException as error:  # Python 3.11 raises a RuntimeError, later ones the interrupt
        return error
    raise AssertionError


def test_an_error_that_an_interrupt_causes_is_an_interrupt_and_one_after_it_is_not() -> None:
    assert errors.is_interrupt(raised_while_a_class_was_made())
    with pytest.raises(KeyboardInterrupt), errors.user_code("model: "):
        raise RuntimeError from KeyboardInterrupt()
    later = errors.RunError("the machines could not be ended")
    later.__context__ = KeyboardInterrupt()  # raised while that was handled
    assert not errors.is_interrupt(later)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), errors.stopped("stopped after round 3")])
def test_an_interrupt_shows_no_frames_of_the_package(stop: KeyboardInterrupt) -> None:
    @errors.in_python
    def deep() -> None:
        try:
            raise ValueError("a child's")
        except ValueError:
            raise stop from None

    with pytest.raises(KeyboardInterrupt) as caught:
        deep()
    assert caught.value is stop
    shown = "".join(traceback.format_exception(caught.value))
    assert "a child's" not in shown
    assert shown.count("  File ") == 2  # this test, and the wrapper


def test_a_script_whose_run_is_stopped_ends_as_by_ctrl_c() -> None:
    script = "from idletrain.errors import stopped\nraise stopped('stopped after round 3')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.endswith("KeyboardInterrupt: stopped after round 3\n")
    (line,) = errors.stopped("stopped after round 3")._render_traceback_()
    assert line == "KeyboardInterrupt: stopped after round 3"


def test_the_traceback_below_a_fault_begins_with_the_user_s_own_code() -> None:
    def parse(text: str) -> object:
        return json.loads(text)

    with pytest.raises(errors.JobError) as caught, errors.user_code("model: "):
        parse("{")
    lines = errors.own_traceback(caught.value).splitlines()
    assert lines[0].startswith(f'  File "{__file__}", line ')
    assert any("in parse" in line for line in lines)
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")


def test_there_is_no_traceback_where_nothing_of_the_user_s_raised() -> None:
    assert errors.own_traceback(errors.JobError("a: x")) == ""
    error = errors.RunError("x")
    error.__cause__ = ValueError("never raised")
    assert errors.own_traceback(error) == ""


def test_what_the_user_s_code_raises_below_ours_is_a_sentence_and_a_bug_of_ours_stays_one() -> None:
    with pytest.raises(errors.RunError) as caught, errors.user_code_fails("; fix it"):
        json.loads("{}", object_hook=lambda _: {}["a"])
    assert str(caught.value).startswith(f"<lambda> at {__file__}:")
    assert str(caught.value).endswith(" raised KeyError: 'a'; fix it")
    scope: dict[str, Any] = {}
    source = "def ours(fails):\n  with fails('; fix it'):\n    {}['a']"
    exec(compile(source, errors.__file__, "exec"), scope)
    with pytest.raises(KeyError):
        scope["ours"](errors.user_code_fails)
