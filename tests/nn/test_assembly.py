"""A network that is much worse than its subnets says so, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from idletrain.nn import assembly
from idletrain.nn.evaluate import assembled
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.nn.program import Program


def loud(prepared: Prepared, program: Program) -> Network:
    """A network whose hidden neurons all say the same, so that sums over them are as large as can be."""
    network = Network.of(program, prepared.network)
    for values in network.values:
        values.abs_()
    return network


def test_a_network_about_as_good_as_its_subnets_is_no_news(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(norm=None, subnets=4)
    network = Network.of(prepared.program, prepared.network)
    subnets = prepared.program.subnets(0, by_neurons([0.25] * 4))
    assert assembly.warning(prepared.program, network, subnets, (1.9, 1.0)) is None
    assert assembly.warning(prepared.program, network, subnets, (1.0, 2.0)) is None


def test_a_network_whose_sums_are_not_those_of_its_subnets_names_the_layer(
    small_program: Callable[..., Prepared],
) -> None:
    prepared = small_program(norm=None, subnets=4)
    layout = prepared.program.layout
    unscaled = replace(layout, tensors=tuple(replace(t, scaled=()) for t in layout.tensors), contractions=())
    program = replace(prepared.program, layout=unscaled)
    subnets = program.subnets(0, by_neurons([0.25] * 4))
    warning = assembly.warning(program, loud(prepared, program), subnets, (8.0, 1.0))
    assert warning is not None
    second = [name for name, layer in prepared.module.named_modules() if type(layer).__name__ == "Linear"][1]
    assert "is 8, 8.0 times its subnets' 1: use fewer subnets or training.method: local-sgd, or name " in warning
    groups = " and ".join(group.name for group in layout.groups)
    assert warning.endswith(f"or name {groups} in model.exclude, as they differ first in layer {second}")
    assert assembly.likely_layer(prepared.program, loud(prepared, prepared.program), subnets_of(prepared)) is None


def subnets_of(prepared: Prepared) -> list:
    return prepared.program.subnets(0, by_neurons([0.25] * 4))


def test_the_network_s_loss_is_taken_on_the_same_samples_every_time(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(norm=None, subnets=2)
    module = assembled(prepared.module, prepared.network)
    samples = prepared.program.source.open()
    first, second = (assembly.training_loss(module, samples, prepared.program) for _ in range(2))
    assert first == second
    assert np.isfinite(first)


def test_where_both_have_all_but_learned_it_there_is_no_warning(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program((6, 16, 16, 3), subnets=2)
    program = prepared.program
    network = Network.of(program, prepared.network)
    subnets = program.subnets(0, program.specs((0.5, 0.5), 1))
    for losses, warned in (((0.0145, 0.006), False), ((0.027, 0.006), True), ((3.0, 0.5), True)):
        assert (assembly.warning(program, network, subnets, losses, 1.0) is not None) is warned
    assert assembly.warning(program, network, subnets, (0.0145, 0.006)) is not None
