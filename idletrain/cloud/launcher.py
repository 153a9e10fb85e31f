"""Start a run in a cloud from the user's machine: plan, write the record, create resources, start the head.

Once the head has started, nothing here is needed any more: the run continues with the laptop closed.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from idletrain.cloud import follow, leader_lease, machine_log, record, teardown, workdir
from idletrain.cloud.account import CloudAccount
from idletrain.cloud.instance_types import Market, NodeNeed, Offer, Pools, diversify
from idletrain.cloud.machines import RUNNING_STATES, TAG, LaunchSite, Pool, run_tags
from idletrain.cloud.market import MarketSnapshot
from idletrain.cloud.quote import Quote
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.cloud.record import RunRecord, SweepOrder
from idletrain.cluster import certificates
from idletrain.errors import IdletrainError, JobError, RunError
from idletrain.job import Job
from idletrain.machine_settings import CloudSettings
from idletrain.observe import cost
from idletrain.observe.summary import summary_of
from idletrain.resume import check_resumption
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import CrashPoint, S3Prefix

logger = logging.getLogger(__name__)
SLOT_BYTES = 2 << 30  # if the job does not say: importing torch, and seven times a subnet of 100 MB
PROFILE_ROLES = ("head", "worker")
MARKETS_OF_POLICY: Mapping[str, tuple[Market, ...]] = {
    "spot": ("spot",),
    "on-demand": ("on-demand",),
    "auto": ("spot", "on-demand"),
}


@dataclass(frozen=True)
class SpotPlan:
    """The machines of a run, before any is started.

    Attributes:
        job: The job to run.
        site: The network that the machines start in.
        quote: What they cost.
        offers: The pools that nodes may come from, the best first.
        heads: The pools that the head may come from, the best first.
        estimate: True if on-demand prices are estimates.
        packed: The archive of the user's own code, or None.
        sweep: Trials to train instead of the job, or None.
    """

    job: Job
    site: LaunchSite
    quote: Quote
    offers: tuple[Offer, ...]
    heads: tuple[Pool, ...]
    estimate: bool
    packed: bytes | None
    sweep: SweepOrder | None = None


def make_spot_plan(job: Job, account: CloudAccount, cache: Path, spent_usd: float = 0.0) -> SpotPlan:
    """Choose a run's machines by the market's prices and the account's network, quotas and bucket.

    Args:
        job: What to run.
        account: The account that pays.
        cache: Directory of cached prices.
        spent_usd: USD that the run has cost before this launch.

    Raises:
        JobError: no machine fits, the budget is too small, or the account lacks something.
    """
    nodes = job.nodes
    site = account.site(job.cloud.ami, gpu=nodes.gpu > 0)
    market = account.market(cache)
    offers = _pools(job, market, site)
    heads, head_price = _heads(job, market, site, offers)
    quote = Quote(
        pools=Pools(offers),
        nodes=nodes.count,
        head_type=job.cloud.head,
        head_usd_per_hour=head_price,
        max_duration_seconds=nodes.max_duration,
        max_price=nodes.max_price,
        budget_usd=nodes.budget_usd,
        spent_usd=spent_usd,
        error_factor=market.error_factor,
    )
    checks = (
        *data_faults(job, account.readable_data()),
        quote.fault,
        account.quota_fault(nodes.count, offers),
    )
    if faults := [fault for fault in checks if fault]:
        raise JobError(faults)
    return SpotPlan(
        job, site, quote, offers, heads, market.estimate, workdir.pack(Path(job.workdir)) if job.workdir else None
    )


def spent_usd(account: CloudAccount, prefix: S3Prefix, run: str) -> float:
    """Return the USD that a run has cost so far, machines whose end no head recorded included."""
    events, alive, now = s3_mirror.events(prefix), [machine.id for machine in account.instances(run)], time.time()
    return cost.accrued([*events, *machine_log.closing_records(events, alive, now)], now).spent_usd


def start(
    plan: SpotPlan,
    account: CloudAccount,
    prefix: S3Prefix,
    *,
    image: str,
    resume: bool,
    command: str = "",
    allow_control: bool = False,
    report: Callable[[str], None] = logger.info,
    reached: CrashPoint = lambda _name: None,
) -> RunRecord:
    """Start a run's machines; end whatever was created if that fails half way.

    Args:
        plan: The machines.
        account: The account that pays.
        prefix: The run's prefix.
        image: The container image that machines run.
        resume: Continue the run that the prefix holds.
        command: The command line, for the run's records.
        allow_control: True if the dashboard's page may drain and kill workers.
        report: Gets a line on what is being done, or waited for.
        reached: Called after each resource is created, with its name.

    Raises:
        JobError: the name is taken, there is nothing to resume, or the job differs from the run's first one.
        RunError: the cloud refuses.
    """
    _refuse_namesake(account, plan.job.name, prefix)
    run = _write_record(plan, account, prefix, resume, report, command=command, allow_control=allow_control)
    reached("record")
    try:
        _create_resources(plan, run, account, prefix, image, report, reached)
    except BaseException as error:
        try:
            teardown.take_down(account, run.run, prefix)
        except IdletrainError as left:  # neither sentence may hide the other
            raise RunError(f"{error}; {left}") from error
        raise
    return run


def node_need(job: Job) -> NodeNeed:
    """Return the memory and GPUs that one subnet of a job needs, and how many slots of one machine the job can use."""
    slots = math.ceil(max(phase.subnets for phase in job.training.every_phase) / job.nodes.count)
    return NodeNeed(memory_bytes=job.nodes.memory or SLOT_BYTES, gpus=job.nodes.gpu, most_slots=slots)


def data_faults(job: Job, readable: Sequence[str]) -> list[str]:
    """Return a sentence for each S3 path of the data that the machines may not read.

    That the data exists is checked when it is read here.
    """
    allowed = tuple(readable)
    if job.cloud.profiles != CloudSettings().profiles:  # roles of the user's own may read other buckets
        allowed = ("s3://",)
    return [
        f"data: machines may not read {path}; copy it below {allowed[0]}, or name roles that may in cloud.profiles"
        for path in job.data.paths
        if path.startswith("s3://") and not path.startswith(allowed)
    ]


def _pools(job: Job, market: MarketSnapshot, site: LaunchSite) -> tuple[Offer, ...]:
    """Choose the pools in each market that the job allows; where there are two, one may have none."""
    need, nodes = node_need(job), job.nodes
    faults: list[str] = []
    offers: tuple[Offer, ...] = ()
    for kind in MARKETS_OF_POLICY[nodes.spot_policy]:
        try:
            available = market.offers(need, kind, nodes.max_price, site.subnets)
        except JobError as error:
            faults += error.faults
        else:
            offers += diversify(available, (need.most_slots or 1) * nodes.count).offers
    if not offers:
        raise JobError(faults)
    return offers


def _heads(
    job: Job, market: MarketSnapshot, site: LaunchSite, offers: Sequence[Offer]
) -> tuple[tuple[Pool, ...], float]:
    """Return the head's pools and its USD an hour, the same in all zones.

    The zone of the best nodes comes first, because traffic between zones is paid for.
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


