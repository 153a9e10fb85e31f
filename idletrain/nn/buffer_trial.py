"""Find, by a few steps on a few samples, what training changes beside the parameters, and what it reads again.

A value is read if another value in its place changes the outputs or the gradients of the steps that follow. All that
changed are tried together, then in halves: most of them are statistics that training never reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from idletrain.errors import JobError, tried_code, user_code
from idletrain.nn.buffers import Observed, of_torch_norms
from idletrain.nn.data.batches import call, fresh, tensors_of
from idletrain.nn.ist.modules import copied, in_training
from idletrain.nn.program import Loss
from idletrain.nn.scripted import ScriptedAttributes, is_scripted

STEPS = 3  # a value that is written by one step and read by the next shows at the second
SEED = 31  # of the trial's dropout and of the other values; the same in every process
STAYED = 1e-4  # relative: what is left of an added value after STEPS; a momentum of 0.001 forgets 3e-3


@dataclass(frozen=True)
class _Place:
    """The place of a buffer or an attribute in a module."""

    name: str
    holder: Any
    short: str
    is_buffer: bool

    @property
    def value(self) -> Any:
        try:
            return self.holder[self.short]
        except KeyError:
            return None


@dataclass(frozen=True)
class _Seen:
    """A trial's steps: all numbers that they computed, and the values of all places after each."""

    numbers: list[Tensor]
    values: list[dict[str, Any]]


class BufferTrial:
    """Steps of a module that always begin with the same values.

    Args:
        module: The module, whose buffers and attributes change; `close` puts them back.
        inputs: A few samples.
        target: Their labels, or the samples themselves if they are a batch by name.
        loss: The loss; None to compute outputs without gradients.
    """

    def __init__(self, module: nn.Module, inputs: Any, target: Any, loss: Loss | None) -> None:
        self._module, self._inputs, self._target, self._loss = module, inputs, target, loss
        self._modes = [(layer, layer.training) for layer in module.modules()]
        self._places = {place.name: place for place in _places(module)}
        self._objects = {name: place.value for name, place in self._places.items()}
        self._began = {name: _copied(value) for name, value in self._objects.items()}
        self._attributes = {path: dict(vars(layer)) for path, layer in module.named_modules()}
        in_training(module)

    def close(self) -> None:
        """Put back every value and mode."""
        self._restore()
        for layer, training in self._modes:
            layer.training = training

    def observe(self) -> list[Observed]:
        """Return what changes, but for the buffers of torch's own norms.

        Raises:
            JobError: the gradient cannot be computed.
        """
        with user_code("training.loss: its gradient cannot be computed ("):
            base = self._run({})
        self._take_made(base)
        norms = of_torch_norms(self._module)
        names = [
            name
            for name in self._began
            if name not in norms and any(not _same(self._began[name], after.get(name)) for after in base.values)
        ]
        odd = {name: text for name in names if (text := self._reshaped(name, base))}
        comparable = [name for name in names if name not in odd]
        read = set(self._read(comparable, base))
        return [self._observed(name, odd.get(name, ""), base, name in read, set(comparable) - read) for name in names]

    def _take_made(self, base: _Seen) -> None:
        """Take up the attributes that the first step has made, where there was nothing or None, as it left them."""
        made = [place for place in _places(self._module) if place.name in base.values[0].keys() - self._began.keys()]
        self._places |= {place.name: replace(place, is_buffer=False) for place in made}
        self._began |= {place.name: base.values[0][place.name] for place in made}

    def _observed(self, name: str, reshaped: str, base: _Seen, read: bool, unread: set[str]) -> Observed:
        place, began = self._places[name], self._began[name]
        dtype = began.dtype if isinstance(began, Tensor) else torch.float32
        if reshaped or not place.is_buffer:
            return Observed(name, place.is_buffer, dtype, reshaped if place.is_buffer else "", read)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        before, after = began.to(wide), base.values[-1][name].to(wide)  # a tensor: else it is reshaped
        accumulates, feeds = False, False
        if not read and dtype != torch.bool:
            other = _another(began)
            seen = self._run({name: other})
            added, stayed = other.to(wide) - before, seen.values[-1][name].to(wide) - after
            accumulates = bool(((stayed - added).abs() <= STAYED * added.abs()).all())
            feeds = any(not _same(base.values[-1][o], seen.values[-1][o]) for o in unread if o != name)
        return Observed(
            name,
            True,
            dtype,
            read=read,
            accumulates=accumulates,
            feeds=feeds,
            finite=bool(before.isfinite().all() and after.isfinite().all()),
            largest=float(after.abs().max()) if after.numel() else 0.0,
            growth=float((after.abs() - before.abs()).max()) / STEPS if after.numel() else 0.0,
        )

    def _reshaped(self, name: str, base: _Seen) -> str:
        began, ended = self._began[name], base.values[-1].get(name)
        if not isinstance(began, Tensor) or not isinstance(ended, Tensor):
            return "" if type(began) is type(ended) else "becomes something else"
        if began.shape != ended.shape:
            return f"changes its shape from {list(began.shape)} to {list(ended.shape)}"
        return f"changes from {began.dtype} to {ended.dtype}" if began.dtype != ended.dtype else ""

    def _read(self, names: Sequence[str], base: _Seen) -> Iterator[str]:
        """Yield those of the names whose values are read."""
        if not names or not self._is_any_read(names, base):
            return
        if len(names) == 1:
            yield names[0]
            return
        middle = len(names) // 2
        yield from self._read(names[:middle], base)
        yield from self._read(names[middle:], base)

    def _is_any_read(self, names: Sequence[str], base: _Seen) -> bool:
        try:
            with tried_code():
                seen = self._run({name: _another(self._began[name]) for name in names})
        except JobError:  # it needs the values that it began with
            return True
        return not all(_same(a, b) for a, b in zip(base.numbers, seen.numbers, strict=True))

    def _run(self, others: dict[str, Any]) -> _Seen:
        self._restore()
        for name, value in others.items():
            place = self._places[name]
            if isinstance(value, Tensor) and name in self._objects:
                place.value.detach().copy_(value)
            else:
                place.holder[place.short] = value
        numbers, values = [], []
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(self._loss is not None):
            torch.manual_seed(SEED)
            for _ in range(STEPS):
                numbers += self._step()
                values.append({place.name: _copied(place.value) for place in _places(self._module)})
                if not others and _same_values(values[-1], self._began):
                    break  # nothing has changed, nor would it in the steps that follow
        return _Seen(numbers, values)

    def _step(self) -> list[Tensor]:
        outputs = call(self._module, fresh(self._inputs))
        seen = tensors_of(getattr(outputs, "hidden_BH", outputs))  # of a very wide output: what its scores are of
        if self._loss is None:
            return [tensor.detach() for tensor in seen]
        self._module.zero_grad(set_to_none=True)
        torch.autograd.backward(self._loss(outputs, self._target))
        gradients = [p.grad.detach().norm() for p in self._module.parameters() if p.grad is not None]
        return [*(tensor.detach() for tensor in seen), *gradients]

    def _restore(self) -> None:
        """Put back all values as the trial began, in the tensors that held them."""
        for place in _places(self._module):
            if place.name not in self._objects:
                former = self._attributes[place.name.rpartition(".")[0]]
                del place.holder[place.short]
                if place.short in former or place.is_buffer:
                    place.holder[place.short] = former.get(place.short)
        with torch.no_grad():
            for name, value in self._objects.items():
                place = self._places[name]
                place.holder[place.short] = value
                _put_back(value, self._began[name])


