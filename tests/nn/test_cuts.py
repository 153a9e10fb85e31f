"""A module is cut where that pays, and trained whole where it does not, with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn import cuts, models
from idletrain.nn.cuts import Cuts, CutSettings, cuts_or_whole
from idletrain.nn.ist import discovery
from idletrain.nn.ist.groups import split_share

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def found(module: nn.Module, inputs: Any = X, method: str = "ist", **requested: Any) -> Cuts:
    training = TrainingSettings.model_validate({"subnets": 2, "rounds": 1, "method": method})
    return cuts_or_whole(module, inputs, training, CutSettings(**requested))


class Around(nn.Module):
    """Two layers with a forward that does something else first."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first, self.last, self.do = nn.Linear(6, 8), nn.Linear(8, 3), first

    def forward(self, x: Tensor) -> Tensor:
        self.do(self, x)
        y: Tensor = self.last(torch.relu(self.first(x)))
        return y


def untraceable(_module: nn.Module, x: Tensor) -> None:
    if len(x) == 2:  # as in all trials
        raise IndexError("odd")


BOTH_ARE_CUT = "a subnet with fewer of its neurons does not run (OneOrTheOther: both are cut)"


class OneOrTheOther(nn.Module):
    """Two groups of which only one may be cut at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = self.second(x.relu())
        if x.shape[1] < 8 and z.shape[1] < 10:
            raise ValueError("both are cut")
        y: Tensor = self.last(z.relu())
        return y


class Embedded(nn.Module):
    """A table that nothing can split, as its length is fixed, beside a layer that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.table = nn.Parameter(torch.randn(6, 60))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.relu(self.first(x @ self.table.view(6, 6, 10).sum(2))))
        return y


UNTRACED = (
    f"its neuron groups cannot be found (does not run on a few samples (untraceable at {__file__}:"
    f"{untraceable.__code__.co_firstlineno + 2} raised IndexError: odd))"
)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(6, 3), "it has nothing to split (Linear: its neurons are the network's outputs)"),
        (Around(untraceable), UNTRACED),
        (Embedded(), "less than 30% of its parameters are in groups that can be split"),
    ],
    ids=["nothing", "untraceable", "too little"],
)
def test_a_module_that_does_not_suit_ist_is_trained_whole_and_says_why(module: nn.Module, reason: str) -> None:
    got = found(module)
    assert got.layout.groups == ()
    assert (got.training.method, got.training.instead_of) == ("local-sgd", "ist")
    assert got.fallback == (
        f"the model is trained whole, by local-sgd and not by ist: {reason}; write model.groups by hand to split it"
    )


def test_a_fault_of_the_search_itself_keeps_a_module_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(cuts, "with_scaling", broken)
    got = found(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    assert "the search for its neuron groups fails (ZeroDivisionError: odd); write model.groups" in got.fallback


@pytest.mark.parametrize(("seconds", "once"), [(1.0, lambda: sum(range(1000))), (0.2, lambda: time.sleep(0.01))])
def test_a_search_without_end_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, once: Callable[[], object]
) -> None:
    """One that computes when its CPU time is over, one that waits when ten times as much has passed."""
    monkeypatch.setattr(cuts, "SEARCH_SECONDS", seconds)
    started = time.monotonic()
    got = found(Around(lambda _module, _x: [once() for _ in range(10**9)]))
    assert time.monotonic() - started < 5
    assert f"the search for its neuron groups did not end within {seconds:.0f} s; write" in got.fallback


def test_groups_by_hand_are_taken_however_little_they_hold() -> None:
    table = {"first.weight": ("g", None), "first.bias": ("g",), "last.weight": (None, "g")}
    assert found(Embedded(), table=table).layout.sizes == (8,)
    own = Embedded()
    own.neuron_groups = table  # type: ignore[assignment]
    got = found(own)
    assert (got.layout.sizes, got.fallback, got.training.method) == ((8,), "", "ist")


