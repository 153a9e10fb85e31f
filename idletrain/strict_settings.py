"""Define what the sections of a job have in common: their base, counts and durations."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from idletrain.quantities import parse_seconds

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]  # arrays and random draws count so far
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]


class StrictSettings(BaseModel):
    """A section of a job: it refuses fields that it does not have, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