def observe(module: nn.Module, inputs: Any, target: Any, loss: Loss, *, wide: bool) -> list[Observed]:
    """Return what training changes beside the parameters, but for the buffers of torch's own norms.

    Gradients are compared, too, where there are buffers. A very wide network is not copied, as it may take gigabytes.
    """
    own = [name for name, _ in module.named_buffers() if name not in of_torch_norms(module)]
    trial = BufferTrial(module if wide else copied(module), inputs, target, loss if own and not wide else None)
    try:
        return trial.observe()
    finally:
        trial.close()


def _places(module: nn.Module) -> list[_Place]:
    """Return every place that holds a tensor, a tuple of tensors or a number that is no parameter."""
    return [
        _Place(f"{path}.{short}" if path else short, holder, short, is_buffer)
        for path, owner in module.named_modules()
        for holder, is_buffer in (
            (owner._buffers, True),
            (ScriptedAttributes(owner) if is_scripted(owner) else vars(owner), False),
        )
        for short, value in list(holder.items())
        if isinstance(value, Tensor) or type(value) in (int, float) or _is_of_tensors(value)
    ]


def _is_of_tensors(value: Any) -> bool:
    return type(value) is tuple and bool(value) and all(isinstance(part, Tensor) for part in value)


def _put_back(value: Any, began: Any) -> None:
    """Copy the values that tensors began with into them."""
    for tensor, former in zip(value, began, strict=True) if isinstance(value, tuple) else [(value, began)]:
        if isinstance(tensor, Tensor):
            tensor.detach().copy_(former)


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _same_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def _another(value: Any) -> Any:
    """Return another value of the same kind, larger in every place, as variances have to stay positive."""
    if isinstance(value, tuple):
        return tuple(map(_another, value))
    if not isinstance(value, Tensor):
        return value + 1
    if value.dtype == torch.bool:
        return ~value
    if not (value.is_floating_point() or value.is_complex()):
        return value + 1
    size = float(value.abs().double().nan_to_num(posinf=1).mean()) if value.numel() else 0.0
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(SEED))
    return value + ((0.5 + noise) * (size or 1.0)).to(value)
