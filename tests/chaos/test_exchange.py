"""Updates that come in another order than they lie, in part, late or as datagrams; and workers that die meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch

from idletrain.exchange.client import StoreClient
from idletrain.exchange.codec import ROW_BYTES
from idletrain.exchange.messages import LeaseId, PushHeader, Reply, checksum
from idletrain.exchange.parted_push import PART_BYTES
from idletrain.nn.ist.schemes import SubnetSpec
from idletrain.nn.prepare import from_settings
from idletrain.rounds.durable import recovery
from idletrain.worker import encoding

from .helpers import Cluster, Control, Run, ask_store, train_alone, until

WIDE = {"args": {"widths": [64, 512, 512, 10]}}
SGD = {"name": "sgd", "lr": 0.05}


def specs_of(run: Run) -> list[SubnetSpec]:
    """Return the first round's subnets: under salvage their shares follow the measured speeds."""
    return [SubnetSpec(**spec) for spec in run.records("epoch")[0]["subnets"]]


def marked(run: Run) -> set[str]:
    """Workers whose present lease has left a checkpoint."""
    attempts = {event["attempt"] for event in run.events("progress_saved")}
    return {worker for worker, event in run.busy().items() if event["attempt"] in attempts}


def test_what_has_come_of_a_killed_worker_s_update_is_used(make_run: Callable[..., Run], control: Control) -> None:
    """The test sends half of an update in the place of a worker that it holds, and kills that."""
    training = {"exchange": {"push": "int8"}, "optimizer": SGD}
    run = make_run(rounds=1, model=WIDE, training=training, preemption={"policy": "salvage", "progress_every": "1h"})
    control.hold()
    head = run.launch()
    leased = run.wait("leases", "leased", count=2)
    lease = run.lease_id(leased)
    program = from_settings(run.job.model, run.job.data, run.job.training).program
    subnet = program.subnets(0, specs_of(run))[lease.subnet]
    codec = encoding.codec(program, subnet, "push")
    assert codec

    async def send_half(client: StoreClient) -> Reply:
        _, flat = await client.pull(lease)
        content = encoding.encode_update(program, subnet, flat + 0.01 * torch.randn(len(flat)), flat, lease)
        header = PushHeader(lease, 20, 2.5, 0)
        half = (codec.first_row + codec.nbytes) // 2
        replies = {
            await client.part(header, start, content[start : min(start + PART_BYTES // 16, half)])
            for start in range(0, half, PART_BYTES // 16)
        }
        (reply,) = replies
        return reply

    assert ask_store(run.store(head), send_half) is Reply.ACCEPTED
    run.workers()[leased["worker"]].send_signal(signal.SIGKILL)
    lost = run.wait("the loss", "lost", lambda e: e["attempt"] == leased["attempt"])
    assert (lost["cause"], lost["kept_steps"], lost["lost_steps"], lost["kept_seconds"]) == ("kill", 20, 0, 2.5)
    assert 0.5 < lost["norm_fraction"] < 1
    control.release()
    assert head.exit_code() == 0, head.text
    run.check(None)
    (stage,) = [r for r in run.records("stage") if r["subnet"] == lease.subnet]
    assert stage["steps"] == 20
    assert stage["norm_fraction"] == lost["norm_fraction"]
    assert dict(run.records("commit")[0]["staged"])[lease.subnet] == 20


def test_what_comes_too_late_for_its_round_is_added_behind_it(make_run: Callable[..., Run], control: Control) -> None:
    """The test sends an update in the place of a worker that it holds: half before the others close the round."""
    training = {"exchange": {"push": "int8"}, "optimizer": SGD}
    run = make_run(rounds=4, model=WIDE, training=training, preemption={"policy": "salvage", "progress_every": "1h"})
    control.hold()
    head = run.launch()
    leased = run.wait("leases", "leased", count=2)
    lease, held = run.lease_id(leased), run.workers()[leased["worker"]]
    program = from_settings(run.job.model, run.job.data, run.job.training).program
    subnet = program.subnets(0, specs_of(run))[lease.subnet]
    codec = encoding.codec(program, subnet, "push")
    assert codec
    header, half = PushHeader(lease, 20, 2.5, 0), (codec.first_row + codec.nbytes) // 2
    contents: list[torch.Tensor] = []

    async def send_half(client: StoreClient) -> Reply:
        _, flat = await client.pull(lease)
        contents.append(encoding.encode_update(program, subnet, flat + 0.01 * torch.randn(len(flat)), flat, lease))
        return await client.part(header, 0, contents[0][:half])

    async def send_rest(client: StoreClient) -> tuple[Reply, int, Reply]:
        receipt = await client.push(header, contents[0])
        bits = np.unpackbits(np.frombuffer(receipt.missing, np.uint8), count=codec.rows, bitorder="little")
        rows = contents[0][codec.first_row :].view(-1, ROW_BYTES)[torch.from_numpy(bits.astype(bool))]
        return receipt.reply, len(rows), await client.late_rows(lease, rows.flatten())

    assert ask_store(run.store(head), send_half) is Reply.ACCEPTED
    control.hold(held.pid)
    control.release_others()
    run.wait("the end of the round", "round_committed")
    control.pace(0.05)
    (stage,) = [r for r in run.records("stage") if (r["round"], r["subnet"]) == (0, lease.subnet)]
    assert stage["steps"] == 20
    assert 0.5 < stage["norm_fraction"] < 1
    reply, rows, replies = ask_store(run.store(head), send_rest)
    assert (reply, replies) == (Reply.DUPLICATE, Reply.ACCEPTED)
    assert 0 < rows <= codec.rows
    (event,) = [e for e in run.events("staged") if (e["round"], e["subnet"]) == (0, lease.subnet)]
    assert event["missing_rows"] == rows / codec.rows
    control.pace(0)
    control.release()
    assert head.exit_code() == 0, head.text
    run.check(None)
    (late,) = run.records("late_rows")
    assert (late["of"], late["subnet"]) == (0, lease.subnet)


def test_a_store_that_restarts_in_the_middle_of_a_push_takes_nothing_of_it(
    make_run: Callable[..., Run], control: Control, cluster: Cluster
) -> None:
    """The test sends half of an update in the place of a worker that it holds, and kills the head."""
    run = make_run(rounds=2, model=WIDE, training={"exchange": {"push": "int8"}, "optimizer": SGD})
    for _ in range(2):
        cluster.idletrain_worker()
    control.hold()
    head = run.launch("--scheduler", cluster.address)
    lease = run.lease_id(run.wait("leases", "leased", count=2))
    content = torch.zeros(100_000, dtype=torch.uint8)
    header = PushHeader(lease, 20, 2.5, checksum([content.numpy().data]))

    async def send_half(client: StoreClient) -> Reply:
        return await client.part(header, 0, content[:50_000])

    async def send_rest(client: StoreClient) -> list[Reply]:
        return [await client.part(header, 50_000, content[50_000:]), (await client.push(header, None)).reply]

    assert ask_store(run.store(head), send_half) is Reply.ACCEPTED
    psutil.Process(head.pid).kill()
    head.exit_code()
    successor = run.launch("--resume", "--scheduler", cluster.address)
    run.wait("leases of the next head", "leased", count=4)
    assert ask_store(run.store(successor), send_rest) == [Reply.STALE_EPOCH, Reply.STALE_EPOCH]
    control.release()
    assert successor.exit_code() == 0, successor.text
    run.check(train_alone(run.job))


def test_under_reissue_half_an_update_is_nothing(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=1, model=WIDE, training={"exchange": {"push": "int8"}, "optimizer": SGD})
    control.hold()
    head = run.launch()
    leased = run.wait("leases", "leased", count=2)
    lease = run.lease_id(leased)

    async def send_some(client: StoreClient) -> Reply:
        return await client.part(PushHeader(lease, 20, 2.5, 0), 0, torch.zeros(50_000, dtype=torch.uint8))

    assert ask_store(run.store(head), send_some) is Reply.ACCEPTED
    run.workers()[leased["worker"]].send_signal(signal.SIGKILL)
    run.wait("the loss", "lost", lambda e: e["attempt"] == leased["attempt"])
    control.release()
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert len(run.events("leased")) == 3


def test_a_warned_worker_sends_its_change_under_salvage(make_run: Callable[..., Run], control: Control) -> None:
    """Of the steps since its last mark, too, in an eighth of a mark's bytes."""
    training = {"exchange": {"push": "int4"}, "optimizer": SGD}
    run = make_run(rounds=2, model=WIDE, training=training, preemption={"policy": "salvage", "progress_every": "1s"})
    control.pace(0.15)
    head = run.launch()
    worker = until("a worker with a checkpoint", lambda: marked(run) & run.workers().keys()).pop()
    (mark,) = [event for event in run.events("progress_saved") if event["attempt"] == run.busy()[worker]["attempt"]]
    time.sleep(0.5)  # some steps more
    run.workers()[worker].send_signal(signal.SIGTERM)
    ended = run.wait("its end", "attempt_ended", lambda e: e["attempt"] == mark["attempt"])
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(None)
    assert ended["ended"] == "drained"
    assert mark["steps"] < ended["steps"] < 20
    whole = 4 * sum(256 * n for n in (64, 256, 10))
    assert ended["push_bytes"] < whole / 5
    staged = [(r["round"], r["subnet"], r["steps"]) for r in run.records("stage")]
    assert (0, ended["subnet"], ended["steps"]) in staged


def test_datagrams_of_killed_and_warned_workers_have_the_same_bits(
    make_run: Callable[..., Run], control: Control
) -> None:
    exchange = {"pull": "int8", "push": "int8", "transport": "udp"}
    run = make_run(rounds=2, model=WIDE, training={"exchange": exchange, "optimizer": SGD})
    control.pace(0.1)
    head = run.launch()
    for how in (signal.SIGKILL, signal.SIGTERM):
        heirs = len([event for event in run.events("leased") if event["step"]])
        worker = until(
            "a worker with a checkpoint", lambda: [p for at, p in run.workers().items() if at in marked(run)]
        )[0]
        worker.send_signal(how)
        until("a replacement", lambda least=heirs: len([e for e in run.events("leased") if e["step"]]) > least)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert run.causes_of_loss() == {"kill", "notice"}
    done = [event for event in run.events("attempt_ended") if event["ended"] == "done"]
    assert {event["transport"] for event in done} == {"udp"}


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_what_an_update_lacks_comes_later_and_survives_the_head(
    make_run: Callable[..., Run], control: Control, transport: str
) -> None:
    exchange = {"push": "int8", "loss": 0.3, "transport": transport}
    training = {"exchange": exchange, "optimizer": SGD}
    model = {"args": {"widths": [64, 4096, 4096, 10]}}  # an update of many parts
    salvage = {"policy": "salvage", "progress_every": "1h"}
    run = make_run(rounds=6, local_steps=5, model=model, training=training, preemption=salvage)
    control.pace(0.02)
    head = run.launch()
    repaired = run.wait("rows that come late", "late_rows_added", count=2)
    for process in [psutil.Process(head.pid), *run.workers().values()]:
        process.send_signal(signal.SIGKILL)
    head.exit_code()
    control.pace(0)
    run.resume()
    end = run.check(None)
    late = run.records("late_rows")
    assert len(late) >= 2
    assert repaired["round"] in {record["of"] for record in late}
    assert all(record["of"] < record["round"] for record in late)
    partial = [record for record in run.records("stage") if record["norm_fraction"] < 1]
    # On busy cores salvage may close a round while an update is in flight, and keep what is there.
    closed = {event["attempt"] for event in run.events("lost") if event.get("norm_fraction")}
    accepted = [record for record in partial if record["attempt"] not in closed]
    assert accepted, "nothing came late"
    assert all(record["norm_fraction"] >= 1 - run.job.training.exchange.norm_loss for record in accepted)
    # The network of the write-ahead log, late rows included, is the one that the last head ended with.
    program = from_settings(run.job.model, run.job.data, run.job.training).program
    recovered = recovery.load_network(run.dir, program)
    network, rounds = recovered.network, recovered.rounds
    assert rounds == end["rounds"] == 6
    assert network.sha256() == end["params_sha256"]


def test_rows_that_nobody_owes_are_refused(make_run: Callable[..., Run], control: Control) -> None:
    training = {"exchange": {"push": "int8", "loss": 0.3}, "optimizer": SGD}
    run = make_run(rounds=2, model=WIDE, training=training, preemption={"policy": "salvage"})
    control.pace(0.05)
    head = run.launch()
    lease = run.lease_id(run.wait("the second round", "leased", lambda e: e["round"] == 1))
    rows = torch.zeros(128, dtype=torch.uint8)

    async def send(client: StoreClient) -> list[Reply]:
        return [
            await client.late_rows(LeaseId(lease.run, lease.epoch, 0, 0, 99), rows),
            await client.late_rows(LeaseId(lease.run, lease.epoch - 1, 0, 0, 1), rows),
            await client.late_rows(lease, rows),
        ]

    assert ask_store(run.store(head), send) == [Reply.NOT_LEASED, Reply.STALE_EPOCH, Reply.STALE_ROUND]
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(None)
