"""What cannot start is refused before anything is made. (What a launch then does is tested in tests/chaos.)"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from distributed import Client
from torch import nn

from idletrain import run
from idletrain.cluster import dask_scheduler, dask_settings
from idletrain.errors import JobError, RunError
from idletrain.export import load_run
from idletrain.job import CheckpointSettings, Job
from idletrain.job_file import parse_job
from idletrain.nn.prepare import from_settings
from idletrain.observe.dashboard_feed import DashboardAddress, page_of
from idletrain.observe.forecast_record import ForecastTracker
from idletrain.providers.local import LocalProcesses
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.scheduler import ExistingScheduler
from idletrain.rounds.durable.recovery import read_job
from idletrain.run import RunOptions, check_run, compose, launch, settle


def job(to: Path, **sections: Any) -> Job:
    tree: dict[str, Any] = {"name": "t", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}}
    return parse_job({**tree, "checkpoint": {"to": str(to)}, **sections})


def existing(to: Path, **sections: Any) -> Job:
    """A job whose run exists."""
    first = job(to, **sections)
    first.run_dir.mkdir(parents=True)
    (first.run_dir / "wal").touch()
    (first.run_dir / "job.json").write_text(first.model_dump_json())
    return first


def on(scheduler: str, churn_seconds: float | None = None) -> ExistingScheduler:
    """A provider of the workers of a Dask cluster."""
    return ExistingScheduler(LaunchRequest(scheduler=scheduler, churn_seconds=churn_seconds))


def faults(job: Job, **options: Any) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        check_run(job, RunOptions(**options))
    return caught.value.faults


def test_a_new_run_and_the_resumption_of_one_may_start(tmp_path: Path) -> None:
    check_run(job(tmp_path), RunOptions())
    check_run(existing(tmp_path), RunOptions(resume=True))


def test_a_run_of_an_older_format_is_refused_also_to_resume(tmp_path: Path) -> None:
    older = job(tmp_path)
    older.run_dir.mkdir(parents=True)
    (older.run_dir / "ledger").write_bytes(b"")
    for options in (RunOptions(), RunOptions(resume=True)):
        with pytest.raises(JobError, match=r"was written by an idletrain of format 1 and this one reads 3"):
            check_run(older, options)


def test_a_run_that_exists_is_not_begun_again(tmp_path: Path) -> None:
    (message,) = faults(existing(tmp_path))
    assert message == f"name: run t exists in {tmp_path}/t; add --resume to go on with it or name another"


def test_a_run_that_does_not_exist_is_not_resumed(tmp_path: Path) -> None:
    assert faults(job(tmp_path), resume=True) == (
        f"name: there is no run t in {tmp_path} to resume; leave out --resume",
    )


def test_a_run_on_this_machine_is_not_written_to_a_folder_called_s3(tmp_path: Path) -> None:
    wanted = job(tmp_path).model_copy(update={"checkpoint": CheckpointSettings(to="s3://bucket/runs")})
    (fault,) = faults(wanted)
    assert fault.startswith("checkpoint.to: s3://bucket/runs is for runs in a cloud, with --spot")


def test_what_decides_a_run_s_bits_may_not_change_when_it_is_resumed(tmp_path: Path) -> None:
    existing(tmp_path)
    messages = faults(
        job(tmp_path, training={"seed": 7, "subnets": 8}, preemption={"policy": "salvage"}, model={"factory": "d.e:f"}),
        resume=True,
    )
    assert [fault.split(":")[0] for fault in messages] == [
        "model.factory",
        "training.subnets",
        "training.seed",
        "preemption.policy",
    ]
    assert "training.seed: 7 is not what the run began with, 0; take that or another name" in messages


def test_only_the_settings_that_differ_are_told(tmp_path: Path) -> None:
    existing(tmp_path, training={"optimizer": {"name": "adamw", "lr": 0.01}})
    (fault,) = faults(job(tmp_path, training={"optimizer": {"name": "adamw", "lr": 0.02}}), resume=True)
    assert fault == "training.optimizer.lr: 0.02 is not what the run began with, 0.01; take that or another name"


def test_of_a_run_s_phases_only_the_last_may_become_longer(tmp_path: Path) -> None:
    def training(*rounds: int, subnets: int = 2) -> dict[str, Any]:
        return {"training": {"phases": [{"rounds": rounds[0]}, {"rounds": rounds[1], "subnets": subnets}]}}

    existing(tmp_path, **training(3, 4))
    check_run(job(tmp_path, **training(3, 400)), RunOptions(resume=True))
    for other in (training(4, 3), training(3, 4, subnets=1), {"training": {"rounds": 7}}):
        (fault,) = faults(job(tmp_path, **other), resume=True)
        assert fault == "training.phases: are not those that the run began with; only the last may have other rounds"


def test_copies_decide_a_run_s_bits(tmp_path: Path) -> None:
    existing(tmp_path)
    (fault,) = faults(job(tmp_path, training={"copies": 2}), resume=True)
    assert fault == "training.copies: 2 is not what the run began with, 1; take that or another name"


def test_what_a_launch_chose_a_resumption_takes_as_it_was(tmp_path: Path) -> None:
    chosen = {"method": "local-sgd", "subnets": 2, "local_steps": 25, "exchange": {"pull": "bf16"}}
    existing(tmp_path, training=chosen)
    again = job(tmp_path, training={"rounds": 500})
    check_run(again, RunOptions(resume=True))
    training = settle(again).training
    assert (training.method, training.subnets, training.local_steps, training.exchange.pull) == (
        "local-sgd",
        2,
        25,
        "bf16",
    )
    assert training.rounds == 500
    cut = {"method": "ist", "subnets": 4, "copies": 2, "local_steps": 25, "finish_whole": 0.2, "rounds": 500}
    existing(tmp_path / "cut", training=cut)
    again = job(tmp_path / "cut", training={"rounds": 500})
    check_run(again, RunOptions(resume=True))
    assert (settle(again).training.copies, settle(again).training.finish_whole) == (2, 0.2)
    assert settle(job(tmp_path / "new", training={"rounds": 500})).training.method == "ist"


def test_what_does_not_decide_bits_may_change(tmp_path: Path) -> None:
    existing(tmp_path)
    more = job(tmp_path, training={"rounds": 500, "evaluate_every": 3}, nodes={"count": 9}, stop={"accuracy": 0.9})
    check_run(more, RunOptions(resume=True))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "one-cycle", "my_schedules:sawtooth"])
def test_rounds_may_change_unless_the_learning_rate_follows_from_them(tmp_path: Path, schedule: str) -> None:
    cosine = {"training": {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": schedule}, "rounds": 10}}
    first = existing(tmp_path, **cosine)
    assert first.training.rounds == 10
    (message,) = faults(job(tmp_path, training={**cosine["training"], "rounds": 20}), resume=True)
    assert message.startswith("training.rounds: 20 is not what the run began with, 10")


@pytest.mark.parametrize(
    ("size", "mode", "fixed"),
    [("auto", "never", True), (4, "auto", False), (None, "auto", True), (None, "never", False)],
)
def test_the_memory_may_change_unless_micro_batches_follow_from_it(
    tmp_path: Path, size: int | str | None, mode: str, fixed: bool
) -> None:
    training = {"training": {"micro_batch": size, "optimizer": {"name": "sgd", "lr": 0.1}}}
    existing(tmp_path, **training, memory={"budget": "1GiB", "out_of_core": mode})
    later = job(tmp_path, **training, memory={"budget": "2GiB", "out_of_core": mode})
    if not fixed:
        check_run(later, RunOptions(resume=True))
        return
    (message,) = faults(later, resume=True)
    assert message.startswith("memory.budget: 2147483648 is not what the run began with, 1073741824")


def test_out_of_core_may_change_where_no_budget_lets_it_decide_on_micro_batches(tmp_path: Path) -> None:
    existing(tmp_path)
    check_run(job(tmp_path, memory={"out_of_core": "never"}), RunOptions(resume=True))
    (message,) = faults(job(tmp_path, memory={"budget": "1GiB"}), resume=True)
    assert message.startswith("memory.budget: 1073741824 is not what the run began with, None")


def test_compiled_code_out_of_core_may_not_begin_in_the_middle_of_a_run(tmp_path: Path) -> None:
    existing(tmp_path)
    (message,) = faults(job(tmp_path, memory={"compile": "auto"}), resume=True)
    assert message.startswith("memory.compile: auto is not what the run began with, never")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8786", "tcp://localhost:1", "tcp://[::1]:1", "tls://10.0.0.5:1"])
def test_schedulers_on_this_machine_or_with_tls_are_taken(tmp_path: Path, address: str) -> None:
    check_run(job(tmp_path), RunOptions(provider=on(address)))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "localhost:8786",
            "--scheduler: 'localhost:8786' should be tcp://HOST:PORT on this machine or tls://HOST:PORT",
        ),
        ("tcp://", "--scheduler: 'tcp://' should be"),
        ("tcp://10.0.0.5:8786", "--scheduler: tcp://10.0.0.5:8786 is on another machine without TLS; use a tls://"),
    ],
)
def test_other_schedulers_are_refused(tmp_path: Path, address: str, message: str) -> None:
    (only,) = faults(job(tmp_path), provider=on(address))
    assert only.startswith(message)


def test_churn_is_for_local_workers_and_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    messages = faults(existing(tmp_path), provider=on("tcp://10.0.0.5:1", churn_seconds=5.0))
    assert [fault.split(":")[0] for fault in messages] == ["name", "--scheduler", "--churn"]


def test_the_scheduler_of_a_run_is_gone_after_it(tmp_path: Path) -> None:
    async def check() -> None:
        async with dask_scheduler.started(tmp_path) as address:
            host, port = address.removeprefix("tcp://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            await writer.wait_closed()
        with pytest.raises(OSError, match=r"Connect call failed"):
            await asyncio.open_connection(host, int(port))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:9", r"--scheduler: tcp://127.0.0.1:9 cannot be reached .*; check the address"),
        ("tls://127.0.0.1:9", r"--scheduler: tls://127.0.0.1:9 asks for TLS .*; name the client's certificates"),
    ],
)
def test_a_scheduler_that_is_not_there_or_wants_certificates_is_named_before_anything_is_made(
    tmp_path: Path, address: str, message: str
) -> None:
    wanted = job(tmp_path / "runs")
    with pytest.raises(JobError, match=message):
        asyncio.run(launch(wanted, None, RunOptions(provider=on(address))))  # type: ignore[arg-type]
    assert not wanted.run_dir.exists()


@pytest.mark.parametrize("connected", [False, True])
def test_a_scheduler_that_goes_while_a_run_starts_is_named_and_the_run_may_go_on_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: bool
) -> None:
    monkeypatch.setitem(dask_settings.DASK_SETTINGS, "distributed.comm.timeouts.connect", "1s")
    wanted = job(tmp_path / "runs", model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 8, 10]}})
    prepared = from_settings(wanted.model, wanted.data, wanted.training)
    check_scheduler = ExistingScheduler.check

    async def check() -> None:
        async with contextlib.AsyncExitStack() as stack:
            address = await stack.enter_async_context(dask_scheduler.started(tmp_path))
            losing = mock.AsyncMock(side_effect=stack.aclose)

            async def check_and_lose(provider: ExistingScheduler) -> None:
                await check_scheduler(provider)
                await losing()

            async def lose_and_ask(client: Client, *, first_port: int | None) -> DashboardAddress:
                await losing()
                return await page_of(client, first_port=first_port)

            if connected:
                monkeypatch.setattr(run, "page_of", lose_and_ask)
            else:
                monkeypatch.setattr(ExistingScheduler, "check", check_and_lose)
            with pytest.raises(
                RunError, match="the Dask scheduler is gone after round 0; start the job again with --r"
            ):
                await launch(wanted, prepared, RunOptions(provider=on(address)))
            losing.assert_awaited_once()

    asyncio.run(check())
    check_run(wanted, RunOptions(resume=True))


def test_runs_that_cannot_be_written_are_reported_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted = job(tmp_path / "file" / "runs")
    with pytest.raises(RunError, match=r"file/runs/t cannot be written .*; make room or set checkpoint.to"):
        asyncio.run(launch(wanted, None, RunOptions()))  # type: ignore[arg-type]


@pytest.mark.parametrize(("rounds", "prepared"), [(120, [120]), (7, [120, 7])])
def test_a_run_is_composed_of_the_decided_job_and_prepared_again_only_if_the_decision_changes_it(
    tmp_path: Path, rounds: int, prepared: list[int]
) -> None:
    class Network(SimpleNamespace):  # which a weak reference can refer to
        pass

    seen: list[int] = []
    made: list[weakref.ref[Any]] = []

    def prepare(job: Job) -> Any:
        seen.append(job.training.rounds)
        assert [reference() for reference in made] == [None] * len(made), "two networks at a time"
        program = SimpleNamespace(training=job.training)
        network = Network(fallback="", notes=(), program=program, rounds=job.training.rounds)
        made.append(weakref.ref(network))
        return network

    def decide(job: Job) -> tuple[Job, ForecastTracker]:
        training = job.training.model_copy(update={"rounds": rounds})
        return job.model_copy(update={"training": training}), forecast

    forecast = ForecastTracker({}, ("by hand",))
    wanted = job(tmp_path / "runs", training={"rounds": 120})
    composition = compose(wanted, RunOptions(), prepare=prepare, decide=decide)
    assert seen == prepared
    assert (composition.prepared.rounds, composition.job.training.rounds) == (rounds, rounds)
    assert composition.options.forecast is forecast
    assert not (tmp_path / "runs").exists()


def one_layer() -> nn.Module:
    """A module whose neurons are the network's outputs."""
    return nn.Linear(64, 10)


