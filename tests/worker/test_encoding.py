"""Parameters of subnets are encoded as the job says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from idletrain.errors import JobError
from idletrain.exchange.codec import SMALL_TENSOR
from idletrain.exchange.messages import LeaseId
from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.memory import subnet_need
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, prepare
from idletrain.worker import encoding

LEASE = LeaseId("run", 1, 0, 1, 7)
WIDTHS = (40, 300, 300, 3)


def prepared_of(small_program: Callable[..., Prepared], **exchange: str) -> Prepared:
    return small_program(
        widths=WIDTHS, norm="batch", exchange=exchange, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}
    )


def test_matrices_are_coded_and_biases_norms_and_state_are_not(small_program: Callable[..., Prepared]) -> None:
    prepared = prepared_of(small_program, pull="int8", push="int4")
    program = prepared.program
    (subnet, _) = program.subnets(0, by_neurons((0.5, 0.5)))
    network = Network.of(program, prepared.network)
    flat = network.pull(subnet)
    codec = encoding.codec(program, subnet, "push")
    assert codec
    large = [
        torch.Size(shape).numel()
        for shape in subnet.shapes
        if len(shape) == 2 and torch.Size(shape).numel() >= SMALL_TENSOR
    ]
    assert codec.coded == sum(large)
    assert len(large) == 2
    assert encoding.nbytes(program, subnet, "push") < encoding.nbytes(program, subnet, "pull") < 4 * len(flat)
    decoded = encoding.decode_pull(program, subnet, encoding.encode_pull(program, subnet, flat))
    assert not torch.equal(decoded, flat)
    assert torch.equal(decoded[subnet.parameters :], flat[subnet.parameters :])


def test_an_update_is_a_change_of_what_the_head_has(small_program: Callable[..., Prepared]) -> None:
    """Values that a pull rounded off do not return with the push."""
    prepared = prepared_of(small_program, pull="int8", push="int8")
    program = prepared.program
    (subnet, _) = program.subnets(0, by_neurons((0.5, 0.5)))
    flat = Network.of(program, prepared.network).pull(subnet)
    initial = encoding.decode_pull(program, subnet, encoding.encode_pull(program, subnet, flat))
    content = encoding.encode_update(program, subnet, initial.clone(), initial, LEASE)  # nothing was learnt
    codec = encoding.codec(program, subnet, "push")
    assert codec
    assert torch.equal(codec.decode(content, flat.clone()), flat)


def test_an_update_has_the_same_bits_whichever_attempt_sends_it(small_program: Callable[..., Prepared]) -> None:
    prepared = prepared_of(small_program, push="int4")
    program = prepared.program
    (subnet, _) = program.subnets(0, by_neurons((0.5, 0.5)))
    flat = Network.of(program, prepared.network).pull(subnet)
    trained = flat + 0.01 * torch.randn(len(flat))
    one, other, elsewhere = (
        encoding.encode_update(program, subnet, trained, flat, LeaseId("run", epoch, 0, subnet_, attempt))
        for epoch, subnet_, attempt in ((1, 1, 7), (2, 1, 9), (1, 0, 7))
    )
    assert torch.equal(one, other)
    assert not torch.equal(one, elsewhere)


def test_without_a_word_everything_travels_as_it_is(small_program: Callable[..., Prepared]) -> None:
    program = prepared_of(small_program).program
    (subnet, _) = program.subnets(0, by_neurons((0.5, 0.5)))
    assert encoding.codec(program, subnet, "pull") is None
    flat = torch.randn(program.buffer_size(subnet, persistent=True))
    assert encoding.encode_pull(program, subnet, flat) is flat
    assert encoding.encode_update(program, subnet, flat, flat, LEASE) is flat
    assert encoding.nbytes(program, subnet, "push") == 4 * len(flat)


def test_what_is_coded_takes_memory_and_is_trained_in_core(small_program: Callable[..., Prepared]) -> None:
    plain, coded = (prepared_of(small_program, **options).program for options in ({}, {"push": "int4"}))
    assert (
        subnet_need(coded)(0.5) - subnet_need(plain)(0.5)
        == 2 * 4 * coded.subnets(0, by_neurons((0.5, 0.5)))[0].parameters
    )
    assert (plain.out_of_core, coded.out_of_core) == ("auto", "never")


def test_codes_and_parts_of_a_subnet_exclude_each_other(small_program: Callable[..., Prepared]) -> None:
    plain: Any = prepared_of(small_program)
    training = TrainingSettings(exchange={"push": "int8"}, subnets=2)
    with pytest.raises(JobError, match=r"training.exchange: parts of a subnet out of core travel as fp32"):
        prepare(
            plain.module,
            plain.program.source,
            None,
            plain.program.loss,
            training,
            memory=MemorySettings(out_of_core="always"),
        )
