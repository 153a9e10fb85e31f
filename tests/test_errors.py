"""Expected errors, and the exit codes that they become."""

from __future__ import annotations

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