def test_a_run_whose_model_has_nothing_to_split_says_so_and_goes_on_with_the_same_job(
    tmp_path: Path,
) -> None:
    """Whatever a search says when it is resumed or exported."""
    said: list[str] = []
    model = {"factory": f"{__name__}:one_layer"}
    training = {"method": "ist", "subnets": 2, "local_steps": 2, "rounds": 1, "batch_size": 8}
    wanted = job(tmp_path, model=model, training=training, nodes={"count": 1})
    composition = compose(wanted, RunOptions(), report=said.append)
    told = "the model is trained whole, by local-sgd and not by ist: it has nothing to split ("
    assert [text for text in said if text.startswith(told)]
    asyncio.run(composition.launch())
    recorded = read_job(wanted.run_dir)
    assert (recorded.training.method, recorded.training.instead_of) == ("local-sgd", "ist")
    assert load_run(wanted.run_dir).rounds == 1
    more = job(tmp_path, model=model, training={**training, "rounds": 2}, nodes={"count": 1})
    resumed = compose(more, RunOptions(resume=True), decide=lambda job: (job, None), report=said.append)
    assert resumed.job.training.method == "local-sgd"
    assert asyncio.run(resumed.launch()).rounds == 2
    asked = job(tmp_path, model=model, training={**training, "method": "local-sgd", "rounds": 3}, nodes={"count": 1})
    assert compose(asked, RunOptions(resume=True)).job.training.method == "local-sgd"


