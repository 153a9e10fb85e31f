"""What can go wrong, as a tree; every message ends in what to do next.

IdletrainError          exit code 1
├── JobError            exit code 2: the input is wrong; holds every fault found, one sentence each
├── RunError            the run cannot go on as asked
├── DamageError         durable state was changed by something other than idletrain
└── RefusedError        a peer was turned away, or turned us away
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

SELF_EXPLAINING = (ImportError, OSError, RuntimeError, TypeError, ValueError)  # whose text needs no name before it


class IdletrainError(Exception):
    """Base of all expected errors; its text is shown to the user as it stands."""

    exit_code = 1


class JobError(IdletrainError):
    """The job or a command's arguments are wrong; nothing was started."""

    exit_code = 2

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))


class RunError(IdletrainError):
    """The run ended or cannot start for a reason outside the job file."""


class DamageError(IdletrainError):
    """A ledger, an update or a snapshot does not hold what was written to it."""


class RefusedError(IdletrainError):
    """A worker and a head do not fit together, for example by version."""


@contextlib.contextmanager
def user_code(before: str, after: str = "") -> Iterator[None]:
    """Around code that is the user's: whatever it raises is a fault of the job, `before`, the reason, `after`.

    Raises:
        JobError: the code within raised something.
    """
    try:
        yield
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(before + _reason(error) + after) from error


def _reason(error: BaseException) -> str:
    """The first line of an error's text, after the error's name where the text alone says little (`KeyError: 'a'`)."""
    text = str(error).strip().split("\n")[0]
    if not text:
        return type(error).__name__
    return text if isinstance(error, SELF_EXPLAINING) else f"{type(error).__name__}: {text}"
