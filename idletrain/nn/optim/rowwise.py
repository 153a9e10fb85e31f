"""Optimizer steps whose time grows with the rows of the gradient, not of the parameter.

A gradient is row-sparse where it is a coalesced `torch.sparse_coo` tensor with one sparse dimension. Letters: R rows,
A rows in the gradient, H numbers in a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from idletrain.nn.optim import kernels

ADAGRAD_EPS = 1e-10  # torch.optim.Adagrad's default


def rows_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row numbers `[A]` and values `[A, ...]` of a row-sparse gradient, each row once."""
    index = gradient._indices()[0]
    if not (index[1:] > index[:-1]).all():  # cheaper than to coalesce: autograd forgets that it is
        gradient = gradient.coalesce()
    return gradient._indices()[0], gradient._values()


def sgd(parameter: Tensor, gradient: Tensor, *, lr: float, weight_decay: float = 0.0) -> None:
    """Do a step of plain SGD on the rows that the gradient has."""
    index, grad = rows_of(gradient)
    if weight_decay:
        grad = grad + weight_decay * parameter[index]
    parameter.index_add_(0, index, grad, alpha=-lr)


def lazy_adam(
    parameter: Tensor,
    gradient: Tensor,
    state: tuple[Tensor, Tensor],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
) -> None:
    """Do a step of Adam on the gradient's rows and their moments (as torch.optim.SparseAdam), with decoupled decay.

    Args:
        state: Mean and mean square of the gradient, shaped like the parameter.
        step: Number of steps of the whole parameter so far, including this one.
    """
    index, grad = rows_of(gradient)
    mean, square = (moment[index] for moment in state)
    mean.lerp_(grad, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    for moment, rows in zip(state, (mean, square), strict=True):
        moment[index] = rows
    rate = lr / (1 - betas[0] ** step)
    denominator = (square / (1 - betas[1] ** step)).sqrt_().add_(eps)
    rows = parameter[index] * (1 - lr * weight_decay)
    parameter[index] = rows.addcdiv_(mean, denominator, value=-rate)


def row_adagrad(parameter: Tensor, gradient: Tensor, sums_R: Tensor, *, lr: float, start: float) -> None:
    """Do a step of row-wise Adagrad: a row's learning rate is lr / sqrt(start + its sum of mean squared gradients).

    Args:
        gradient: Row-sparse or dense.
        sums_R: One sum for each row (the parameter's first dimension), zero before the first step.
        start: Initial value of the sums; zero makes each row's first step as long as lr, however small its gradient.
    """
    if parameter.ndim == 0:
        parameter, gradient, sums_R = parameter.view(1), gradient.view(1), sums_R.view(1)
    if gradient.is_sparse:
        index, grad = rows_of(gradient)
    else:
        index, grad = torch.arange(len(parameter), device=parameter.device), gradient
    flat, grad = parameter.view(len(parameter), -1), grad.reshape(len(index), -1)
    grad = grad.float()
    if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
        arrays = (t.detach().contiguous().numpy() for t in (flat, sums_R, index, grad))
        kernels.adagrad_rows(*arrays, lr, start, ADAGRAD_EPS)
        return
    means = torch.linalg.vector_norm(grad, dim=1).square_() / grad.shape[1]
    sums = sums_R[index] + means
    sums_R[index] = sums
    step = (lr / ((sums + start).sqrt() + ADAGRAD_EPS))[:, None] * grad
    moved = flat[index].float() - step
    flat[index] = moved if flat.dtype == torch.float32 else round_at_random(moved, flat.dtype)


def round_at_random(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to bfloat16, up or down with the probability that keeps the mean.

    Rounded to nearest, every step below 1/256 of its weight would be lost.
    """
    assert dtype == torch.bfloat16
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(dtype)


class RowAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad as a torch optimizer, for dense and row-sparse gradients, float32 and bfloat16.

    Args:
        parameters: Parameters or groups of them.
        lr: Learning rate.
        start: Initial value of each row's sum of squares.
    """

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, start: float = 1e-6) -> None:
        super().__init__(parameters, {"lr": lr, "start": start})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "sums" not in state:
                        state["sums"] = torch.zeros(len(parameter), device=parameter.device)
                    row_adagrad(parameter, parameter.grad, state["sums"], lr=group["lr"], start=group["start"])
        return loss
