"""Leaves nothing behind: ends what a run has made, found by tag, and says what survives.

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
from idletrain.cloud.aws.account import ALIVE_STATES, RUNNING_STATES, Account, Instance, LeftoverResource, explained
from idletrain.cloud.aws.requests import TAG
from idletrain.cloud.record import RunRecord
from idletrain.errors import RunError
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
GONE_SECONDS = 300.0  # machines end in a minute or two
TEARDOWN_POLL_SECONDS = 1.0
OWN_TAGS = {TAG + key for key in ("run", "prefix", "created", "deadline")}
LISTED_SECONDS = 30.0
HEAD_SILENCE_SECONDS = 1800.0  # a head renews its lease every few seconds, from its boot on
START_SECONDS = 120.0  # from a run's record to its head's being listed
CLEAN_READS = 2  # EC2's lists are consistent after a while only


def down(account: Account, run: str, prefix: S3Prefix | None, spare: str = "") -> None:
    """End everything of a run.

    Args:
        account: The account.
        run: The run's name.
        prefix: Where its record is, if that is known.
        spare: The instance that does this: it leaves the run's group, and ends by itself.

    Raises:
        RunError: something survives; it is named.
    """
    _note(prefix, "ending")
    alive = [machine.id for machine in account.instances(run)]
    _end_machines(account, run, spare)
    if spare:
        account.leave_group(spare)
    for remnant in sorted(account.remnants(run), key=lambda remnant: remnant.kind == "group"):  # it may have to wait
        account.delete(remnant)
    _close_machine_log(account, run, prefix, alive)
    if survivors := _survivors(account, run, spare):
        raise RunError(f"of run {run} there are still {', '.join(survivors)}; repeat `idletrain down {run}`")
    _note(prefix, "ended")


@dataclass(frozen=True)
class Orphan:
    """A run whose machines nobody leads any more."""

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
    """Runs to be taken down: past their deadline, or without a head for longer than starting one takes.

    Args:
        machines: All that are tagged with a run and not terminated.
        remnants: Everything else that is.
        now: Unix seconds.
        grace_seconds: How long a run may be without a head after it was created.
        over: Why a run's head leads it no more, by run, although its machine is there.
    """
    led = {machine.run for machine in machines if machine.role == "head"} - over.keys()
    found: dict[str, Orphan] = {}
    for tags in (*(machine.tags for machine in machines), *(remnant.tags for remnant in remnants)):
        if not tags.keys() >= OWN_TAGS:  # somebody else's below our names
            continue
        run, prefix = tags[TAG + "run"], tags[TAG + "prefix"]
        age = now - datetime.datetime.fromisoformat(tags[TAG + "created"]).timestamp()
        if now > float(tags[TAG + "deadline"]):
            found[run] = Orphan(run, prefix, "its deadline has passed")
        elif run not in led and age > grace_seconds:
            found.setdefault(run, Orphan(run, prefix, over.get(run, "it has no head")))
    return [found[run] for run in sorted(found)]


def over(account: Account, machines: Collection[Instance], now: float) -> dict[str, str]:
    """Runs whose head's machine is there and leads nothing any more, and why, as what lies below their prefix tells.

    What cannot be read tells nothing.
    """
    found = {}
    for head in (machine for machine in machines if machine.role == "head" and machine.tags.keys() >= OWN_TAGS):
        prefix = S3Prefix.at(head.tags[TAG + "prefix"], account.s3)
        try:
            with explained():
                kept, held = prefix.get(record.RUN_RECORD_KEY), leader_lease.renewed(prefix)
            state = RunRecord.from_json(kept.content).state if kept else ""
        except (RunError, LookupError, TypeError, ValueError) as error:  # also what another version wrote
            logger.warning("%s cannot be read: %r", prefix.url, error)
            continue
        if not kept:
            found[head.run] = "its record is gone"
        elif state == "ended":
            found[head.run] = "it has ended"
        elif now - max(held, head.launched_at) > HEAD_SILENCE_SECONDS:
            found[head.run] = f"its head has said nothing for {HEAD_SILENCE_SECONDS / 60:.0f} min"
    return found


def lost_head(machines: Collection[Instance], run: RunRecord, now: float) -> str:
    """Why a run that has not ended has no head any more, as a sentence; nothing while it has one, or one may come.

    Args:
        machines: All of the run that EC2 tells of, those that have ended in the last hour among them.
        run: Its record, as of this sitting.
        now: Unix seconds.
    """
    heads = [m for m in machines if m.role == "head" and m.head_session == run.head_session]
    if any(head.state in RUNNING_STATES for head in heads) or (not heads and now - run.created < START_SECONDS):
        return ""
    newest = max(heads, key=lambda head: head.launched_at, default=None)
    what = f"its head {newest.id} is gone ({newest.reason})" if newest else "it has no head"
    return f"{what}; go on with --resume"


def _survivors(account: Account, run: str, spare: str) -> list[str]:
    """What is still there once lists have had the time to tell."""
    deadline = time.monotonic() + LISTED_SECONDS
    while True:
        left = [machine.id for machine in account.instances(run) if machine.id != spare]
        left += [remnant.id for remnant in account.remnants(run)]
        if not left or time.monotonic() > deadline:
            return left
        account.terminate([id_ for id_ in left if id_.startswith("i-")])
        time.sleep(TEARDOWN_POLL_SECONDS)


def _end_machines(account: Account, run: str, spare: str) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    clean = 0
    while clean < CLEAN_READS:
        left = [machine.id for machine in account.instances(run) if machine.id != spare]
        account.terminate(left)
        clean = 0 if left else clean + 1
        if left and time.monotonic() > deadline:
            raise RunError(f"of run {run} there are still {', '.join(left)}; repeat `idletrain down {run}`")
        if clean < CLEAN_READS:
            time.sleep(TEARDOWN_POLL_SECONDS)


def _close_machine_log(account: Account, run: str, prefix: S3Prefix | None, alive: Collection[str]) -> None:
    """Add to the run's events what its head could not tell any more of machines, so that its bill is whole."""
    with _left_as_it_is(prefix):
        if prefix is None:
            return
        told, now = s3_mirror.events(prefix), time.time()
        found = account.instances(run, (*ALIVE_STATES, *machine_log.ENDED))
        kept = record.read(prefix)
        news = machine_log.new_records(told, found, kept, kept.prices, now)
        news += machine_log.closing_records(told, alive, now, news)
        if news:
            s3_mirror.append_events(prefix, machine_log.as_recorded(told, news))


def _note(prefix: S3Prefix | None, state: str) -> None:
    with _left_as_it_is(prefix):
        if prefix is not None:
            record.update(prefix, state=state)


@contextlib.contextmanager
def _left_as_it_is(prefix: S3Prefix | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 (nothing about a record may keep machines alive)
        logger.warning("the record in %s is left as it is: %s", prefix and prefix.url, error)
