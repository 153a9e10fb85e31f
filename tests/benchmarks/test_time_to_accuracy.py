"""The comparison with the peers: its arithmetic on records made by hand, and real tiny runs of every kind of script."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import time_to_accuracy, where_time_goes
from benchmarks.environment import PEERS
from benchmarks.machines import Counter, Loopback, free_port
from benchmarks.methods import CASES, Entry
from benchmarks.peers.node import build
from benchmarks.race import job_tree, progress_of
from benchmarks.ranking import figures_of, levels_of, ranking, tables_of
from benchmarks.sweep import candidates
from benchmarks.time_to_accuracy import main
from idletrain.job_file import parse_job
from idletrain.nn.ist.discovery import find_groups
from idletrain.nn.ist.shape_runs import for_trials

needs_peers = pytest.mark.skipif(
    not PEERS.installed(),
    reason="the peers' environment is not installed; make peers",
)


def record(**fields):
    return {
        "case": "b",
        "nodes": 8,
        "link": "100mbit",
        "head_link": "100mbit",
        "method": "ddp",
        "settings": {"lr": 0.1},
        "steps": 20,
        "step_seconds": 12.0,
        "local_step_seconds": 1.2,
        "bytes_per_step": 1e9,
        "target": 0.88,
        "curve": [],
    } | fields


UNSHAPED = record(link="none", head_link="none", curve=[[50, 60.0, None, 0.85], [100, 120.0, None, 0.881]])
IST = record(method="ist", curve=[[50, 6.0, 5e7, 0.83], [1000, 100.0, 1e9, 0.88]])


def test_a_probe_is_computed_from_the_steps_without_shaping():
    probe = next(s for s in ranking([record(), UNSHAPED]) if s["link"] == "100mbit")
    assert (probe["steps"], probe["seconds"], probe["bytes"]) == (100, 1200.0, 1e11)
    assert probe["computed"]
    assert probe["shares"]["local"] == pytest.approx(0.1)


def test_steps_of_other_settings_or_nodes_compute_nothing():
    for other in ({"settings": {"lr": 0.2}}, {"nodes": 4}, {"method": "ist"}):
        probe = next(s for s in ranking([record(), {**UNSHAPED, **other}]) if s["link"] == "100mbit")
        assert probe["seconds"] is None


def test_data_parallel_with_16_bits_takes_data_parallels_steps():
    probe = next(s for s in ranking([record(method="ddp-fp16"), UNSHAPED]) if s["method"] == "ddp-fp16")
    assert (probe["steps"], probe["computed"]) == (100, True)


def test_the_best_settings_are_kept():
    slower = record(method="ist", settings={"lr": 0.2}, curve=[[2000, 200.0, 2e9, 0.89]])
    (row,) = ranking([slower, IST])
    assert (row["seconds"], row["computed"]) == (100.0, False)


def test_the_targets_are_ratios_to_the_rivals_time_and_bytes():
    rival = record(method="torchft-diloco", curve=[[100, 500.0, 3e9, 0.9]])
    figures = {f.what: f for f in figures_of([record(), UNSHAPED, IST, rival])}
    where = "case b, 8 nodes, 100mbit"
    assert figures[f"{where}: time, ddp / ist"].value == pytest.approx(12.0)
    assert figures[f"{where}: time, ddp / ist"].met is False
    assert figures[f"{where}: bytes, ddp / ist"].met is True
    assert figures[f"{where}: time, local SGD's best kind / ist"].value == pytest.approx(5.0)


def test_a_table_tells_what_was_not_reached():
    unfinished = record(link="none", head_link="none", steps=75, curve=[[70, 70.0, None, 0.87]])
    table = next(table for table in tables_of([record(), unfinished]) if "100mbit" in table["title"])
    assert table["title"].startswith("case b, 8 nodes, 100mbit")
    assert table["rows"][0][:2] == ["ddp", "more than 840"]  # 70 steps that were scored, 12 s each


def test_of_settings_that_did_not_get_there_the_bound_that_says_least_is_kept():
    runs = [record(settings={"lr": lr}, curve=[[steps, 1.0, 1.0, 0.5]]) for lr, steps in ((0.1, 20), (0.2, 10))]
    (row,) = ranking([*runs, record(settings={"lr": 0.3})])
    assert row["more_than"] == 120.0


def test_of_settings_whose_schedule_ended_below_the_target_the_longest_is_kept():
    runs = [record(settings={"horizon": steps}, curve=[[steps, 1.0, 1.0, 0.5]]) for steps in (10, 20)]
    assert ranking(runs)[0]["more_than"] == 240.0
    going_on = record(settings={"horizon": 100}, curve=[[15, 1.0, 1.0, 0.5]])  # it may get there with its next step
    assert ranking([*runs, going_on])[0]["more_than"] == 180.0


def test_a_bound_that_is_too_low_tells_nothing_of_a_target():
    bound = record(curve=[[50, 600.0, 5e10, 0.87]])
    figures = {f.what: f for f in figures_of([bound, IST])}
    ratio = figures["case b, 8 nodes, 100mbit: time, ddp / ist"]
    assert (ratio.value, ratio.unit, ratio.met) == (6.0, "x or more", None)
    sent = figures["case b, 8 nodes, 100mbit: bytes, ddp / ist"]
    assert (sent.value, sent.unit, sent.met) == (50.0, "x or more", True)


def test_what_is_only_timed_says_so():
    (table,) = tables_of([record()])
    assert table["rows"][0][1] == "only timed"


def test_lower_accuracies_have_their_times_too():
    table = next(table for table in levels_of([record(), UNSHAPED, IST]) if "100mbit" in table["title"])
    assert table["head"][1] == "to 0.80"
    assert table["rows"] == [["ist", *["6"] * 2, *["100"] * 4], ["ddp", *["~600"] * 3, *["~1200"] * 3]]


def test_rounds_give_every_node_its_steps(tmp_path):
    entry = Entry(method="ist", settings={"lr": 0.1, "local_steps": 50}, steps=400)
    job = parse_job(job_tree(CASES["b"], entry, 8, tmp_path, 1.0))
    assert (job.training.rounds, job.training.subnets, job.nodes.count) == (8, 8, 8)
    lines = [{"kind": "round_committed", "round": n, "steps": 400, "t": 3.0 + 2 * n} for n in range(2)]
    assert progress_of(lines, ours=True, nodes=8) == {1: (50, 3.0), 2: (100, 5.0)}


@pytest.mark.parametrize("name", "abcd")
def test_every_case_can_be_cut_for_eight_nodes(name, tmp_path):
    batch = torch.zeros(4, 64, dtype=torch.int64) if name == "d" else torch.zeros(4, 28, 28)
    entry = next(entry for entry in candidates(name, "100mbit") if entry.method == "ist")
    model = job_tree(CASES[name], entry, 8, tmp_path, 1.0)["model"]
    layout = find_groups(*for_trials(build(model), batch))
    assert layout.groups
    assert all(group.size >= 8 for group in layout.groups)


def test_machines_of_loopback_are_named_as_a_testbeds():
    bed = Loopback(2)
    assert tuple(bed.names) == ("head", "n0", "n1")
    assert bed.carried_bytes() is None
    assert free_port() > 0


class Carrying(Loopback):
    """Links that carry 100 bytes between two looks."""

    sleeps = 0

    def carried_bytes(self):
        self.sleeps += 1
        return 100 * self.sleeps


def test_bytes_are_counted_to_the_very_end():
    counter = Counter(Carrying(2))
    counter.close()
    (first, _), (last, _) = counter.samples
    assert counter.between(first, last) == 100


def test_an_unknown_method_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--methods", "magic"])
    assert "there is no magic" in capsys.readouterr().err


def test_idletrain_reaches_a_tiny_target(tmp_path):
    result = main(
        ["--tiny", "--methods", "ist", "--json", str(tmp_path / "ist.json"), "--events", str(tmp_path / "run")]
    )
    (run,) = result["runs"]
    assert run["curve"][-1][3] >= run["target"]
    assert 0 < run["local_step_seconds"] < run["step_seconds"]
    assert json.loads((tmp_path / "ist.json").read_text())["tiny"]
    assert where_time_goes.main([str(tmp_path / "run")])["rounds"]


@needs_peers
def test_peers_reach_a_tiny_target(tmp_path):
    result = main(["--tiny", "--methods", "ddp,ddp-powersgd,hivemind", "--json", str(tmp_path / "peers.json")])
    assert {run["method"] for run in result["runs"]} == {"ddp", "ddp-powersgd", "hivemind"}
    for run in result["runs"]:
        assert run["curve"][-1][3] >= run["target"], run
    assert (tmp_path / "peers.svg").stat().st_size > 0
    assert time_to_accuracy.RESULTS.name == "time_to_accuracy.json"