def test_a_run_that_was_asked_to_be_local_sgd_is_not_resumed_as_ist(tmp_path: Path) -> None:
    existing(tmp_path, training={"method": "local-sgd"})
    (fault,) = faults(job(tmp_path, training={"method": "ist"}), resume=True)
    assert fault == "training.method: ist is not what the run began with, local-sgd; take that or another name"


def test_a_run_of_epochs_ends_goes_on_with_more_and_keeps_those_that_its_learning_rate_follows(tmp_path: Path) -> None:
    def composed(name: str, resume: bool, **settings: Any) -> Any:
        training = {"method": "local-sgd", "subnets": 2, "local_steps": 2, "batch_size": 100, **settings}
        tree = {"name": name, "model": {"factory": f"{__name__}:one_layer"}, "data": {"name": "digits"}}
        wanted = job(tmp_path, **tree, training=training, nodes={"count": 1})
        return compose(wanted, RunOptions(resume=resume))

    assert asyncio.run(composed("t", False, epochs=0.5).launch()).rounds == 2
    with pytest.raises(JobError, match=r"training.rounds: run t is complete after 2 rounds; ask for more to go on"):
        composed("t", True, epochs=0.5)
    assert asyncio.run(composed("t", True, epochs=1).launch()).rounds == 4
    cosine = {"name": "sgd", "lr": 0.1, "schedule": "cosine"}
    asyncio.run(composed("c", False, epochs=0.5, optimizer=cosine).launch())
    with pytest.raises(JobError, match=r"training.rounds: 4 is not what the run began with, 2"):
        composed("c", True, epochs=1, optimizer=cosine)


