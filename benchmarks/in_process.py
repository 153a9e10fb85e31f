"""Train a prepared job in this process, its subnets one after the other, with the code that workers run."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from idletrain.export import finished_module
from idletrain.nn import alone
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared


class Opened(ArraySource):
    """Arrays that are their own source."""

    def open(self) -> ArraySource:
        """Return them."""
        return self


def train(made: Prepared, rounds: int, steps: int) -> nn.Module:
    """Return the network after so many rounds of so many steps, with its statistics estimated."""
    training = made.program.training.model_copy(update={"local_steps": steps})
    program = replace(made.program, training=training)
    network = Network.of(program, made.network)
    alone.train_rounds(program, network, program.source.open(), rounds)
    return finished_module(made, network)
