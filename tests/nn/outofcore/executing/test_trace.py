"""Test the trace of tensors that outlive the next unit, and of the units that use each parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from idletrain.nn.outofcore.executing.trace import BETWEEN, trace
from idletrain.nn.outofcore.planning.profile import Held
from idletrain.nn.units import pieces_of

F = 4  # bytes of a float
B = 3


class Net(nn.Module):
    """Layers by name, run by a function."""

    def __init__(self, run, **layers: nn.Module) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(self, x)
        return out


def test_users_of_parameters_are_distinguished_though_they_lie_in_one_buffer() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    offset = 0
    for p in module.parameters():
        p.data = flat[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    assert trace(module, pieces_of(module), torch.randn(2, 4)).users == [{0}, {0}, {1}, {1}]


def test_a_chain_holds_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    _, held, waiting = trace(module, pieces_of(module), torch.randn(B, 4))
    assert held == [(), (), ()]
    assert waiting == [0, 0, 0]


def test_an_output_that_is_used_again_is_held_and_its_gradient_waits() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        first = net.a(x)
        return net.d(torch.cat([first, net.c(net.b(first)).relu()], 1))

    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 6), "c": nn.Linear(6, 4), "d": nn.Linear(8, 2)}
    module = Net(run, **layers)
    _, held, waiting = trace(module, pieces_of(module), torch.randn(B, 4))
    skip = Held(1, B * 4 * F)  # the input of b, where it is saved
    assert held == [(), (), (skip,), (skip,)]
    assert waiting == [0, B * 8 * F, B * 8 * F, 0]  # a view of the concatenation's


def test_gradients_of_an_output_with_several_later_users_are_added_up() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        first = net.a(x)
        second = net.c(net.b(first) + first)
        return net.d(torch.cat([first, second], 1))

    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4), "d": nn.Linear(8, 2)}
    module = Net(run, **layers)
    waiting = trace(module, pieces_of(module), torch.randn(B, 4)).waiting
    assert waiting == [0, B * 4 * F, B * 8 * F, 0]  # behind c the view of d's alone, before it the sum


def test_an_output_that_is_changed_in_place_is_held_once() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    def run(net: nn.Module, x: Tensor) -> Tensor:
        skip = net.b(net.a(x))
        return net.d(skip + net.c(skip))

    layers = {"a": nn.Linear(4, 4), "b": Doubled(1, 1), "c": nn.Linear(4, 4), "d": nn.Linear(4, 2)}
    module = Net(run, **layers)
    held = trace(module, pieces_of(module), torch.randn(B, 4)).held
    assert held == [(), (), (), (Held(2, B * 4 * F),)]


def test_what_a_module_around_a_unit_was_called_with_is_held() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = net.block(net.stem(x).relu())
        return out

    block = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    module = Net(run, stem=nn.Linear(4, 6), block=block)
    given = Held(1, B * 6 * F)
    assert trace(module, pieces_of(module), torch.randn(B, 4)).held == [(), (), (given,), (given,)]


def test_parameters_and_the_network_s_input_are_nobody_s_output() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        return net.b(net.a(x) @ net.a.weight.t()) + x

    module = Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    users, held, waiting = trace(module, pieces_of(module), torch.randn(B, 4))
    assert users[0] == {0, BETWEEN}
    assert held == [(), ()]
    assert waiting == [0, 0]


def test_residual_blocks_hold_and_keep_waiting_one_tensor_however_many_they_are() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        x = net.a(x)
        for layer in (net.b, net.c, net.d):
            x = x + layer(x)
        return x

    module = Net(run, **{name: nn.Linear(4, 4) for name in "abcd"})
    _, held, waiting = trace(module, pieces_of(module), torch.randn(B, 4))
    assert held == [(), (), (), ()]
    assert waiting == [0, B * 4 * F, B * 4 * F, B * 4 * F]


def test_a_network_that_raises_is_left_as_it_was() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        net.a(x)
        raise ValueError("made up")

    module = Net(run, a=nn.Linear(4, 4))
    with pytest.raises(ValueError, match="made up"):
        trace(module, pieces_of(module), torch.randn(B, 4))
    assert not any("forward" in m.__dict__ for m in module.modules())
