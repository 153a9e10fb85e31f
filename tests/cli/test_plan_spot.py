"""What a dollar trains on machines that are taken back."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from idletrain.cli import plan_spot
from idletrain.cli.main import app
from idletrain.cli.plan_spot import candidates, share_of, stay_seconds, works_of
from idletrain.cloud.aws.account import Account
from idletrain.errors import JobError
from idletrain.job_file import parse_job
from idletrain.simulation.engine import Work
from idletrain.simulation.fleet import Fleet

MONTH = 30 * 86400.0
JOB: dict[str, Any] = {
    "name": "digits",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
    "data": {"name": "digits"},
    "training": {"local_steps": 50},
    "nodes": {"count": 2, "memory": "1GiB"},
}


def plan(*types: str, market: str = "spot") -> Any:
    offers = [SimpleNamespace(market=market)]
    return SimpleNamespace(quote=SimpleNamespace(preferred=SimpleNamespace(types=types, offers=offers)))


def work(policy: Any, subnets: int, step: float = 0.01) -> Work:
    return Work(
        policy=policy, subnets=subnets, local_steps=100, step_seconds=step, pull_seconds=0.1, push_seconds=0.1,
        pull_bytes=1, push_bytes=1, progress_seconds=5.0,
    )  # fmt: skip


def test_the_share_that_is_taken_back_is_the_mean_of_the_known_types() -> None:
    assert share_of(plan("a", "b", "c"), {"a": 0.05, "b": 0.15}) == (pytest.approx(0.1), True)
    assert share_of(plan("a"), {}) == (plan_spot.UNKNOWN_SHARE, False)
    assert share_of(plan("a", market="on-demand"), {}) == (0.0, True)


def test_a_share_of_a_month_is_a_mean_stay() -> None:
    assert stay_seconds(0.0) == math.inf
    assert math.exp(-MONTH / stay_seconds(0.2)) == pytest.approx(0.8)  # so many stay for a month


def test_what_trains_most_for_a_dollar_comes_first() -> None:
    fleet = Fleet(nodes=4, stay_seconds=60.0, return_seconds=20.0)
    slow, fast = work("salvage", 8, 0.02), work("salvage", 4)
    found = candidates([slow, fast], fleet, 3600.0, 1.0)
    assert [(candidate.policy, candidate.subnets) for candidate in found] == [("salvage", 4), ("salvage", 8)]
    assert found[0].steps_a_usd > 2 * found[1].steps_a_usd
    (dearer,) = candidates([fast], fleet, 3600.0, 2.0)
    assert dearer.steps_a_usd == pytest.approx(found[0].steps_a_usd / 2)


def test_a_job_that_says_its_subnets_keeps_them_and_others_are_tried_otherwise() -> None:
    fixed = works_of(parse_job({**JOB, "training": {"subnets": 2, "local_steps": 50}}))
    assert {found.subnets for found in fixed} == {2}
    assert {found.subnets for found in works_of(parse_job(JOB))} == {2, 3, 4}


def test_a_job_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(JobError, match="nowhere"):
        works_of(parse_job({**JOB, "model": {"factory": "nowhere:net"}}))


def test_the_command_shows_cost_losses_and_the_best_way(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_spot, "MOST_EVENTS", 300)
    Path("job.yaml").write_text(yaml.safe_dump({**JOB, "training": {"subnets": 2, "local_steps": 50}}))
    shown = CliRunner().invoke(app, ["plan", "job.yaml", "--spot", "--cloud", "sandbox"], catch_exceptions=False)
    assert "expected   $" in shown.stdout
    assert "taken back 20% of such machines a month: assumed, as nothing is known of these types" in shown.stdout
    assert "best       preemption.policy: " in shown.stdout
    assert "simulating rolling with 2 subnets" in shown.stderr
