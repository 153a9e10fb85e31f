"""What all sections of a job refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from idletrain.strict_settings import Count, Place, StrictSettings


class Section(StrictSettings):
    rate: float = 1.0


@pytest.mark.parametrize("fields", [{"rat": 1.0}, {"rate": math.nan}, {"rate": math.inf}])
def test_unknown_fields_and_numbers_that_are_not_finite_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Section(**fields)


def test_a_section_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Section().rate = 2.0  # type: ignore[misc]


class Places(StrictSettings):
    """One of each kind of field that may get true, or a place."""

    count: Count | None = None
    rates: tuple[float, ...] = ()
    whether: bool = False
    anything: Any = None
    to: Place = "here"


@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_no_numbers(value: bool) -> None:
    for fields in ({"rate": value}, {"count": value}):
        with pytest.raises(ValidationError, match="should be a number"):
            (Section if "rate" in fields else Places)(**fields)  # type: ignore[arg-type]
    assert Places(whether=value, anything=value).whether is value


def test_a_place_at_home_is_found_and_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Places(to="~/runs").to == "/home/someone/runs"
    for place in ("runs/", "./~x", "/a//b", "s3://bucket/prefix/", "s3://bucket"):
        assert Places(to=place).to == place


@pytest.mark.parametrize("place", ["s3:/bucket/x", "s3:bucket", "s3:///x", "S3://bucket/x", "~nobody-of-this-name/x"])
def test_a_place_that_would_become_a_strange_folder_is_refused(place: str) -> None:
    with pytest.raises(ValidationError, match=r"should begin with s3://|should name a user"):
        Places(to=place)
