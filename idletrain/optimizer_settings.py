"""Define the optimizers of a job: `training.optimizer`, the local one with its parameter groups and its schedule, and
`training.outer_optimizer`; and the size of micro-batches.

Imports nothing of torch, like `job`, which reads it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from idletrain.strict_settings import StrictSettings

SCHEDULES = ("constant", "linear", "cosine", "step", "one-cycle")
WITHOUT_END = ("constant", "step")  # whose factors do not depend on how many steps the run has


def _schedule_name(value: str) -> str:
    """Return the name of a schedule or a function's path; refuse others with one sentence."""
    if value in SCHEDULES or ":" in value:
        return value
    raise ValueError(f"should be one of {', '.join(SCHEDULES)}, or package.module:function")


def _size_or_auto(value: Any) -> Any:
    """Return a number of samples, `auto` or None unchanged; refuse anything else with one sentence."""
    if value in (None, "auto") or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31):
        return value
    raise ValueError("should be a number of samples, or auto")


MicroBatch = Annotated[int | Literal["auto"] | None, BeforeValidator(_size_or_auto)]
_Decay = Annotated[float, Field(ge=0, lt=1)]
_Schedule = Annotated[str, AfterValidator(_schedule_name)]


def _in_small_letters(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class ParameterGroup(StrictSettings):
    """Parameters with a learning rate or weight decay of their own, as torch's parameter groups."""

    parameters: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names or patterns (`head.*`); `bias` means all biases, `norm` all parameters of normalization layers."""
    lr: float | None = Field(default=None, ge=0)
    """The learning rate; that of the optimizer when null."""
    weight_decay: float | None = Field(default=None, ge=0)
    """The weight decay; that of the optimizer when null."""


class OptimizerSettings(StrictSettings):
    """The local optimizer, its schedule, and whether its state travels with the neurons or is reset every round."""

    name: Annotated[
        Literal["sgd", "adam", "adamw", "adagrad", "row-adagrad", "rmsprop", "lion"], BeforeValidator(_in_small_letters)
    ]
    """As in `torch.optim`, in small letters or as its class. `row-adagrad` is Adagrad with one learning rate a row;
    `lion` is Chen et al., arXiv 2302.06675. With row-sparse gradients, `adamw` and `adagrad` update only their rows."""
    lr: float = Field(gt=0)
    """The learning rate, which `schedule` multiplies."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of sgd and rmsprop."""
    nesterov: bool = False
    """Whether the momentum of sgd is Nesterov's."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay: of sgd, adam, adagrad and rmsprop added to the gradient, of adamw and lion decoupled from it."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """Decay rates of the moments of adam, adamw and lion; lion's authors use [0.9, 0.99]."""
    alpha: _Decay = 0.99
    """Decay rate of rmsprop's mean square."""
    eps: float | None = Field(default=None, gt=0)
    """What is added to denominators, of adam, adamw, adagrad and rmsprop; torch's when null: 1e-8, of adagrad 1e-10."""
    start: float | dict[str, float] | None = None
    """Initial value of the sums of squares of adagrad and row-adagrad, for all parameters or by parameter name. When
    null, 0 for adagrad and 1e-6 for row-adagrad: from zero, a row's first step would be as long as lr, however small
    its gradient."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameter groups, such as `[{parameters: [bias, norm], weight_decay: 0}]`: each has `parameters`, a list of names
    or patterns (`head.*`), `bias` for all biases or `norm` for all parameters of normalization layers, and `lr` or
    `weight_decay` of its own. A parameter belongs to the first that fits; the others have the optimizer's settings."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Norm that the gradients of each subnet's step are scaled down to where theirs is larger; no limit when null. A
    subnet's norm is not the whole network's: it is smaller before training, and several times larger when a subnet's
    loss is higher than the network's."""
    state: Literal["travel", "reset"] = "travel"
    """Whether optimizer state travels with its neurons, or is reset in every round."""
    schedule: _Schedule = "constant"
    """How lr changes from step to step: `constant`; `linear` or `cosine` (arXiv 1608.03983) down to `end_factor` at the
    last step; `step`, times `step_factor` every `step_every` steps; `one-cycle` (arXiv 1708.07120), as torch's
    `OneCycleLR`, up from lr / 25 during 30 % of the steps and down to lr / 250,000; or `package.module:function`, a
    function `(step, steps) -> factor` of lr, as of `LambdaLR`. A step is one of `local_steps`; they count through all
    rounds."""
    warmup_steps: int = Field(default=0, ge=0, le=2**31 - 1)
    """First steps, in which lr grows in proportion to the step; the schedule begins after them."""
    end_factor: float = Field(default=0.0, ge=0, le=1)
    """Part of lr that `linear` and `cosine` end at."""
    step_every: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Steps between two changes of lr by `step`."""
    step_factor: float = Field(default=0.1, gt=0, le=1)
    """What `step` multiplies lr by."""

    @property
    def ends(self) -> bool:
        """Return whether learning rates depend on the number of steps of the whole run."""
        return self.schedule not in WITHOUT_END


class OuterOptimizerSettings(StrictSettings):
    """The outer optimizer, to which the averaged change of a round is what a gradient is to the local one."""

    name: Literal["nesterov"] = "nesterov"
    """`nesterov` is gradient descent with Nesterov's momentum, as in DiLoCo (Douillard et al., arXiv 2311.08105)."""
    lr: float = Field(default=0.7, gt=0)
    """What each step is multiplied by; 1 without momentum is the average itself. The defaults are DiLoCo's."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum, a round."""
