"""Evaluations of real runs: no round waits for one without need, and each scores the network of its own round."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import idletrain
from idletrain.errors import RunError
from idletrain.nn.data.known import digits
from idletrain.rounds.durable import module_state, snapshots

ROUNDS, SLOW = 30, 4.0


def net() -> nn.Module:
    """A network with statistics to estimate."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


class Slow:
    """A metric that takes its time once, and then is quick."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, outputs: Tensor, labels: Tensor) -> float:
        if len(outputs) > 100:  # not when it is tried on a few samples
            time.sleep(self.seconds)
            self.seconds = 0.0
        return float((outputs.argmax(-1) == labels).float().mean())


def fit(run_dir: Path, seconds: float, **settings: Any) -> tuple[list[Any], dict[int, Any]]:
    """Train with an evaluation due after every round; return the run's events and the networks that were evaluated."""
    events: list[Any] = []
    seen: dict[int, Any] = {}

    def keep(module: nn.Module, scores: Any) -> None:
        seen[scores["round"]] = {name: value.clone() for name, value in module.state_dict().items()}, dict(scores)

    idletrain.fit(
        net(), *digits(), method="ist", subnets=2, local_steps=2, rounds=ROUNDS, evaluate_every=1, workers=1, name="t",
        run_dir=run_dir, metrics={"slow": (Slow(seconds), "higher")}, on_evaluate=keep, on_event=events.append,
        **settings,
    )  # fmt: skip
    return events, seen


@pytest.fixture(scope="module")
def every_round(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The networks of all rounds: where the best is kept, each is evaluated before the next commit."""
    _, seen = fit(tmp_path_factory.mktemp("all"), 0.0, stop={"metric": "slow"})
    assert list(seen) == list(range(1, ROUNDS + 1))
    return seen


def test_rounds_go_on_beside_a_slow_evaluation_and_it_scores_its_own_round(
    tmp_path: Path, every_round: dict[int, Any]
) -> None:
    events, seen = fit(tmp_path, SLOW)
    (slow,) = [event for event in events if event["kind"] == "evaluated" and event["seconds"] >= SLOW]
    meanwhile = [
        event["round"]
        for event in events
        if event["kind"] == "round_committed" and slow["s"] - SLOW < event["s"] < slow["s"]
    ]
    assert len(meanwhile) > 1
    assert {event["round"] for event in events if event["kind"] == "evaluated"} == seen.keys()
    assert seen.keys() < every_round.keys()  # those that came due meanwhile are left out
    assert max(seen) == ROUNDS
    for round_, (state, scores) in seen.items():
        expected, expected_scores = every_round[round_]
        assert scores["loss"] == expected_scores["loss"]
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


def test_a_snapshot_beside_an_evaluation_can_be_exported_once_that_has_ended(
    tmp_path: Path, every_round: dict[int, Any]
) -> None:
    events, _ = fit(tmp_path, 0.2, checkpoint={"every": "1ms", "keep": ROUNDS})
    written = [event["round"] for event in events if event["kind"] == "snapshot"]
    assert len(written) > 2
    assert [*snapshots.rounds(tmp_path / "t")] == sorted({0, *written})
    for round_ in written:
        state, _ = every_round[round_]
        read = module_state.read(tmp_path / "t", round_)
        assert all(np.array_equal(read[name], value) for name, value in state.items())


class Breaks:
    """A loss that raises for more samples than so many."""

    __name__ = "breaks"

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if len(outputs) > self.most:
            raise KeyError("weights")
        return nn.functional.cross_entropy(outputs, labels)


PLACE = r"__call__ at \S+test_evaluation.py:\d+ raised KeyError: 'weights'"


@pytest.mark.parametrize(
    ("most", "told"),
    [
        (100, PLACE),  # as steps are planned
        (200, rf"evaluating fails: training.loss: fails on test data \({PLACE}\)"),
    ],
)
def test_a_loss_that_raises_on_the_head_ends_the_run_in_a_sentence_that_the_records_keep(
    tmp_path: Path, most: int, told: str
) -> None:
    events: list[Any] = []
    with pytest.raises(RunError) as caught:
        idletrain.fit(
            net(), *digits(), method="ist", subnets=2, local_steps=2, rounds=2, workers=1, name="t", run_dir=tmp_path,
            loss=Breaks(most), on_event=events.append,
        )  # fmt: skip
    assert re.fullmatch(rf"{told}; fix it, and go on with resume=True", str(caught.value)), caught.value
    (ended,) = [event for event in events if event["kind"] == "run_ended"]
    assert (ended["status"], ended["reason"]) == ("failed", str(caught.value).replace("resume=True", "--resume"))


@pytest.mark.parametrize(
    ("settings", "before"),
    [({}, 2048), ({"stop": {"metric": "loss"}}, None), ({"metrics": {"slow": (Slow(0.0), "higher")}}, None)],
    ids=["nothing depends on them", "the best network does", "a metric of the job"],
)
def test_before_the_last_round_2048_test_samples_are_used_unless_something_needs_all(
    tmp_path: Path, settings: dict[str, Any], before: int | None
) -> None:
    """The network stays as it is, so that losses differ only by their samples."""
    events: list[Any] = []
    train, (x, y) = digits()
    test = np.tile(x, (6, 1))[:2500], np.tile(y, 6)[:2500]
    idletrain.fit(
        net()[0:1], train, test, method="local-sgd", subnets=1, local_steps=1, rounds=4, evaluate_every=1, workers=1,
        run_dir=tmp_path, optimizer={"name": "sgd", "lr": 1e-30}, on_event=events.append, **settings,
    )  # fmt: skip
    *earlier, last = [event for event in events if event["kind"] == "evaluated"]
    assert {event.get("samples") for event in earlier} == {before}
    assert last.get("samples") is None
    losses = {event["loss"] for event in earlier}
    assert len(losses) == 1  # the same samples in all rounds
    assert (losses == {last["loss"]}) is (before is None)