def _refuse_namesake(account: CloudAccount, run: str, prefix: S3Prefix) -> None:
    """Refuse a second run of the same name: resources are found by it, so either run would end the other's."""
    tagged = [*(i.tags for i in account.instances(run)), *(i.tags for i in account.remnants(run))]
    if other_prefixes := sorted({tags[TAG + "prefix"] for tags in tagged if tags.get(TAG + "prefix")} - {prefix.url}):
        raise JobError(
            f"name: a run {run} is there already, in {other_prefixes[0]}; choose another --name, or end that one with "
            f"`idletrain down {other_prefixes[0]} --region {account.region}`"
        )


def _write_record(
    plan: SpotPlan, account: CloudAccount, prefix: S3Prefix, resume: bool, report: Callable[[str], None], **options: Any
) -> RunRecord:
    """Write the run record before creating resources; on resume, replace it by one with a new deadline."""
    job, now = plan.job, time.time()
    deadline = now + plan.quote.deadline_seconds
    pools = tuple(Pool(offer.market, offer.type.name, offer.zone) for offer in plan.offers)
    run = RunRecord(
        run=job.name,
        job=job.as_tree(),
        tags=run_tags(job.name, prefix.url, account.owner, version("idletrain"), now, deadline),
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
        sweep=plan.sweep,
        **options,
    )
    if not resume:
        record.claim(prefix, run)
        return run
    previous = record.read(prefix)
    _refuse_other_kind(run, previous, prefix)
    _refuse_led(account, previous, prefix, report)
    if run.sweep is None:  # ended trials are skipped, and there may be new ones
        past = summary_of(s3_mirror.events(prefix))
        check_resumption(job, Job.model_validate(previous.job), past.status, past.rounds)
    teardown.take_down(account, job.name, prefix)
    if not account.instances(job.name, ("shutting-down",)):  # else its head may still write for a moment
        leader_lease.end(prefix)
    spent = cost.accrued(s3_mirror.events(prefix), now).spent_usd
    until = now + replace(plan.quote, spent_usd=spent).deadline_seconds
    tags = run_tags(job.name, prefix.url, account.owner, version("idletrain"), now, until)
    last, generation = follow.last_events(prefix), previous.generation + 1
    run = replace(run, generation=generation, events_after=last, spent_usd=spent, deadline=until, tags=tags)
    prefix.put(record.RUN_RECORD_KEY, run.as_json())
    return run


