"""The local optimizers that a job can name: each one's state, how it scales in a subnet, and how it moves parameters.

To add an optimizer, write its two moves, add one row to `OPTIMIZERS`, and its name to `job.OptimizerSettings`.

The moves call torch's optimizer functions: the first `torch.optim.SGD` of a process imports torch._dynamo, which takes
a worker 1.4 s on an idle core before its first step, at every replacement of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from idletrain.job import OptimizerSettings

ADAMW_EPS = 1e-8  # torch.optim.AdamW's default
ADAGRAD_START = 1e-6  # of parameters that `optimizer.start` does not name


@dataclass(frozen=True)
class StateSlot:
    """One tensor of optimizer state per parameter.

    Attributes:
        name: As torch's optimizers call it.
        power: The power of a subnet's scaling factors that it is multiplied by (`nn.ist.subnets.scaled`). A gradient is
            as much smaller as its weight is larger: a momentum of SGD is a step of the weights and scales as they do
            (1), a mean of gradients scales by -1, a mean of squared gradients by -2.
        per_row: It holds one number for each row of the parameter (its first dimension), not one for each value.
    """

    name: str
    power: int
    per_row: bool = False


@dataclass(frozen=True)
class StepSettings:
    """Settings of one step, beside tensors.

    Attributes:
        optimizer: The job's settings.
        lr: The learning rate of this step.
        weight_decay: The weight decay of these parameters.
    """

    optimizer: OptimizerSettings
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class LocalOptimizerKind:
    """One row of the table.

    Attributes:
        state: The state slots for these settings, those with one number a value first.
        move_dense: Moves parameters `(parameters, gradients, state, steps, settings)` by dense gradients: `state` has a
            list of tensors for each slot, `steps` a count `[]` for each parameter, which AdamW raises. None if dense
            gradients, too, are moved row by row.
        move_rows: Moves a parameter `(name, parameter, gradient, state, step, settings)` by a row-sparse gradient.
        refuse_rows: Returns why row-sparse gradients cannot be moved with these settings, or "".
    """

    state: Callable[[OptimizerSettings], tuple[StateSlot, ...]]
    move_dense: MoveDense | None
    move_rows: MoveRows
    refuse_rows: Callable[[OptimizerSettings], str] = lambda _settings: ""


MoveDense = Callable[
    [list[Tensor], list[Tensor], Sequence[list[Tensor]], list[Tensor], StepSettings],
    None,
]
MoveRows = Callable[[str, Tensor, Tensor, list[Tensor], Tensor, StepSettings], None]


def kind_of(settings: OptimizerSettings) -> LocalOptimizerKind:
    """Return the table's row for a job's optimizer."""
    return OPTIMIZERS[settings.name]


# --- sgd --------------------------------------------------------------------------------------------------------------


def _sgd_state(settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    return (StateSlot("momentum_buffer", 1),) if settings.momentum else ()


def _sgd_dense(
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Sequence[list[Tensor]],
    _steps: list[Tensor],
    settings: StepSettings,
) -> None:
    sgd(
        parameters,
        gradients,
        list(state[0]) if state else [None] * len(parameters),
        weight_decay=settings.weight_decay,
        momentum=settings.optimizer.momentum,
        lr=settings.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def _sgd_rows(
    _name: str, parameter: Tensor, gradient: Tensor, _state: list[Tensor], _step: Tensor, settings: StepSettings
) -> None:
    from idletrain.nn.optim import rowwise  # and with it Numba: a second that other jobs' workers need not wait

    rowwise.sgd(parameter, gradient, lr=settings.lr, weight_decay=settings.weight_decay)


def _sgd_refuse_rows(settings: OptimizerSettings) -> str:
    if not settings.momentum:
        return ""
    return "training.optimizer.momentum: row-sparse gradients keep none; use 0, adamw or adagrad"


# --- adamw ------------------------------------------------------------------------------------------------------------


def _adamw_state(_settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    return StateSlot("exp_avg", -1), StateSlot("exp_avg_sq", -2)


def _adamw_dense(
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Sequence[list[Tensor]],
    steps: list[Tensor],
    settings: StepSettings,
) -> None:
    means, squares = state
    adamw(
        parameters,
        gradients,
        means,
        squares,
        [],
        steps,
        amsgrad=False,
        beta1=settings.optimizer.betas[0],
        beta2=settings.optimizer.betas[1],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=ADAMW_EPS,
        maximize=False,
    )


def _adamw_rows(
    _name: str, parameter: Tensor, gradient: Tensor, state: list[Tensor], step: Tensor, settings: StepSettings
) -> None:
    from idletrain.nn.optim import rowwise

    step += 1
    rowwise.lazy_adam(
        parameter,
        gradient,
        (state[0], state[1]),
        int(step),
        lr=settings.lr,
        betas=settings.optimizer.betas,
        eps=ADAMW_EPS,
        weight_decay=settings.weight_decay,
    )


# --- adagrad ----------------------------------------------------------------------------------------------------------


def _adagrad_state(_settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    return (StateSlot("sums", -2, per_row=True),)


def _adagrad_rows(
    name: str, parameter: Tensor, gradient: Tensor, state: list[Tensor], _step: Tensor, settings: StepSettings
) -> None:
    from idletrain.nn.optim import rowwise

    start = settings.optimizer.start
    value = start.get(name, ADAGRAD_START) if isinstance(start, dict) else start
    rowwise.row_adagrad(parameter, gradient, state[0], lr=settings.lr, start=value)


OPTIMIZERS = {
    "sgd": LocalOptimizerKind(_sgd_state, _sgd_dense, _sgd_rows, _sgd_refuse_rows),
    "adamw": LocalOptimizerKind(_adamw_state, _adamw_dense, _adamw_rows),
    "adagrad": LocalOptimizerKind(_adagrad_state, None, _adagrad_rows),
}