def test_a_job_without_rounds_goes_on_to_those_that_its_run_began_with(tmp_path: Path) -> None:
    cosine = {"name": "sgd", "lr": 0.1, "schedule": "cosine"}
    existing(tmp_path, training={"optimizer": cosine, "rounds": 10})
    check_run(job(tmp_path, training={"optimizer": cosine}), RunOptions(resume=True))
    assert settle(job(tmp_path, training={"optimizer": cosine})).training.rounds == 10
    (fault,) = faults(job(tmp_path, training={"optimizer": cosine, "rounds": 20}), resume=True)
    assert fault.startswith("training.rounds: 20 is not what the run began with, 10")


def test_a_run_that_ends_with_whole_networks_keeps_the_rounds_that_their_share_is_of(tmp_path: Path) -> None:
    check_run(existing(tmp_path, training={"finish_whole": 0.2, "rounds": 20}), RunOptions(resume=True))
    for changed in ({"finish_whole": 0.2, "rounds": 30}, {"finish_whole": 0.5, "rounds": 20}):
        (fault,) = faults(job(tmp_path, training=changed), resume=True)
        assert "is not what the run began with" in fault


def test_what_cannot_start_is_refused_before_it_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="add --resume to go on with it"):
        compose(existing(tmp_path), RunOptions(), prepare=lambda _job: pytest.fail("it was prepared"))


