"""`idletrain plan`, before anything runs."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from idletrain.cli.plan_table import plan_table
from idletrain.errors import RunError
from idletrain.job import Job
from idletrain.job_file import load_job, parse_job
from idletrain.nn.ist.groups import Contraction, Scaling
from idletrain.nn.memory import HEAD_RESERVE_BYTES, WORKER_BYTES, subnet_need
from idletrain.nn.outofcore.executing.requirements import OutOfCoreForecast
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.nn.program import Program

DIGITS = load_job(Path(__file__).parents[2] / "workflows" / "digits.yaml")


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return from_settings(DIGITS.model, DIGITS.data, DIGITS.training)


def with_memory(job: Job, memory_bytes: int | None) -> Job:
    return job.model_copy(update={"nodes": job.nodes.model_copy(update={"memory": memory_bytes})})


def shown(prepared: Prepared, memory_bytes: int | None, job: Job = DIGITS) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(plan_table(with_memory(job, memory_bytes), prepared))
    return out.getvalue()


def test_the_digits_job_is_four_equal_subnets_that_cover_the_network(prepared: Prepared) -> None:
    text = shown(prepared, 1 << 30)
    assert "digits: 85,514 parameters, ist, 40 x 20 steps" in text
    assert "covers 100% of the neurons" in text
    assert text.count("25.0%") == 4
    assert "64 MiB" not in text
    subnets = text[text.index("subnets; a worker has 746.0 MiB for each") :]
    assert len(re.findall(r" [\d.]+ MiB +[\d.]+ s  64 64", subnets)) == 4


def test_groups_are_listed_with_the_tensors_that_they_cut(prepared: Prepared) -> None:
    rows = [line for line in shown(prepared, 1 << 30).splitlines() if ".weight" in line]
    assert [row.count(".weight") for row in rows[:2]] == [3, 3]
    assert all("256" in row for row in rows[:2])


def test_sums_over_cut_neurons_are_listed_with_what_becomes_of_them_and_whole_groups_with_the_reason(
    prepared: Prepared,
) -> None:
    text = shown(prepared, 1 << 30)
    sums, whole = text[text.index("sums over cut neurons") :].split("kept whole")
    assert re.search(r"4\.weight +as they are: a normalization", sums)
    assert re.search(r"7\.weight +multiplied by 1/share", sums)
    assert re.search(r"7 +its neurons are the network's outputs", whole)


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ("unknown", "multiplied by 1/share, untested: the network's outputs with random weights are not finite"),
        ("unused", "as they are: no output depends on them"),
        ("inputs", "inputs of 7 multiplied by 1/share, as the weights have another use"),
    ],
)
def test_a_sum_that_no_trial_decides_or_that_is_scaled_at_its_use_is_told_as_that(
    prepared: Prepared, scaling: Scaling, text: str
) -> None:
    contraction = Contraction("7.weight", 1, scaling, ("7",) if scaling == "inputs" else ())
    layout = replace(prepared.program.layout, contractions=(contraction,))
    table = shown(replace(prepared, program=replace(prepared.program, layout=layout)), 1 << 30)
    assert re.search(rf"7\.weight +{re.escape(text)}", table)


def test_workers_too_small_for_any_subnet_are_refused(prepared: Prepared) -> None:
    with pytest.raises(RunError, match="narrowest subnet needs"):
        plan_table(with_memory(DIGITS, 1 << 20), prepared)


def test_a_subnet_that_goes_out_of_core_is_shown_with_its_plan() -> None:
    job = parse_job(
        {
            **DIGITS.model_dump(mode="json"),
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 256, 256, 10]}},
            "memory": {"out_of_core": "always"},
        }
    )
    prepared = from_settings(job.model, job.data, job.training, job.memory)
    text = shown(prepared, 1 << 30, job)
    assert text.count("out of core") >= 4
    for expected in (
        "2-4",
        "recompute all",
        "compute f",
        "one step:",
        "micro-batches: not possible",
        "of each worker's scratch disk, assumed",
    ):
        assert expected in text


@pytest.mark.parametrize(("nodes", "turns"), [(4, 1), (2, 2)])
def test_widths_bytes_and_expected_time_of_a_round(nodes: int, turns: int) -> None:
    model = DIGITS.model.model_copy(update={"args": {"widths": [64, 1024, 512, 10]}})
    job = DIGITS.model_copy(update={"model": model, "nodes": DIGITS.nodes.model_copy(update={"count": nodes})})
    text = shown(from_settings(model, DIGITS.data, DIGITS.training), 1 << 30, job)
    assert text.count(" 256 128") == 4
    subnet = 64 * 256 + 2 * 256 + 256 * 128 + 2 * 128 + 128 * 10 + 10
    assert text.count(f" {subnet:,} ") == 4
    moved = 4 * 4 * subnet
    assert f"moves {moved / 2**10:.1f} KiB down and {moved / 2**10:.1f} KiB up" in text
    expected, compute, exchange = (
        float(re.search(pattern, text)[1])  # type: ignore[index]
        for pattern in (r"expected ([0-9.]+) s a round", r"([0-9.]+) s compute", r"([0-9.]+) s exchange at 1 Gbit/s")
    )
    each = [float(seconds) for seconds in re.findall(r"([0-9.]+) s  256 128", text, re.MULTILINE)]
    assert len(each) == 4
    assert min(each) > 0
    assert compute == pytest.approx(turns * max(each), abs=0.005 * (turns + 1))
    assert exchange == round(moved / 125e6, 2)
    assert expected == pytest.approx(compute + exchange, abs=0.011)


def test_this_machine_s_memory_is_shared_out_as_a_launch_does(prepared: Prepared) -> None:
    job = DIGITS.model_copy(update={"nodes": DIGITS.nodes.model_copy(update={"count": 1, "memory": None})})
    free = psutil.virtual_memory().available
    budget = re.search(r"a worker has ([0-9.]+) GiB for each", shown(prepared, None, job))
    assert budget is not None
    assert float(budget[1]) * 2**30 < free - HEAD_RESERVE_BYTES + (1 << 28)


@pytest.mark.parametrize(
    ("widths", "subnets", "told"),
    [
        ([64, 256, 10], 4, "a subnet holds up to 25% of the parameters\n"),
        ([64, 10, 10, 200], 2, "a subnet holds up to 53% of the parameters\n"),
    ],
)
def test_the_share_of_the_parameters_that_a_subnet_holds(widths: list[int], subnets: int, told: str) -> None:
    assert told in re.sub(r" +\n", "\n", shown_mlp(widths, {"subnets": subnets, "method": "ist"}))


def test_subnets_that_hold_most_parameters_are_told_with_what_would_split_better() -> None:
    one = shown_mlp([64, 32, 10], {"subnets": 1, "method": "ist"})
    assert "a subnet holds up to 100% of the parameters; at most 70% with training.subnets: 2" in one
    whole = shown_mlp([64, 8, 500, 500, 10], {"subnets": 4, "method": "ist"}, exclude=["4", "7"])
    assert "% of the parameters; most of them are in 7.weight, which stays whole: split it by model.groups" in whole


@pytest.mark.parametrize(
    ("training", "steps"),
    [
        ({}, "a neuron takes 800 of the run's 3,200 steps"),
        ({"copies": 2}, "a neuron takes 1,600 of the run's 3,200 steps"),
        ({"phases": [{"rounds": 30}, {"rounds": 10, "subnets": 1}]}, "a neuron takes 800 of the run's 2,600 steps"),
        ({"copies": 4}, None),
        ({"method": "local-sgd"}, None),
    ],
)
def test_a_run_that_learns_less_in_a_pass_than_local_sgd_is_told_as_that(
    training: dict[str, Any], steps: str | None
) -> None:
    settings = {**DIGITS.training.model_dump(exclude_unset=True), **training}
    job = parse_job({**DIGITS.model_dump(exclude_unset=True), "training": settings})
    text = shown(from_settings(job.model, job.data, job.training), 1 << 30, job)
    assert (steps in text) if steps else ("a neuron takes" not in text)


def test_a_run_without_rounds_is_told_as_that() -> None:
    job = parse_job({**DIGITS.model_dump(exclude_unset=True), "preemption": {"policy": "rolling"}})
    text = shown(from_settings(job.model, job.data, job.training), 1 << 30, job)
    assert "4 subnets are open at once" in text
    assert "a neuron takes 800 of the run's 4,800 steps" in text
    assert "the open subnets hold 67% of the neurons" in text
    assert "16.7%" in text
    assert "finish_whole" not in text


def test_what_has_its_default_is_shown_with_the_reason_and_what_the_job_changes_is_not() -> None:
    text = shown_mlp([64, 32, 10], {"method": "ist", "subnets": 2})
    for row in ("training.copies           1 ", "training.finish_whole     0.0 ", "model.split               neurons "):
        assert row in text
    assert "come closer" in text
    text = shown_mlp([64, 32, 10], {"method": "ist", "subnets": 2, "rounds": 10, "finish_whole": 0.3})
    assert "training.copies " in text
    assert "training.finish_whole" not in text
    assert "come closer" not in text
    assert "defaults" not in shown_mlp([64, 32, 10], {"method": "local-sgd"})


def test_workers_that_hold_only_a_part_of_the_network_are_said_to() -> None:
    job = parse_job(DIGITS.as_tree() | {"memory": {"out_of_core": "never"}})
    model = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 8192, 8192, 10]}}
    job = parse_job(job.as_tree() | {"model": model})
    text = shown(from_settings(job.model, job.data, job.training, job.memory), WORKER_BYTES + (70 << 20), job)
    assert re.search(r"covers \d+% of the neurons, as workers have memory for no more", text)


def test_a_model_that_is_trained_whole_is_told_first() -> None:
    text = shown_mlp([64, 10], {"method": "ist"})
    assert "defaults" not in text
    assert text.startswith("the model is trained whole, by local-sgd and not by ist: it has nothing to split (1: its ")
    assert "1 x 1 steps" not in text
    assert "650 parameters, local-sgd, " in text


def shown_mlp(widths: list[int], training: dict[str, Any], exclude: Sequence[str] = ()) -> str:
    model = {"factory": "idletrain.nn.models:mlp", "args": {"widths": widths}, "exclude": list(exclude)}
    job = parse_job({"name": "t", "model": model, "data": {"name": "digits"}, "training": training})
    return shown(from_settings(job.model, job.data, job.training), 1 << 30, job)


@pytest.mark.parametrize("size", ["auto", None])
@pytest.mark.parametrize(("budget", "told"), [("56MiB", True), ("1GiB", False)])
def test_the_size_of_micro_batches_is_told(budget: str, told: bool, size: str | None) -> None:
    model = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 2048, 10], "norm": None}}
    training = {"subnets": 2, "batch_size": 1024, "micro_batch": size}
    job = parse_job(DIGITS.as_tree() | {"model": model, "training": training, "memory": {"budget": budget}})
    prepared = from_settings(job.model, job.data, job.training, job.memory)
    text = shown(prepared, 1 << 30, job)
    assert "covers 100% of the neurons" in text
    found = re.search(r"a step takes 1024 samples, (\d+) at a time", text)
    assert (found is not None) == told
    assert ("as memory.budget does not hold a step; 1024 is all at once" in text) == (told and size is None)
    if found:
        assert int(found[1]) == prepared.program.micro_batch in (64, 128, 256)


def phased(widths: Sequence[int], *phases: dict[str, int]) -> tuple[Job, Prepared]:
    """The digits job in phases, in memory alone."""
    training = {**DIGITS.training.model_dump(exclude={"rounds"}), "phases": phases}
    model = {"factory": "idletrain.nn.models:mlp", "args": {"widths": widths, "norm": "batch"}}
    tree = {**DIGITS.model_dump(), "model": model, "training": training, "memory": {"out_of_core": "never"}}
    job = parse_job(tree)
    return job, from_settings(job.model, job.data, job.training, job.memory)


def test_each_phase_has_a_row_with_its_memory_bytes_and_time() -> None:
    job, prepared = phased(
        [64, 256, 10],
        {"rounds": 30, "subnets": 8, "copies": 4},
        {"rounds": 10, "subnets": 1, "local_steps": 40},
    )
    text = shown(prepared, 1 << 30, job)
    assert "ist, 40 rounds in 2 phases" in text
    assert "phases; a worker has 746.0 MiB for a subnet" in text
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines() if re.match(r" +\d .* s$", line)]
    assert [row[:5] for row in rows] == [["1", "30", "20", "8", "4"], ["2", "10", "40", "1", "1"]]
    share, memory, down, up, of_round, together = zip(*(row[5:] for row in rows), strict=True)
    assert share == ("50%", "100%")
    assert all(len(set(column)) == 2 for column in (memory, down, up))
    assert all(text.endswith(" s") for text in (*of_round, *together))


def test_a_phase_that_no_node_can_hold_is_refused_in_the_plan() -> None:
    job, prepared = phased([64, 2048, 2048, 10], {"rounds": 30, "subnets": 4}, {"rounds": 10, "subnets": 1})
    need = OutOfCoreForecast(prepared.program).need_bytes
    between = WORKER_BYTES + (need(0.25) + need(1.0)) // 2
    with pytest.raises(RunError, match=r"training.phases: phase 2 needs \d+ MiB for a subnet with 100% of each layer"):
        shown(prepared, between, job)


def by_depth(copies: int, nodes_memory: int = 1 << 30, split: str = "blocks") -> tuple[str, Program]:
    """The plan of a network of five residual blocks in three subnets, and its program."""
    model = {"factory": "tests.chaos.residual_network:build", "split": split}
    training = {"method": "ist", "subnets": 3, "copies": copies}
    job = parse_job({"name": "t", "model": model, "data": {"name": "digits"}, "training": training})
    prepared = from_settings(job.model, job.data, job.training)
    return shown(prepared, nodes_memory, job), prepared.program


def test_the_blocks_of_a_split_by_depth_are_listed_with_the_factor_of_their_change_and_other_candidates() -> None:
    text, program = by_depth(copies=1)
    blocks, rest = text[text.index("blocks\n") :].split("kept whole")
    sizes = re.findall(r"(\d) +([\d,]+) +its change multiplied by 3\n", blocks)
    assert sizes == [*((str(block), "4,256") for block in range(1, 5)), ("5", "8,416")]
    assert re.search(r"0 +it returns no hidden state", rest)
    assert "covers 100% of the blocks" in text
    counts = [int(count) for count in re.findall(r"33\.3% .* (\d) *\n", rest)]
    specs = program.specs([1 / 3] * 3, 1)
    assert counts == [sum(factor > 0 for _, factor in subnet.branches) for subnet in program.subnets(0, specs)]
    assert sorted(counts) == [1, 2, 2]  # the largest block is alone in its subnet


def test_a_split_by_depth_and_width_lists_blocks_and_the_neurons_of_each() -> None:
    text, program = by_depth(copies=1, split="both")
    assert len(re.findall(r"[1-5] +[\d,]+ +its change multiplied by 1\.5\n", text)) == 5
    groups = text[text.index("neuron groups") :]
    assert re.search(r"5\.inner\.1 +128 +5\.inner\.1\.weight", groups)
    assert "1.inner.3.weight" in text[text.index("sums over cut neurons") :]
    assert program.layout.groups[1].within == 0


def test_memory_of_a_split_by_depth_follows_from_the_blocks_that_the_largest_subnet_has() -> None:
    one, two, all_of_them = (subnet_need(by_depth(copies)[1])(copies / 3) for copies in (1, 2, 3))
    assert one < two < all_of_them
    with pytest.raises(RunError, match=r"the largest subnet needs .* for its residual blocks"):
        by_depth(copies=1, nodes_memory=WORKER_BYTES + one - 1)
