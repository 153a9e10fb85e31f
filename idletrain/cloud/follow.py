"""Follow a run in a cloud from any machine: read its events until it has ended, and notice when its head is gone."""

from __future__ import annotations

import logging
import math
import time

from idletrain.cloud import leader_lease, record, teardown
from idletrain.cloud.account import CloudAccount
from idletrain.cloud.machines import ALIVE_STATES, ENDED_STATES
from idletrain.cloud.record import RunRecord
from idletrain.errors import IdletrainError, RunError
from idletrain.observe.records import Sink, parse
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
FOLLOW_SECONDS = 1.0
ALIVE_CHECK_SECONDS = 15.0  # a head that trains writes an event every few seconds
RUN_SILENCE_SECONDS = 120.0  # the longest a head that trains may be silent
BOOT_SECONDS = 600.0  # the same for one that boots, pulls its image, or ends everything
BEGINNINGS = ("run_started", "trial")  # events of a head that trains
HEAD_END_SECONDS = 120.0  # its machine shuts down after its last write


def follow(prefix: S3Prefix, sink: Sink, account: CloudAccount) -> RunRecord:
    """Pass a run's events to a sink until the run has ended; return its record.

    Reads the run's prefix alone, and checks with the account whether the head is alive when no event comes.

    Raises:
        RunError: the head failed, is gone, or has been silent for too long.
    """
    last_read, last_sign_at, checked = "", time.monotonic(), time.monotonic()
    followed = record.read(prefix)
    leading = prefix.beside(followed.of_sweep) if followed.of_sweep else prefix  # where the head's lease is
    why, first = "", leader_lease.renewed(leading)  # before this head has taken the lease: of the head before
    beat, over = first, False

    def take(content: bytes) -> None:
        nonlocal over
        for event in parse(content.splitlines()):
            is_end = event["kind"] == "run_ended" and event.get("t", math.inf) >= followed.created
            over = is_end or (over and event["kind"] not in BEGINNINGS)  # it may be resumed
            sink(event)

    while True:
        if time.monotonic() - max(last_sign_at, checked) > ALIVE_CHECK_SECONDS:
            checked, why = time.monotonic(), head_is_lost(account, record.read(prefix))
            before, beat = beat, leader_lease.renewed(leading)
            last_sign_at = (
                checked if beat != before else last_sign_at
            )  # the head waits for nodes, or for the end of a long round
        run = record.read(prefix)  # after the check: a head whose run has ended is gone, too
        last = s3_mirror.tail(prefix, "events.jsonl", take, last_read)
        if last != last_read:
            last_read, last_sign_at = last, time.monotonic()
        if run.failure:
            raise RunError(run.failure)
        if run.state == "ended" or (why and over):  # a head may be unable to write that all is ended
            return run
        if why:
            raise RunError(f"{run.run}: {why}")
        patience = RUN_SILENCE_SECONDS if beat != first and run.state == "running" else BOOT_SECONDS
        if time.monotonic() - last_sign_at > patience:
            raise RunError(
                f"the head of {run.run} has said nothing for {patience:.0f} s; see `idletrain logs {prefix.url}`, then "
                f"{run.how_to_go_on}, or end it with `idletrain down {prefix.url}`"
            )
        time.sleep(FOLLOW_SECONDS)


def head_is_lost(account: CloudAccount, run: RunRecord) -> str:
    """Return why a run has no head any more, as a sentence; "" while it has one, or nothing is known about it."""
    if account.region != run.site.region:
        return ""
    try:
        machines = account.instances(run.fleet, (*ALIVE_STATES, *ENDED_STATES))
    except IdletrainError as error:  # the head goes on, whatever the cloud tells us
        logger.warning("%s", error)
        return ""
    return teardown.lost_head(machines, run, time.time())


def leftover_after(account: CloudAccount, run: RunRecord) -> str:
    """Wait until the head's machine has ended; return what is left of an ended run and how to end it, as a sentence."""
    until, left, why = time.monotonic() + HEAD_END_SECONDS, "its machines", ""
    while time.monotonic() < until:
        try:
            machines = [machine.id for machine in account.instances(run.run)]
        except IdletrainError as error:
            why = f" ({error})"
        else:
            if not machines:
                return run.leftover
            left, why = ", ".join(machines), ""
        time.sleep(FOLLOW_SECONDS)
    end = f"idletrain down {run.run} --region {account.region}"
    return run.leftover or f"run {run.run} has ended, but not {left}{why}; end it with `{end}`"
