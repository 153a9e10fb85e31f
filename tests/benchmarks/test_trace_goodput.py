"""A trace as turns of machines, the counting of what reached the others, and one real replay with a kill."""

from __future__ import annotations

import pytest

from benchmarks.environment import PEERS
from benchmarks.trace_goodput import Life, _of_peer, figures_of, main, thinned, turns_of
from idletrain.simulation.trace import read_trace

TRACE = "0,add,a\n0,add,b\n100000,remove,a\n200000,add,c\n900000,remove,b\n990000,add,d\n"


def test_a_machine_is_used_again_and_the_longest_stay_is_n0():
    turns = turns_of(read_trace(TRACE), seconds=10.0)
    assert [(t.at, t.machine, t.there) for t in turns] == [
        (0.0, "n1", True),
        (0.0, "n0", True),
        (1.0, "n1", False),
        (2.0, "n1", True),
        (9.0, "n0", False),
        (9.9, "n2", True),
    ]


def test_what_lies_behind_the_end_is_left_out():
    assert all(turn.at <= 5.0 for turn in turns_of(read_trace(TRACE), seconds=5.0))


def test_every_third_node_is_kept_with_its_end():
    text = "".join(f"{i}000,add,node{i}\n" for i in range(6)) + "9000,remove,node5\n9500,remove,node4\n"
    assert [change.node for change in thinned(read_trace(text))] == ["node2", "node5", "node5"]


def test_local_work_counts_up_to_the_last_synchronisation_that_took_place():
    lines = [
        {"machine": "n0", "kind": "ready", "t": 2.0},
        {"machine": "n0", "kind": "step", "t": 4.0, "steps": 50, "local_seconds": 1.5, "counted": True},
        {"machine": "n0", "kind": "step", "t": 6.0, "steps": 100, "local_seconds": 3.0, "counted": False},
        {"machine": "n0", "kind": "ready", "t": 12.0},
    ]
    lives = [Life("n0", 0.0, 10.0), Life("n0", 11.0, 15.0)]
    assert _of_peer(lines, lives, 15.0) == {"useful": 1.5, "alive": 8.0 + 3.0, "steps": 50}


def test_idletrain_should_be_above_both_peers():
    run = {"of_all": 0.5, "steps_per_node_second": 1.0, "seconds_to_target": None, "target": 0.88}
    runs = [
        {"contender": name, "goodput": g, **run}
        for name, g in (("ist-salvage", 0.9), ("torchft", 0.6), ("hivemind", 0.7))
    ]
    figures = {f.what: f for f in figures_of(runs)}
    assert figures["ist-salvage: goodput"].met is False
    assert figures["ist-salvage: goodput / the better peer's"].value == pytest.approx(0.9 / 0.7)


@pytest.mark.parametrize(
    ("ours", "theirs", "met"), [(12.0, 30.0, True), (31.0, 30.0, False), (None, 30.0, False), (12.0, None, None)]
)
def test_rolling_is_judged_by_its_time_to_the_accuracy_wherever_torchft_reaches_it(ours, theirs, met):
    run = {"goodput": 0.9, "of_all": 0.5, "steps_per_node_second": 1.0, "target": 0.88}
    times = {"ist-rolling": ours, "torchft": theirs}
    figures = figures_of([{"contender": name, "seconds_to_target": seconds, **run} for name, seconds in times.items()])
    judged = [figure.met for figure in figures if "torchft's" in figure.what]
    assert judged == ([] if met is None else [met])


def test_without_a_trace_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.delenv("IDLETRAIN_TRACE", raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert "name a trace" in capsys.readouterr().err


def test_a_tiny_replay_kills_a_node_of_idletrain():
    result = main(["--tiny", "--methods", "ist-reissue"])
    (run,) = result["runs"]
    assert run["kills"] == 1
    assert 0 < run["goodput"] <= 1
    assert run["steps"] > 0


@pytest.mark.skipif(not PEERS.installed(), reason="the peers' environment is not installed; make peers")
def test_a_tiny_replay_kills_a_node_of_torchft():
    (run,) = main(["--tiny", "--methods", "torchft"])["runs"]
    assert run["kills"] == 1
    assert 0 < run["goodput"] <= 1
    assert run["steps"] > 0
