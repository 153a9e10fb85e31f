"""What all sections of a job refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from idletrain.strict_settings import StrictSettings


class Section(StrictSettings):
    rate: float = 1.0


@pytest.mark.parametrize("fields", [{"rat": 1.0}, {"rate": math.nan}, {"rate": math.inf}])
def test_unknown_fields_and_numbers_that_are_not_finite_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Section(**fields)


def test_a_section_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Section().rate = 2.0  # type: ignore[misc]
