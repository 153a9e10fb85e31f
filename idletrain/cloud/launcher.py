"""Starts a run in a cloud and follows it, from the user's machine: plan, ask, write down, make, look.

After the head has started nothing here is needed any more: the run goes on with the laptop closed.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from idletrain.cloud import leader_lease, machine_log, record, teardown, workdir
from idletrain.cloud.aws import doctor, iam, instance_types, pricing, requests, user_data
from idletrain.cloud.aws.account import ALIVE_STATES, Account, explained
from idletrain.cloud.aws.instance_types import Market, NodeNeed, Offer
from idletrain.cloud.aws.requests import TAG, LaunchSite, Pool
from idletrain.cloud.machine_log import ENDED
from idletrain.cloud.quote import Quote
from idletrain.cloud.reconcile import NOTICE_LEFT_SECONDS, DesiredFleet
from idletrain.cloud.record import RunRecord
from idletrain.cluster import certificates
from idletrain.errors import JobError, RunError
from idletrain.job import CloudSettings, Job, resume_faults
from idletrain.observe import cost
from idletrain.observe.records import Sink, parse
from idletrain.observe.summary import summary_of
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import CrashPoint, S3Prefix

SLOT_BYTES = 2 << 30  # of a job that does not say: what importing torch takes, and a subnet of 100 MB seven times
FOLLOW_SECONDS = 1.0
ALIVE_CHECK_SECONDS = 15.0  # a head that trains tells something every few seconds
RUN_SILENCE_SECONDS = 120.0  # of a head that trains
BOOT_SECONDS = 600.0  # of one that boots, pulls its image, or takes everything down
HEAD_END_SECONDS = 120.0  # it shuts its machine down behind its last write
PROFILE_ROLES = ("head", "worker")
MARKETS_OF_POLICY: Mapping[str, tuple[Market, ...]] = {
    "spot": ("spot",),
    "on-demand": ("on-demand",),
    "auto": ("spot", "on-demand"),
}


@dataclass(frozen=True)
class SpotPlan:
    """What a run would be made of, before anything is."""

    job: Job
    site: LaunchSite
    quote: Quote
    offers: tuple[Offer, ...]
    heads: tuple[Pool, ...]
    estimate: bool
    packed: bytes | None


def make_spot_plan(job: Job, account: Account, cache: Path, spent_usd: float = 0.0) -> SpotPlan:
    """Look at the market and at the account.

    Args:
        job: What to run.
        account: Where.
        cache: For what the market says.
        spent_usd: What earlier sittings of the run have cost.

    Raises:
        JobError: no machine fits, the budget is too small, or the account lacks something.
    """
    nodes = job.nodes
    site = account.site(job.cloud.ami, gpu=nodes.gpu > 0)
    with explained():
        found = pricing.fetch(account.ec2, account.client("pricing", pricing.PRICING_REGION), pricing.PriceCache(cache))
    offers = _pools(job, found, site)
    heads, head_price = _heads(job, found, site, offers)
    quote = Quote(
        pools=instance_types.Pools(offers),
        nodes=nodes.count,
        head_type=job.cloud.head,
        head_usd_per_hour=head_price,
        max_duration_seconds=nodes.max_duration,
        max_price=nodes.max_price,
        budget_usd=nodes.budget_usd,
        spent_usd=spent_usd,
    )
    faults = (
        *data_faults(job, account.bucket),
        _deadline_fault(quote),
        cost.first_hour_fault(nodes.budget_usd, quote.worst_usd_per_hour, spent_usd),
        doctor.quota_fault(account, nodes.count, offers),
    )
    if found_faults := [fault for fault in faults if fault]:
        raise JobError(found_faults)
    return SpotPlan(
        job, site, quote, offers, heads, found.estimate, workdir.pack(Path(job.workdir)) if job.workdir else None
    )


def spent_usd(account: Account, prefix: S3Prefix, run: str) -> float:
    """What a run's sittings have cost so far, whoever saw their machines end."""
    told, alive, now = s3_mirror.events(prefix), [machine.id for machine in account.instances(run)], time.time()
    return cost.accrued([*told, *machine_log.closing_records(told, alive, now)], now).spent_usd


def start(
    plan: SpotPlan,
    account: Account,
    prefix: S3Prefix,
    *,
    image: str,
    resume: bool,
    command: str = "",
    allow_control: bool = False,
    reached: CrashPoint = lambda _name: None,
) -> RunRecord:
    """Make a run's machines; what was made is taken down again if that fails half way.

    Args:
        plan: What to make.
        account: Where.
        prefix: The run's prefix.
        image: The container image that machines run.
        resume: Go on with the run that is there.
        command: What was called, for the run's records.
        allow_control: Whether the dashboard's page may drain and kill workers.
        reached: Called behind everything that is made, with its name.

    Raises:
        JobError: the name is taken, there is nothing to resume, or it cannot be gone on with as asked.
        RunError: the cloud refuses.
    """
    _refuse_namesake(account, plan.job.name, prefix)
    made = _write_down(plan, account, prefix, resume, command=command, allow_control=allow_control)
    reached("record")
    try:
        _make(plan, made, account, prefix, image, reached)
    except BaseException:
        teardown.down(account, made.run, prefix)
        raise
    return made


