"""Define the machines of a job: `nodes`, their number and size, and `cloud`, where they are.

Imports nothing of torch, like `job`, which reads it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from idletrain.quantities import parse_bytes
from idletrain.strict_settings import Count, Seconds, StrictSettings

NO_IMAGE = "cloud.image: is missing; build what `idletrain infra image` writes, push the image, and name it there"


def _lower_bound(value: Any) -> Any:
    """Parse `2GiB..` (at least that much) as its lower bound in bytes."""
    return parse_bytes(value.removesuffix("..") if isinstance(value, str) else value)


MinimumBytes = Annotated[int, BeforeValidator(_lower_bound), Field(gt=0)]


class NodeSettings(StrictSettings):
    """Number and size of nodes."""

    count: Count = 4
    """Local workers, or machines of a cloud."""
    memory: MinimumBytes | None = None
    """RAM that each local worker may use, such as 2GiB; an equal part of the machine's free RAM when null. In a cloud:
    RAM that each machine must have for one subnet."""
    gpu: int = Field(default=0, ge=0, le=1000)
    """GPUs that each machine of a cloud must have."""
    spot_policy: Literal["spot", "on-demand", "auto"] = "spot"
    """Kind of machines; `auto` requests on-demand machines where there is no spot capacity."""
    max_price: float | None = Field(default=None, gt=0)
    """USD per hour that one node may cost; up to the on-demand price when null."""
    budget_usd: float | None = Field(default=None, gt=0)
    """USD that the whole run may cost: machines carry it as their own deadline."""
    max_duration: Seconds = 4 * 3600.0
    """Time after which a run in a cloud ends, whatever happens; it can be resumed."""
    idle_duration: Seconds = 600.0
    """How long a run waits without a single worker before it ends."""


class CloudSettings(StrictSettings):
    """Place of a run's machines, when a cloud provides them."""

    region: str | None = None
    """The region, such as eu-west-1; the one of AWS' own configuration when null."""
    image: str | None = None
    """The container image that machines run, such as 123456789012.dkr.ecr.eu-west-1.amazonaws.com/idletrain:1."""
    ami: str | None = None
    """The machine image, which must have Docker; Amazon's ECS-optimized one when null."""
    head: str = "t3.medium"
    """The head node's instance type: its memory must hold two networks of float32, and for `sampler: auto`, which is
    tried there, one more with optimizer state and gradients."""
    profiles: tuple[str, str] = ("idletrain-head", "idletrain-node")
    """Instance profiles of the head node and of the nodes, as infra/aws creates them."""