def test_what_the_job_excludes_makes_no_module_whole() -> None:
    module = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 8), nn.ReLU(), nn.Linear(8, 3))
    got = found(module, exclude=("0",))
    assert got.layout.sizes == (8,)
    assert split_share(got.layout) > 0.3 or got.fallback == ""
    with pytest.raises(JobError, match=r"model\.exclude: names every group"):
        found(module, exclude=("0", "2"))


def test_local_sgd_runs_nothing_without_values() -> None:
    devices: list[str] = []
    found(Around(lambda _module, x: devices.append(x.device.type)), method="local-sgd")
    assert devices == []
    found(Around(lambda _module, x: devices.append(x.device.type)))
    assert "meta" in devices


def test_a_search_ends_at_the_same_group_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MOST_SEARCH_RUNS", 3 * 4)  # of both groups, and of each alone
    first, second = found(OneOrTheOther()).layout, found(OneOrTheOther()).layout
    assert (first.sizes, first.kept_whole) == (second.sizes, second.kept_whole)
    assert (first.sizes, dict(first.kept_whole)["second"]) == ((8,), BOTH_ARE_CUT)
    monkeypatch.setattr(discovery, "MOST_SEARCH_RUNS", 2 * 4)
    assert dict(found(OneOrTheOther()).layout.kept_whole)["second"] == (
        "the search for groups ended before it, after 8 runs of layers"
    )


def test_of_groups_that_cannot_be_cut_together_the_first_is_cut() -> None:
    layout = found(OneOrTheOther()).layout
    assert (layout.sizes, dict(layout.kept_whole)["second"]) == ((8,), BOTH_ARE_CUT)


@pytest.mark.parametrize(("channels", "subnets"), [(16, 2), (128, 4)])
def test_a_residual_stream_stays_whole_however_wide_it_is(channels: int, subnets: int) -> None:
    module = models.residual_cnn(1, channels=channels, hidden=64, blocks=2, classes=4)
    training = TrainingSettings(subnets=subnets, rounds=1)
    layout = cuts_or_whole(module, torch.randn(8, 1, 8, 8), training, CutSettings()).layout
    assert {group.name for group in layout.groups} == {"blocks.0.body.0", "blocks.1.body.0"}
    assert dict(layout.kept_whole)["stem.0"] == "it is a residual stream, which every subnet needs whole"
    assert dict(layout.kept_whole)["blocks.1.body.3"] == "as stem.0"


def test_a_narrow_sum_of_two_layers_is_cut() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(torch.relu(self.first(x) + self.second(x)))
            return y

    assert found(Sum()).layout.sizes == (8,)


def test_a_group_of_fewer_neurons_than_subnets_stays_whole() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    layout = cuts_or_whole(module, X, TrainingSettings(subnets=4, rounds=1), CutSettings()).layout
    assert layout.sizes == (8,)
    assert dict(layout.kept_whole)["0"] == "it has fewer neurons (3) than there are subnets (4)"
    in_two = cuts_or_whole(module, X, TrainingSettings(subnets=4, copies=2, rounds=1), CutSettings()).layout
    assert in_two.sizes == (3, 8)
    seven = cuts_or_whole(module, X, TrainingSettings(subnets=7, copies=2, rounds=1), CutSettings()).layout
    reason = "it has fewer neurons (3) than there are subnets (7), even with each in 2"
    assert dict(seven.kept_whole)["0"] == reason


def test_the_share_that_groups_hold_counts_every_value_once() -> None:
    layout = found(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))).layout
    assert split_share(layout) == pytest.approx(1 - 3 / (6 * 8 + 8 + 8 * 4 + 4 + 4 * 3 + 3))


def copied(copies: int, subnets: int = 4) -> Cuts:
    settings = TrainingSettings.model_validate({"subnets": subnets, "rounds": 1, "copies": copies})
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return cuts_or_whole(module, X, settings, CutSettings())


def test_as_many_copies_as_subnets_cut_nothing() -> None:
    assert copied(2).layout.groups
    assert not copied(4).layout.groups


def test_more_copies_than_subnets_are_refused() -> None:
    with pytest.raises(JobError, match=r"training.copies: 5 is more than training.subnets: 4; use at most as many"):
        copied(5)