def follow(prefix: S3Prefix, sink: Sink, account: Account) -> RunRecord:
    """Hand a run's events to a display until the run has ended.

    Reads the run's prefix alone, but looks whether the head is still there when nothing comes.

    Raises:
        RunError: the head gave up, is gone, or is not heard of any more.
    """
    seen, heard, looked = "", time.monotonic(), time.monotonic()
    why, first = "", leader_lease.renewed(prefix)  # or, before the head has taken it, by a sitting before
    beat = first

    def take(content: bytes) -> None:
        for event in parse(content.splitlines()):
            sink(event)

    while True:
        if time.monotonic() - max(heard, looked) > ALIVE_CHECK_SECONDS:
            looked, why = time.monotonic(), head_is_lost(account, record.read(prefix))
            before, beat = beat, leader_lease.renewed(prefix)
            heard = looked if beat != before else heard  # it waits for nodes, or for a long round's end
        now = record.read(prefix)  # behind the look: a head that was done is gone, too
        last = s3_mirror.tail(prefix, "events.jsonl", take, seen)
        if last != seen:
            seen, heard = last, time.monotonic()
        if now.failure:
            raise RunError(now.failure)
        if now.state == "ended":
            return now
        if why:
            raise RunError(f"{now.run}: {why}")
        patience = RUN_SILENCE_SECONDS if beat != first and now.state == "running" else BOOT_SECONDS
        if time.monotonic() - heard > patience:
            raise RunError(
                f"the head of {now.run} has said nothing for {patience:.0f} s; see `idletrain logs {prefix.url}`, "
                f"then go on with --resume or end it with `idletrain down {prefix.url}`"
            )
        time.sleep(FOLLOW_SECONDS)


def head_is_lost(account: Account, run: RunRecord) -> str:
    """Why a run has no head any more, as a sentence; nothing while it has one, or is in another region."""
    if account.region != run.site.region:
        return ""
    return teardown.lost_head(account.instances(run.run, (*ALIVE_STATES, *ENDED)), run, time.time())


def outlive(account: Account, run: str) -> None:
    """Wait for the head's own end, behind which nothing of a run is left.

    Raises:
        RunError: it does not end.
    """
    deadline = time.monotonic() + HEAD_END_SECONDS
    while left := account.instances(run):
        if time.monotonic() > deadline:
            names = ", ".join(machine.id for machine in left)
            raise RunError(f"run {run} has ended, but not {names}; end it with `idletrain down {run}`")
        time.sleep(FOLLOW_SECONDS)


def node_need(job: Job) -> NodeNeed:
    """What one subnet of a job needs of a machine, and how many of a machine's slots the job makes use of."""
    slots = math.ceil(job.training.subnets / job.nodes.count)
    return NodeNeed(memory_bytes=job.nodes.memory or SLOT_BYTES, gpus=job.nodes.gpu, most_slots=slots)


def data_faults(job: Job, bucket: str) -> list[str]:
    """What of a job's data in S3 machines could not read; whether it is there is seen when it is read here."""
    readable = tuple(f"s3://{bucket}/{folder}/" for folder in (iam.DATA_PREFIX, "runs"))
    if job.cloud.profiles != CloudSettings().profiles:  # then they may read what the user lets them
        readable = ("s3://",)
    return [
        f"data: machines may not read {path}; copy it below {readable[0]}, or name roles that may in cloud.profiles"
        for path in job.data.paths
        if path.startswith("s3://") and not path.startswith(readable)
    ]


def _pools(job: Job, market: pricing.MarketSnapshot, site: LaunchSite) -> tuple[Offer, ...]:
    """The pools to ask for, in each market that the job allows; of two, one may have nothing."""
    need, nodes = node_need(job), job.nodes
    faults: list[str] = []
    offers: tuple[Offer, ...] = ()
    for kind in MARKETS_OF_POLICY[nodes.spot_policy]:
        try:
            there = market.offers(need, kind, nodes.max_price, site.subnets)
        except JobError as error:
            faults += error.faults
        else:
            offers += instance_types.diversify(there, (need.most_slots or 1) * nodes.count).offers
    if not offers:
        raise JobError(faults)
    return offers


def _heads(
    job: Job, market: pricing.MarketSnapshot, site: LaunchSite, offers: Sequence[Offer]
) -> tuple[tuple[Pool, ...], float]:
    """Where the head may come from and what it costs, the same in all zones: that of the best nodes first, as traffic
    between zones is paid for.
    """
    type_ = job.cloud.head
    price = market.on_demand_prices.get(type_)
    if price is None:
        raise JobError(f"cloud.head: there is no machine type {type_} here; name one, such as t3.medium")
    zones = dict.fromkeys([*(offer.zone for offer in offers), *sorted(site.subnets)])
    offered = [zone for zone in zones if zone in market.offerings.get(type_, ()) and zone in site.subnets]
    if not offered:
        raise JobError(
            f"cloud.head: {type_} is not offered in {', '.join(sorted(site.subnets))}; name another type, or add a "
            f"subnet in {' or '.join(market.offerings.get(type_, ())) or 'another region'}"
        )
    return tuple(Pool("on-demand", type_, zone) for zone in offered), price


