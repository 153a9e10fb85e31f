"""Follow a run in a cloud from any machine: read its events until it has ended, and notice when its head is gone."""

from __future__ import annotations

import time

from idletrain.cloud import leader_lease, record, teardown
from idletrain.cloud.aws.account import ALIVE_STATES, Account
from idletrain.cloud.machine_log import ENDED
from idletrain.cloud.record import RunRecord
from idletrain.errors import RunError
from idletrain.observe.records import Sink, parse
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

FOLLOW_SECONDS = 1.0
ALIVE_CHECK_SECONDS = 15.0  # a head that trains writes an event every few seconds
RUN_SILENCE_SECONDS = 120.0  # the longest a head that trains may be silent
BOOT_SECONDS = 600.0  # the same for one that boots, pulls its image, or ends everything
HEAD_END_SECONDS = 120.0  # its machine shuts down after its last write


def follow(prefix: S3Prefix, sink: Sink, account: Account) -> RunRecord:
    """Pass a run's events to a sink until the run has ended; return its record.

    Reads the run's prefix alone, and checks with the account whether the head is alive when no event comes.

    Raises:
        RunError: the head failed, is gone, or has been silent for too long.
    """
    last_read, heard, checked = "", time.monotonic(), time.monotonic()
    why, first = "", leader_lease.renewed(prefix)  # before this head has taken the lease: of the head before
    beat = first

    def take(content: bytes) -> None:
        for event in parse(content.splitlines()):
            sink(event)

    while True:
        if time.monotonic() - max(heard, checked) > ALIVE_CHECK_SECONDS:
            checked, why = time.monotonic(), head_is_lost(account, record.read(prefix))
            before, beat = beat, leader_lease.renewed(prefix)
            heard = checked if beat != before else heard  # the head waits for nodes, or for the end of a long round
        run = record.read(prefix)  # after the check: a head whose run has ended is gone, too
        last = s3_mirror.tail(prefix, "events.jsonl", take, last_read)
        if last != last_read:
            last_read, heard = last, time.monotonic()
        if run.failure:
            raise RunError(run.failure)
        if run.state == "ended":
            return run
        if why:
            raise RunError(f"{run.run}: {why}")
        patience = RUN_SILENCE_SECONDS if beat != first and run.state == "running" else BOOT_SECONDS
        if time.monotonic() - heard > patience:
            raise RunError(
                f"the head of {run.run} has said nothing for {patience:.0f} s; see `idletrain logs {prefix.url}`, "
                f"then go on with --resume or end it with `idletrain down {prefix.url}`"
            )
        time.sleep(FOLLOW_SECONDS)


def head_is_lost(account: Account, run: RunRecord) -> str:
    """Return why a run has no head any more, as a sentence; "" while it has one, or is in another region."""
    if account.region != run.site.region:
        return ""
    return teardown.lost_head(account.instances(run.run, (*ALIVE_STATES, *ENDED)), run, time.time())


def wait_for_head_end(account: Account, run: str) -> None:
    """Wait until the head's machine has ended, after which nothing of a run is left.

    Raises:
        RunError: it does not end.
    """
    deadline = time.monotonic() + HEAD_END_SECONDS
    while left := account.instances(run):
        if time.monotonic() > deadline:
            names = ", ".join(machine.id for machine in left)
            raise RunError(f"run {run} has ended, but not {names}; end it with `idletrain down {run}`")
        time.sleep(FOLLOW_SECONDS)
