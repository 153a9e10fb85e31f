"""The local optimizers that a job can name: each one's state, how it scales in a subnet, and how it moves parameters.

To add an optimizer, write its two moves, add one row to `OPTIMIZERS`, and its name to `OptimizerSettings`.

Muon is not here, because it loses what it gains when matrices are cut: an MLP of 64-256-256-10 with BatchNorm on digits
(12 rounds of 25 steps, cosine, the best of three learning rates, two seeds) ends with a held-out loss of 0.022 by Muon
and 0.035 by AdamW where four workers train it whole, and of 0.055 and 0.044 where they train a quarter each.

The moves call torch's optimizer functions: the first `torch.optim.SGD` of a process imports torch._dynamo, which takes
a worker 1.4 s on an idle core before its first step, at every replacement of a node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from idletrain.optimizer_settings import OptimizerSettings

ADAM_EPS = 1e-8  # the default of torch.optim's Adam, AdamW and RMSprop
ADAGRAD_EPS = 1e-10  # the default of torch.optim's Adagrad
ROW_ADAGRAD_START = 1e-6  # of parameters that `optimizer.start` does not name


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
        lr: The learning rate of these parameters at this step.
        weight_decay: The weight decay of these parameters.
    """

    optimizer: OptimizerSettings
    lr: float
    weight_decay: float

    @property
    def eps(self) -> float:
        """Return the number that is added to denominators: the job's, or torch's."""
        if self.optimizer.eps is not None:
            return self.optimizer.eps
        return ADAGRAD_EPS if self.optimizer.name == "adagrad" else ADAM_EPS

    def start(self, name: str, default: float) -> float:
        """Return the initial value of a parameter's sums of squares."""
        start = self.optimizer.start
        value = start.get(name) if isinstance(start, dict) else start
        return default if value is None else value


@dataclass(frozen=True)
class LocalOptimizerKind:
    """One row of the table.

    Attributes:
        state: The state slots for these settings, those with one number a value first.
        move_dense: Moves parameters `(parameters, gradients, state, steps, settings)` by dense gradients: `state` has a
            list of tensors for each slot, `steps` a count `[]` for each parameter, which AdamW raises. None if dense
            gradients, too, are moved row by row.
        move_rows: Moves a parameter `(name, parameter, gradient, state, step, settings)` by a row-sparse gradient; None
            if the optimizer takes none.
        refuse_rows: Returns why row-sparse gradients cannot be moved with these settings, or "".
        by_gradient: Whether a step is as large as the gradient, not only as the learning rate.
    """

    state: Callable[[OptimizerSettings], tuple[StateSlot, ...]]
    move_dense: MoveDense | None
    move_rows: MoveRows | None
    refuse_rows: Callable[[OptimizerSettings], str] = lambda _settings: ""
    by_gradient: bool = False


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
        nesterov=settings.optimizer.nesterov,
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


# --- adam and adamw ---------------------------------------------------------------------------------------------------


def _adam_state(_settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    return StateSlot("exp_avg", -1), StateSlot("exp_avg_sq", -2)


def _adam_dense(
    move: Callable[..., None],
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Sequence[list[Tensor]],
    steps: list[Tensor],
    settings: StepSettings,
) -> None:
    """Move by torch's `adam` or `adamw`, which treat weight decay differently."""
    means, squares = state
    move(
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
        eps=settings.eps,
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
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


# --- rmsprop and lion: dense gradients only ---------------------------------------------------------------------------


def _rmsprop_state(settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    momentum = (StateSlot("momentum_buffer", 1),) if settings.momentum else ()
    return StateSlot("square_avg", -2), *momentum


def _rmsprop_dense(
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Sequence[list[Tensor]],
    steps: list[Tensor],
    settings: StepSettings,
) -> None:
    rmsprop(
        parameters,
        gradients,
        state[0],
        [],
        list(state[1]) if len(state) > 1 else [],
        steps,
        lr=settings.lr,
        alpha=settings.optimizer.alpha,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        momentum=settings.optimizer.momentum,
        centered=False,
    )


def _lion_state(_settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    return (StateSlot("exp_avg", -1),)


def _lion_dense(
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Sequence[list[Tensor]],
    _steps: list[Tensor],
    settings: StepSettings,
) -> None:
    """Move by the sign of a mean of the last gradient and the moment (arXiv 2302.06675, algorithm 2)."""
    beta1, beta2 = settings.optimizer.betas
    for parameter, gradient, mean in zip(parameters, gradients, state[0], strict=True):
        parameter.mul_(1 - settings.lr * settings.weight_decay)
        parameter.add_(torch.lerp(gradient, mean, beta1).sign_(), alpha=-settings.lr)
        mean.lerp_(gradient, 1 - beta2)


def _refuse_all_rows(settings: OptimizerSettings) -> str:
    return f"training.optimizer: {settings.name} takes no row-sparse gradients; use adagrad, adamw or sgd"


# --- adagrad, by value and by row: one parameter at a time, as each has its own start ---------------------------------


def _adagrad_state(_settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    return (StateSlot("sum", -2),)


def _adagrad_rows(
    name: str, parameter: Tensor, gradient: Tensor, state: list[Tensor], _step: Tensor, settings: StepSettings
) -> None:
    """Move by a dense gradient as torch's Adagrad, by a row-sparse one its rows alone."""
    start = settings.start(name, 0.0)
    if not gradient.is_sparse:
        if settings.weight_decay:
            gradient = gradient.add(parameter, alpha=settings.weight_decay)
        sums = state[0].addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, (sums + start).sqrt_().add_(settings.eps), value=-settings.lr)
        return
    from idletrain.nn.optim import rowwise

    index, grad = rowwise.rows_of(gradient)
    grad = grad + settings.weight_decay * parameter[index]
    sums = state[0][index].addcmul_(grad, grad)
    state[0][index] = sums
    parameter.index_add_(0, index, grad / (sums + start).sqrt_().add_(settings.eps), alpha=-settings.lr)


def _row_adagrad_state(_settings: OptimizerSettings) -> tuple[StateSlot, ...]:
    return (StateSlot("sums", -2, per_row=True),)


def _row_adagrad_rows(
    name: str, parameter: Tensor, gradient: Tensor, state: list[Tensor], _step: Tensor, settings: StepSettings
) -> None:
    from idletrain.nn.optim import rowwise

    start = settings.start(name, ROW_ADAGRAD_START)
    rowwise.row_adagrad(parameter, gradient, state[0], lr=settings.lr, start=start)


OPTIMIZERS = {
    "sgd": LocalOptimizerKind(_sgd_state, _sgd_dense, _sgd_rows, _sgd_refuse_rows, by_gradient=True),
    "adam": LocalOptimizerKind(_adam_state, functools.partial(_adam_dense, adam), None, _refuse_all_rows),
    "adamw": LocalOptimizerKind(_adam_state, functools.partial(_adam_dense, adamw), _adamw_rows),
    "adagrad": LocalOptimizerKind(_adagrad_state, None, _adagrad_rows),
    "row-adagrad": LocalOptimizerKind(_row_adagrad_state, None, _row_adagrad_rows),
    "rmsprop": LocalOptimizerKind(_rmsprop_state, _rmsprop_dense, None, _refuse_all_rows),
    "lion": LocalOptimizerKind(_lion_state, _lion_dense, None, _refuse_all_rows),
}