def _deadline_fault(quote: Quote) -> str:
    """A run whose last minutes are its only ones would be paid for and train nothing."""
    if quote.deadline_seconds > 2 * NOTICE_LEFT_SECONDS:
        return ""
    return (
        f"nodes.max_duration: machines would live for {quote.deadline_seconds / 60:.0f} min, of which the last "
        f"{NOTICE_LEFT_SECONDS / 60:.0f} are for the last writes; allow them (and the budget) "
        f"{2 * NOTICE_LEFT_SECONDS / 60 + 1:.0f}"
    )


def _refuse_namesake(account: Account, run: str, prefix: S3Prefix) -> None:
    """What a run has made is found by the run's name: of two with one name, either would take the other down."""
    tagged = [*(i.tags for i in account.instances(run)), *(i.tags for i in account.remnants(run))]
    if elsewhere := sorted({tags[TAG + "prefix"] for tags in tagged if tags.get(TAG + "prefix")} - {prefix.url}):
        raise JobError(
            f"name: a run {run} is there already, in {elsewhere[0]}; choose another --name, or end that one with "
            f"`idletrain down {elsewhere[0]}`"
        )


def _write_down(plan: SpotPlan, account: Account, prefix: S3Prefix, resume: bool, **asked: Any) -> RunRecord:
    """The record, before anything is made; of a run that goes on, the one that is there with a new deadline."""
    job, now = plan.job, time.time()
    deadline = now + plan.quote.deadline_seconds
    pools = tuple(Pool(offer.market, offer.type.name, offer.zone) for offer in plan.offers)
    made = RunRecord(
        run=job.name,
        job=job.as_tree(),
        tags=requests.tags(job.name, prefix.url, account.owner, version("idletrain"), now, deadline),
        created=now,
        deadline=deadline,
        site=plan.site,
        wanted=DesiredFleet(job.nodes.count, job.nodes.spot_policy, pools),
        heads=plan.heads,
        prices={pool: offer.usd_per_hour for pool, offer in zip(pools, plan.offers, strict=True)}
        | dict.fromkeys(plan.heads, plan.quote.head_usd_per_hour),
        on_demand={o.type.name: o.on_demand_usd_per_hour for o in plan.offers if o.on_demand_usd_per_hour is not None}
        | {job.cloud.head: plan.quote.head_usd_per_hour},
        need_bytes=node_need(job).memory_bytes,
        most_slots=node_need(job).most_slots or 1,
        **asked,
    )
    if not resume:
        record.claim(prefix, made)
        return made
    before = record.read(prefix)
    past = summary_of(s3_mirror.events(prefix))
    if faults := resume_faults(job, Job.model_validate(before.job), past.status, past.rounds):
        raise JobError(faults)
    teardown.down(account, job.name, prefix)
    if not account.instances(job.name, ("shutting-down",)):  # else its head may write for a moment yet
        leader_lease.end(prefix)
    spent = cost.accrued(s3_mirror.events(prefix), now).spent_usd
    until = now + replace(plan.quote, spent_usd=spent).deadline_seconds
    tags = requests.tags(job.name, prefix.url, account.owner, version("idletrain"), now, until)
    made = replace(made, generation=before.generation + 1, spent_usd=spent, deadline=until, tags=tags)
    prefix.put(record.RUN_RECORD_KEY, made.as_json())
    return made


def _make(plan: SpotPlan, made: RunRecord, account: Account, prefix: S3Prefix, image: str, reached: CrashPoint) -> None:
    if plan.packed is not None:
        prefix.put(workdir.WORKDIR_KEY, plan.packed)
    group = account.make_group(made.run, made.site.vpc, made.tags)
    reached("group")
    until = datetime.datetime.fromtimestamp(made.deadline, datetime.UTC)
    account.put_identities(made.run, certificates.issue(made.run, PROFILE_ROLES, until), made.tags)
    reached("identities")
    gpu = plan.job.nodes.gpu > 0
    text = user_data.user_data(made.deadline, image, gpu=gpu)
    site = replace(made.site, group=group)
    head_profile, node_profile = plan.job.cloud.profiles
    template = account.make_template(requests.launch_template(made.run, site, node_profile, text, made.tags))
    site = replace(site, template=template)
    record.update(prefix, site=site)
    reached("template")
    head_text = user_data.user_data(made.deadline, image) if gpu else ""
    account.start_head(
        [requests.head(site, pool, head_profile, made.tags, made.generation, head_text) for pool in made.heads]
    )
    reached("head")
