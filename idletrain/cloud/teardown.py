"""Delete everything that a run created in the cloud, found by tag, and name what survives.

Safe to repeat, from anywhere: it needs neither the machine that started the run nor the run's record.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from idletrain.cloud import leader_lease, machine_log, record
from idletrain.cloud.account import CloudAccount
from idletrain.cloud.machines import ALIVE_STATES, ENDED_STATES, RUNNING_STATES, TAG, Instance, LeftoverResource
from idletrain.cloud.record import RunRecord
from idletrain.errors import IdletrainError, RunError
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
GONE_SECONDS = 300.0  # machines terminate in a minute or two
REFUSED_SECONDS = 30.0  # that a refusal may pass in; machines end by themselves once their run is over
TEARDOWN_POLL_SECONDS = 1.0
OWN_TAGS = {TAG + key for key in ("run", "prefix", "created", "deadline")}
LISTED_SECONDS = 30.0
HEAD_SILENCE_SECONDS = 1800.0  # a head renews its lease every few seconds, from its boot on
START_SECONDS = 120.0  # from writing a run's record until its head node is listed
CLEAN_READS = 2  # EC2's lists are eventually consistent


def take_down(account: CloudAccount, run: str, prefix: S3Prefix | None, spare: str = "", session: str = "") -> None:
    """Terminate a run's machines and delete all its other resources.

    Args:
        account: The account.
        run: The run's name.
        prefix: S3 prefix of its record, if known.
        spare: Id of the instance that calls this: it leaves the run's security group, and ends by itself.
        session: The session of the run that ends, as in its machines' tags, so that one that was resumed meanwhile is
            left alone; all of them otherwise.

    Raises:
        RunError: something survives; the message names it.
    """
    _set_state(prefix, "ending", session)
    refusals: dict[str, None] = {}  # what the cloud refuses, each once
    survivors: list[str] = []
    with _collected(refusals):
        alive = [machine.id for machine in _machines(account, run, session)]
        machines_left = _end_machines(account, run, spare, session, refusals)
        in_group = machines_left
        if spare:
            in_group = True
            with _collected(refusals):
                account.leave_group(spare)
                in_group = machines_left
        for remnant in sorted(_remnants(account, run, session), key=_group_last):
            if not (in_group and remnant.kind == "group"):  # whose machines keep it
                with _collected(refusals):
                    account.delete(remnant)
        _close_machine_log(account, run, prefix, alive)
        if not (survivors := _survivors(account, run, spare, session, machines_left, refusals)):
            _set_state(prefix, "ended", session)
            return
    what = ", ".join(survivors) if survivors else "resources that cannot be listed"
    why = f" ({'; '.join(refusals)})" if refusals else ""
    raise RunError(f"run {run} still has {what}{why}; repeat `idletrain down {run} --region {account.region}`")


@dataclass(frozen=True)
class Orphan:
    """A run without a head node that leads it."""

    run: str
    prefix: str
    why: str


def orphans(
    machines: Collection[Instance],
    remnants: Collection[LeftoverResource],
    now: float,
    grace_seconds: float,
    over: Mapping[str, str] = MappingProxyType({}),
) -> list[Orphan]:
    """Return the runs to tear down: past their deadline, or without a head node for longer than starting one takes.

    Args:
        machines: All machines that are tagged with a run and not terminated.
        remnants: All other resources that are tagged with a run.
        now: Unix seconds.
        grace_seconds: How long a run may be without a head node after it was created.
        over: By run, why its head node no longer leads it although the machine exists.
    """
    led = {machine.run for machine in machines if machine.role == "head"} - over.keys()
    orphaned: dict[str, Orphan] = {}
    for tags in (*(machine.tags for machine in machines), *(remnant.tags for remnant in remnants)):
        if not tags.keys() >= OWN_TAGS:  # somebody else's resource, named like ours
            continue
        run, prefix = tags[TAG + "run"], tags[TAG + "prefix"]
        try:
            age = now - datetime.datetime.fromisoformat(tags[TAG + "created"]).timestamp()
            deadline = float(tags[TAG + "deadline"])
        except (ValueError, OverflowError):  # not of idletrain's writing either
            continue
        if now > deadline:
            orphaned[run] = Orphan(run, prefix, "its deadline has passed")
        elif run not in led and age > grace_seconds:
            orphaned.setdefault(run, Orphan(run, prefix, over.get(run, "it has no head")))
    return [orphaned[run] for run in sorted(orphaned)]


def over(account: CloudAccount, machines: Collection[Instance], now: float) -> dict[str, str]:
    """Return the runs whose head node exists but no longer leads them, with the reason; read from their S3 prefixes.

    A run whose prefix cannot be read is left out.
    """
    reasons = {}
    for head in (machine for machine in machines if machine.role == "head" and machine.tags.keys() >= OWN_TAGS):
        prefix = S3Prefix.at(head.tags[TAG + "prefix"], account.s3)
        try:
            with account.explained():
                stored, renewed = prefix.get(record.RUN_RECORD_KEY), leader_lease.renewed(prefix)
            state = RunRecord.from_json(stored.content).state if stored else ""
        except (IdletrainError, LookupError, TypeError, ValueError) as error:  # also what another version wrote
            logger.warning("%s cannot be read: %r", prefix.url, error)
            continue
        if not stored:
            reasons[head.run] = "its record is gone"
        elif state == "ended":
            reasons[head.run] = "it has ended"
        elif now - max(renewed, head.launched_at) > HEAD_SILENCE_SECONDS:
            reasons[head.run] = f"its head has not renewed its lease for {HEAD_SILENCE_SECONDS / 60:.0f} min"
    return reasons


def lost_head(machines: Collection[Instance], run: RunRecord, now: float) -> str:
    """Return why a running run has no head node any more, as a sentence; empty while it has one, or one may appear.

    Args:
        machines: All of the run's machines that EC2 lists, including those that ended in the last hour.
        run: Its record, as of this head session.
        now: Unix seconds.
    """
    heads = [m for m in machines if m.role == "head" and m.head_session == run.head_session]
    if any(head.state in RUNNING_STATES for head in heads) or (not heads and now - run.created < START_SECONDS):
        return ""
    newest = max(heads, key=lambda head: head.launched_at, default=None)
    reason = f"its head {newest.id} is gone ({newest.reason})" if newest else "it has no head"
    return f"{reason}; {run.how_to_go_on}"


def _machines(account: CloudAccount, run: str, session: str) -> list[Instance]:
    """Return a run's machines that are alive, of a session if one is named."""
    return [machine for machine in account.instances(run) if session in ("", machine.head_session)]