def _refuse_led(account: CloudAccount, run: RunRecord, prefix: S3Prefix, report: Callable[[str], None]) -> None:
    """Refuse to resume a run whose head is at work, or boots: that would end its machines."""
    if run.state != "running" or run.failure or account.region != run.site.region:
        return
    machines = account.instances(run.run, RUNNING_STATES)
    heads = [m for m in machines if m.role == "head" and m.head_session == run.head_session]
    if not heads:
        return
    report("looking whether the run's head is at work")
    boots = any(time.time() - head.launched_at < follow.BOOT_SECONDS for head in heads)
    if boots or leader_lease.is_renewed(prefix):
        name = f"{prefix.url} --region {account.region}"
        raise JobError(
            f"name: run {run.run} is at work; follow it with `idletrain logs {name} -f`, or end it with "
            f"`idletrain down {name}` before you go on with it"
        )


def _refuse_other_kind(run: RunRecord, previous: RunRecord, prefix: S3Prefix) -> None:
    """Refuse to go on with a sweep as a run, with a run as a sweep, or with a trial while its sweep runs."""
    sweep = prefix.beside(previous.of_sweep).get(record.RUN_RECORD_KEY) if previous.of_sweep else None
    if sweep and RunRecord.from_json(sweep.content).state != "ended":
        raise JobError(f"name: {run.run} is a trial of the sweep {previous.of_sweep}, which goes on; wait for its end")
    if (previous.sweep is None) != (run.sweep is None):
        what = "a run" if previous.sweep is None else "a sweep"
        raise JobError(f"name: {run.run} is {what}; choose another --name")


def _create_resources(
    plan: SpotPlan,
    run: RunRecord,
    account: CloudAccount,
    prefix: S3Prefix,
    image: str,
    report: Callable[[str], None],
    reached: CrashPoint,
) -> None:
    """Upload the user's code, create what the machines need, and start the head."""
    if plan.packed is not None:
        report("uploading the working directory")
        prefix.put(workdir.WORKDIR_KEY, plan.packed)
    report("creating the machines' network group, certificates and template")
    until = datetime.datetime.fromtimestamp(run.deadline, datetime.UTC)
    identities = certificates.issue(run.run, PROFILE_ROLES, until)
    run = record.update(prefix, site=account.prepare_run(run, image, identities, report, reached))
    reached("template")
    report("starting the head")
    account.start_head(run, image, report)
    reached("head")
    if (now := record.read(prefix)).state != "running" and not now.failure:
        raise RunError(f"run {run.run} was ended while it was launched; start it again with --resume")