def test_a_run_trains_at_a_scheduler_with_an_ipv6_address(tmp_path: Path) -> None:
    async def check() -> None:
        async with dask_scheduler.started(tmp_path, host="[::1]") as address:
            assert address.startswith("tcp://[::1]:")
            command = [sys.executable, "-m", "idletrain", "worker", address, "--memory", "1GB"]
            worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            try:
                wanted = job(
                    tmp_path / "runs",
                    training={
                        "subnets": 1,
                        "local_steps": 2,
                        "rounds": 2,
                        "method": "ist",
                        "exchange": {"transport": "udp"},
                    },
                    model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 8, 10]}},
                    nodes={"count": 1},
                )
                outcome = await compose(wanted, RunOptions(provider=on(address))).launch()
            finally:
                worker.kill()
                worker.wait()
            assert outcome.status == "completed"

    asyncio.run(check())


def test_a_start_without_room_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []

    @contextlib.asynccontextmanager
    async def full(_: LocalProcesses, job: Job, _record: Any) -> AsyncIterator[None]:
        asked.append(job)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield

    monkeypatch.setattr(LocalProcesses, "cluster", full)
    wanted = job(tmp_path, model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 8, 10]}})
    prepared = from_settings(wanted.model, wanted.data, wanted.training)
    with pytest.raises(RunError, match=r"No space left on device.*make room"):
        asyncio.run(launch(wanted, prepared, RunOptions(provider=LocalProcesses())))
    assert asked