def _remnants(account: CloudAccount, run: str, session: str) -> list[LeftoverResource]:
    """Return a run's other resources, of a session if one is named."""
    remnants = account.remnants(run)
    return [remnant for remnant in remnants if session in ("", remnant.tags.get(TAG + "created", session))]


def _survivors(
    account: CloudAccount, run: str, spare: str, session: str, machines_left: bool, refusals: dict[str, None]
) -> list[str]:
    """Return ids of resources that still exist once EC2's lists have had time to become consistent."""
    deadline = time.monotonic() + (0.0 if machines_left else LISTED_SECONDS)
    while True:
        left = [machine.id for machine in _machines(account, run, session) if machine.id != spare]
        left += [remnant.id for remnant in _remnants(account, run, session)]
        if not left or time.monotonic() > deadline:
            return left
        with _collected(refusals):
            account.terminate([id_ for id_ in left if id_.startswith("i-")])
        time.sleep(TEARDOWN_POLL_SECONDS)


def _end_machines(account: CloudAccount, run: str, spare: str, session: str, refusals: dict[str, None]) -> bool:
    """Terminate machines until none is left, or for as long as that may take; return True if any is left."""
    began, clean, refused = time.monotonic(), 0, False
    while clean < CLEAN_READS:
        left = [machine.id for machine in _machines(account, run, session) if machine.id != spare]
        before = len(refusals)
        with _collected(refusals):
            account.terminate(left)
        refused = refused or len(refusals) > before
        clean = 0 if left else clean + 1
        if left and time.monotonic() - began > (REFUSED_SECONDS if refused else GONE_SECONDS):
            return True
        if clean < CLEAN_READS:
            time.sleep(TEARDOWN_POLL_SECONDS)
    return False


def _group_last(remnant: LeftoverResource) -> bool:
    return remnant.kind == "group"


@contextlib.contextmanager
def _collected(refusals: dict[str, None]) -> Iterator[None]:
    """Go on behind the context whatever the cloud refuses in it, and remember its words."""
    try:
        yield
    except IdletrainError as error:
        refusals[str(error).partition("; ")[0]] = None  # what to do is said once, for all of them


def _close_machine_log(account: CloudAccount, run: str, prefix: S3Prefix | None, alive: Collection[str]) -> None:
    """Append the machine events that the head node could no longer record, so that the run's bill is complete."""
    with _errors_logged(prefix):
        if prefix is None:
            return
        reported, now = s3_mirror.events(prefix), time.time()
        instances = account.instances(run, (*ALIVE_STATES, *ENDED_STATES))
        run_record = record.read(prefix)
        new = machine_log.new_records(reported, instances, run_record, run_record.prices, now)
        new = machine_log.ended_unseen(new, reported, alive, now)
        new += machine_log.closing_records(reported, alive, now, new)
        if new:
            s3_mirror.append_events(prefix, machine_log.as_recorded(reported, new))


def _set_state(prefix: S3Prefix | None, state: str, session: str) -> None:
    with _errors_logged(prefix):
        if prefix is not None and session in ("", record.read(prefix).head_session):
            record.update(prefix, state=state)


@contextlib.contextmanager
def _errors_logged(prefix: S3Prefix | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 (nothing about a record may keep machines alive)
        logger.warning("the record in %s could not be updated: %s", prefix and prefix.url, error)
