"""Define what the sections of a job have in common: their base, counts and durations."""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from idletrain.quantities import parse_seconds

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]  # arrays and random draws count so far


def absolute_place(place: str) -> str:
    """Return a path with the home directory in place of `~`, and an S3 address as it is.

    Raises:
        ValueError: it was meant for S3 and is a path, or is below the home of a user that this machine does not know.
    """
    if place.lower().startswith("s3:") and not re.match("s3://[^/]", place):
        raise ValueError("should begin with s3:// and a bucket's name")
    path = os.path.expanduser(place)  # noqa: PTH111 (a Path would shorten an address)
    if path.startswith("~"):
        raise ValueError("should name a user of this machine, or begin with ./")
    return path


def kept_by_json(value: Any, name: str = "") -> Any:
    """Return a value of a job that JSON gives back as it is: a run's record and its processes get the job as JSON.

    Args:
        value: The value.
        name: Where it is within a field.

    Raises:
        ValueError: it has a part that JSON changes.
    """
    where = f" in {name}" if name else ""
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"should have text as keys{where}, '{odd[0]}' instead of {odd[0]}")
        for key, item in value.items():
            kept_by_json(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            kept_by_json(item, f"{name}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"should have a finite number{where}, or text that the function reads")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"should have text, a number, true, false, null, a list or fields{where}")
    return value


Arguments = Annotated[dict[str, Any], AfterValidator(kept_by_json)]  # of a function
Place = Annotated[str, AfterValidator(absolute_place)]  # a path or an S3 address
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]


class StrictSettings(BaseModel):
    """A section of a job: it refuses fields that it does not have, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is meant, which pydantic takes for 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any}:
                raise ValueError("should be a number")
        return value


def _kinds(annotation: Any) -> frozenset[Any]:
    """Return the types that an annotation is made of."""
    parts = get_args(annotation)
    own = {annotation} if annotation is Any or isinstance(annotation, type) else ()
    return frozenset(own).union(*map(_kinds, parts))
