"""The tree of expected errors; every message ends in what to do next.

IdletrainError          exit code 1
├── JobError            exit code 2: the input is wrong; holds every fault, one sentence each
│   └── FinishedError   the run has reached its end, and the job does not ask for more
├── RunError            the run cannot start or continue
├── DamageError         durable state was changed by something other than idletrain
└── RefusedError        a peer was turned away, or turned us away
"""

from __future__ import annotations

import contextlib
import functools
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LONGEST_SHOWN = 100  # characters of a value, an address or a reason
SELF_EXPLANATORY = (ImportError, OSError, RuntimeError, TypeError, ValueError)  # whose text needs no name before it
NOT_THE_USER_S = (*(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))


class IdletrainError(Exception):
    """Base of all expected errors; its text is shown to the user as it stands."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the text, and below it the traceback of what the user's own code raised."""
        return [f"{type(self).__name__}: {self}", *own_traceback(self).splitlines()]


class JobError(IdletrainError):
    """The job or a command's arguments are wrong; nothing was started."""

    exit_code = 2

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))


class FinishedError(JobError):
    """A run that should go on has reached its end already."""


class RunError(IdletrainError):
    """The run ended or cannot start for a reason outside the job file."""


class UnansweredError(RunError):
    """A cloud refuses a request or does not answer it; what it names may go on all the same."""


class DamageError(IdletrainError):
    """A write-ahead log, an update or a snapshot does not hold what was written to it."""


class RefusedError(IdletrainError):
    """A worker and a head do not fit together, for example because their versions differ."""


DIVERGED = (
    "the training diverges (NaN in several attempts); start another run with a lower learning rate, or look for NaN in "
    "the data or in a loss of your own"
)


def stopped(text: str) -> KeyboardInterrupt:
    """Return what a call raises whose run was stopped by Ctrl-C or SIGTERM; a notebook shows the text alone.

    It is no subclass: only of KeyboardInterrupt itself does Python end as programs do that Ctrl-C ends, so that a shell
    ends its loop over scripts, too.
    """
    stop = KeyboardInterrupt(text)
    stop.__dict__["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {text}"]
    return stop


@contextlib.contextmanager
def user_code(before: str, after: str = "") -> Iterator[None]:
    """Run the user's own code: whatever it raises becomes a fault of the job, with the user's function and the line.

    Args:
        before: The fault's text before the reason.
        after: The fault's text after it.

    Raises:
        JobError: the code within raised something.
    """
    with _as_faults(lambda error: before + placed(error) + after):
        yield


@contextlib.contextmanager
def tried_code() -> Iterator[None]:
    """Run the user's own code in a trial that may fail: whatever it raises becomes its reason alone.

    Raises:
        JobError: the code within raised something.
    """
    with _as_faults(_reason):
        yield


@contextlib.contextmanager
def _as_faults(sentence: Callable[[BaseException], str]) -> Iterator[None]:
    try:
        yield
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        raise JobError(sentence(error)) from error


@contextlib.contextmanager
def user_code_fails(remedy: str) -> Iterator[None]:
    """Run our own code, by which the user's is called at any depth: what that raises becomes one sentence.

    Args:
        remedy: What to do then.

    Raises:
        RunError: the user's code raised something.
    """
    try:
        yield
    except IdletrainError:
        raise
    except Exception as error:
        if is_interrupt(error) or not any(map(_is_the_user_s, traceback.extract_tb(error.__traceback__))):
            raise
        raise RunError(f"{placed(error)}{remedy}") from error


def in_python(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function's errors name its argument and not the command line's option, without the package's own frames."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except IdletrainError as error:
            error.args = tuple(_as_argument(str(text)) for text in error.args)
            if isinstance(error, JobError):
                error.faults = tuple(error.args[0].split("\n"))
            fault: BaseException = error.with_traceback(None)
        except KeyboardInterrupt as stop:  # from `stopped`, or before and after a run
            fault = stop.with_traceback(None)
            fault.__cause__ = fault.__context__ = None
        raise fault

    return called


def _as_argument(text: str) -> str:
    """Return a text with Python's arguments in place of the command line's options."""
    named = re.sub(r"--([a-z]+(?:-[a-z]+)*):", lambda option: option[1].replace("-", "_") + ":", text)
    return named.replace("--resume", "resume=True")


@contextlib.contextmanager
def reading(what: object, remedy: str) -> Iterator[None]:
    """Read a file that something else may have damaged: whatever its content leads to becomes one sentence.

    Args:
        what: The file or directory.
        remedy: What to do then.

    Raises:
        DamageError: the code within raised something.
    """
    try:
        yield
    except IdletrainError:
        raise
    except OSError as error:
        raise DamageError(f"{what} cannot be read ({error.strerror or error}); {remedy}") from None
    except Exception as error:
        raise DamageError(f"{what} is damaged ({_reason(error)}); {remedy}") from error


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether a Ctrl-C is the error or its cause: in the middle of an import, Python raises another one."""
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def shortened(text: str) -> str:
    """Return a text as an error shows it: not all of a long one."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _reason(error: BaseException) -> str:
    """Return the first line of an error's text, after the error's name if the text says little (`KeyError: 'a'`)."""
    text = str(error).strip().split("\n")[0]
    if not text:
        return type(error).__name__
    return text if isinstance(error, SELF_EXPLANATORY) else f"{type(error).__name__}: {text}"


def own_traceback(error: IdletrainError) -> str:
    """Return the traceback of what the user's own code raised, from that code on; "" if the error has another cause."""
    cause = error.__cause__
    if cause is None:
        return ""
    frames = traceback.extract_tb(cause.__traceback__)
    first = next((n for n, frame in enumerate(frames) if _is_the_user_s(frame)), len(frames))
    if first == len(frames):
        return ""
    return "".join([*traceback.format_list(frames[first:]), *traceback.format_exception_only(cause)])


def placed(error: BaseException) -> str:
    """Return an error's reason after the user's function that raised it, as `function at file:line raised ...`."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_the_user_s(frame)]
    if not own:
        return _reason(error)
    kind, reason = type(error).__name__, _reason(error)
    named = reason if reason.startswith(kind) else f"{kind}: {reason}"
    return f"{own[-1].name} at {own[-1].filename}:{own[-1].lineno} raised {named}"


def _is_the_user_s(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((*NOT_THE_USER_S, "<frozen"))
