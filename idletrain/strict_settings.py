"""Define what the sections of a job have in common: their base, counts and durations."""

from __future__ import annotations

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
