"""A sweep as it is asked for, and the machines that it needs in a cloud."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rehearsal import RECORD

from idletrain.cli.sweep_request import SweepRequest
from idletrain.cloud import record
from idletrain.job_file import parse_job
from idletrain.storage import S3Prefix
from idletrain.sweeps.grid import Varied, from_plain, trials

JOB: dict[str, Any] = {
    "name": "dusk",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 256, 10]}},
    "data": {"name": "digits"},
    "training": {"method": "ist", "subnets": 2, "rounds": 20, "optimizer": {"name": "sgd", "lr": 0.1}},
    "nodes": {"count": 2, "memory": "1GiB", "max_duration": "1h"},
}
RATES = Varied("training.optimizer.lr", (0.05, 0.1))


def requested(*varied: Varied, **changes: Any) -> SweepRequest:
    return SweepRequest(name="dusk", trials=trials(JOB, varied), watched="loss", better="lower", **changes)


def test_machines_are_for_the_largest_trial_and_live_for_all_that_are_left() -> None:
    job = requested(Varied("training.subnets", (2, 6, 4)), budget_usd=3.0).job(2)
    assert (job.name, job.training.subnets) == ("dusk", 6)
    assert (job.nodes.max_duration, job.nodes.budget_usd) == (2 * 3600.0, 3.0)
    assert requested(RATES).job(1).nodes.budget_usd is None


def test_what_trials_share_in_a_cloud_cannot_differ() -> None:
    assert requested(Varied("nodes.count", (1, 2))).cloud_faults(parallel=1) == [
        "--set: nodes.count is of the machines, which all trials in a cloud share; set it in the job"
    ]
    assert requested(RATES).cloud_faults(parallel=2) == [
        "--parallel: trials in a cloud share its machines and train in turn; leave it out"
    ]
    assert requested(RATES).cloud_faults(parallel=1) == []


def test_every_model_that_differs_is_checked() -> None:
    assert [job.name for job in requested(RATES).to_check()] == requested(RATES).names[:1]
    widths = requested(Varied("model.args.widths", ([64, 16, 10], [64, 32, 10])))
    assert [job.name for job in widths.to_check()] == widths.names


def test_an_order_is_read_back_as_it_was_written(prefix: S3Prefix) -> None:
    request = requested(RATES, prune=True)
    run = replace(RECORD, sweep=request.order)
    record.claim(prefix, run)
    again = record.read(prefix)
    assert again == run
    assert again.sweep
    jobs = [trial.job for trial in from_plain(again.sweep.trials)]
    assert [job.training.optimizer for job in jobs] == [trial.job.training.optimizer for trial in request.trials]
    assert jobs[0].training.model_fields_set == parse_job(request.trials[0].job.as_tree()).training.model_fields_set
