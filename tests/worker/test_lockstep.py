"""Members of a lockstep group exchange values over links that are queues; real links are in tests/chaos."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from idletrain.errors import RunError
from idletrain.worker.lockstep import JointExchange

MEMBERS = 3


class Queues:
    """A link between threads: `swap` returns the messages once all members have called it."""

    members = MEMBERS

    def __init__(self, me: int, boxes: list[list[queue.Queue[bytes]]]) -> None:
        self.me, self._boxes = me, boxes

    def swap(self, messages: list[bytes]) -> list[bytes]:
        for k, message in enumerate(messages):
            self._boxes[k][self.me].put(message)
        return [box.get(timeout=10) for box in self._boxes[self.me]]


def together(do: Callable[[int, JointExchange], Any]) -> list[Any]:
    """Each member's result."""
    boxes: list[list[queue.Queue[bytes]]] = [[queue.Queue() for _ in range(MEMBERS)] for _ in range(MEMBERS)]
    members = [JointExchange(Queues(k, boxes), lambda messages: messages) for k in range(MEMBERS)]
    with ThreadPoolExecutor(MEMBERS) as threads:
        return list(threads.map(do, range(MEMBERS), members))


def test_all_get_the_logarithm_of_all_exponentials() -> None:
    own = torch.randn(MEMBERS, 7)
    result = together(lambda k, softmax: softmax.logsumexp(own[k]))
    assert torch.allclose(result[0], own.exp().sum(0).log(), atol=1e-6)
    assert all(torch.equal(result[0], other) for other in result)


@pytest.mark.parametrize("rows", [9, 7, 2, 1], ids=lambda rows: f"{rows} rows")
def test_all_get_the_same_bits_of_a_sum(rows: int) -> None:
    own = torch.randn(MEMBERS, rows, 5)
    result = together(lambda k, softmax: softmax.sum(own[k]))
    assert torch.allclose(result[0], own.sum(0), atol=1e-6)
    assert all(torch.equal(result[0], other) for other in result)


@pytest.mark.parametrize(
    ("votes", "agreed"),
    [
        ([(False, False)] * 3, False),
        ([(False, False), (True, False), (False, False)], True),
        ([(False, False), (True, False), (False, True)], False),
    ],
    ids=["nobody wants one", "one does", "one does and another cannot"],
)
def test_a_checkpoint_is_made_by_all_or_by_none(votes: list[tuple[bool, bool]], agreed: bool) -> None:
    def step(k: int, softmax: JointExchange) -> bool:
        softmax.checkpoint_vote = votes[k]
        softmax.logsumexp(torch.zeros(4))
        return softmax.checkpoint_agreed

    assert together(step) == [agreed] * 3


def test_members_whose_hidden_layers_differ_find_out() -> None:
    layers = [[torch.ones(3, 4), torch.zeros(4)] for _ in range(MEMBERS)]
    together(lambda k, softmax: softmax.agree(layers[k]))
    layers[1][0][2, 3] += 1e-6

    def compare(k: int, softmax: JointExchange) -> bool:
        with pytest.raises(RunError, match="hidden layers came out different"):
            softmax.agree(layers[k])
        return True

    assert together(compare) == [True] * MEMBERS
