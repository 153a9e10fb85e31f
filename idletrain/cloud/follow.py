"""Follow a run in a cloud from any machine: read its events until it has ended, and notice when its head is gone."""

from __future__ import annotations

import logging
import time

from idletrain.cloud import leader_lease, record, teardown
from idletrain.cloud.account import CloudAccount
from idletrain.cloud.machines import ALIVE_STATES, ENDED_STATES
from idletrain.cloud.record import RunRecord
from idletrain.errors import IdletrainError, JobError, RunError, UnansweredError
from idletrain.observe.records import Record, Sink, parse
from idletrain.rounds.durable import s3_mirror
from idletrain.rounds.durable.s3_mirror import EVENTS
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
FOLLOW_SECONDS = 1.0
ALIVE_CHECK_SECONDS = 15.0  # a head that trains writes an event every few seconds
RUN_SILENCE_SECONDS = 120.0  # the longest a head that trains may be silent
BOOT_SECONDS = 600.0  # the same for one that boots, pulls its image, or ends everything
UNANSWERED_SECONDS = 5.0  # between two looks where the cloud does not answer
BEGINNINGS = ("run_started", "trial")  # events of a head that trains
HEAD_END_SECONDS = 120.0  # its machine shuts down after its last write


def last_events(prefix: S3Prefix) -> str:
    """Return the key of a run's last events so far, or an empty string."""
    return max(prefix.names(f"{EVENTS}/"), default="")


def earlier_events(prefix: S3Prefix, run: RunRecord) -> list[Record]:
    """Return a run's events from before this session."""
    keys = [key for key in prefix.names(f"{EVENTS}/") if key <= run.events_after]
    contents = [stored.content for key in keys if (stored := prefix.get(key))]
    return [event for content in contents for event in parse(content.splitlines())]


def follow(prefix: S3Prefix, sink: Sink, account: CloudAccount) -> RunRecord:
    """Pass a run's events of this session to a sink until the run has ended; return its record.

    Reads the run's prefix alone, and checks with the account whether the head is alive when no event comes. Where the
    cloud does not answer, the run goes on: repeat the request until the run's machines have ended by themselves.

    Raises:
        RunError: the head failed, is gone, or has been silent for too long.
    """
    followed, refusal, over = _FollowedRun(prefix, account), "", False
    while True:
        try:
            with account.explained():
                contents = followed.read_new()
        except (UnansweredError, JobError) as error:  # the second: credentials that are gone
            if time.time() > followed.run.deadline:
                raise
            followed.heard = time.monotonic()  # its head may have said something
            if str(error) != refusal:
                logger.warning("%s; run %s goes on, and is looked at again", error, followed.run.run)
            refusal = str(error)
            time.sleep(UNANSWERED_SECONDS)
            continue
        for event in (event for content in contents for event in parse(content.splitlines())):
            over = event["kind"] == "run_ended" or (over and event["kind"] not in BEGINNINGS)
            sink(event)
        run = followed.run
        if run.failure:
            raise RunError(run.failure)
        if run.state == "ended" or (followed.lost and over):  # a head may be unable to write that all is ended
            return run
        if followed.lost:
            raise RunError(f"{run.run}: {followed.lost}")
        if followed.silent_for:
            address = f"{prefix.url} --region {account.region}"
            raise RunError(
                f"the head of {run.run} has said nothing for {followed.silent_for:.0f} s; see `idletrain logs "
                f"{address}`, then {run.how_to_go_on}, or end it with `idletrain down {address}`"
            )
        time.sleep(FOLLOW_SECONDS)


class _FollowedRun:
    """A run as its prefix and the list of its machines show it.

    Attributes:
        run: Its record.
        heard: When its head last gave a sign of life, in seconds of the monotonic clock.
        lost: Why it has no head any more, or "".
    """

    def __init__(self, prefix: S3Prefix, account: CloudAccount) -> None:
        self._prefix, self._account = prefix, account
        self.run = record.read(prefix)
        self._leading = prefix.beside(self.run.of_sweep) if self.run.of_sweep else prefix  # where the head's lease is
        self._first_beat = self._beat = leader_lease.renewed(self._leading)  # of the head before, until this one leads
        self.heard = self._checked = time.monotonic()
        self.lost, self._last_read = "", self.run.events_after

    def read_new(self) -> list[bytes]:
        """Look at the run once more; return its new events, as files of lines."""
        if time.monotonic() - max(self.heard, self._checked) > ALIVE_CHECK_SECONDS:
            self._checked, self.lost = time.monotonic(), head_is_lost(self._account, record.read(self._prefix))
            before, self._beat = self._beat, leader_lease.renewed(self._leading)
            if self._beat != before:  # the head waits for nodes, or for the end of a long round
                self.heard = self._checked
        self.run = record.read(self._prefix)  # after the check: a head whose run has ended is gone, too
        contents: list[bytes] = []
        last = s3_mirror.tail(self._prefix, EVENTS, contents.append, self._last_read)
        if last != self._last_read:
            self._last_read, self.heard = last, time.monotonic()
        return contents

    @property
    def silent_for(self) -> float:
        """Seconds for which its head has been silent, if these are too many; else 0."""
        leads = self._beat != self._first_beat and self.run.state == "running"
        patience = RUN_SILENCE_SECONDS if leads else BOOT_SECONDS
        return patience if time.monotonic() - self.heard > patience else 0.0


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
