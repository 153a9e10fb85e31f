"""A plan to look at: a table of its units, what single techniques would take, and the timeline of a step. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from idletrain.nn.outofcore.planning.plan import Plan
from idletrain.nn.outofcore.planning.profile import Profile, micro_batch
from idletrain.nn.outofcore.planning.simulate import Span, simulate

WORDS = {"K": "keep", "S": "swap", "R": "recompute", "Q": "recompute, input swapped", "m": "with the one before"}
MARKS = {"forward": "f", "recompute": "r", "backward": "b", "swap": "s", "weights": "w"}
COLUMNS = 72


def picture(profile: Profile, plan: Plan) -> RenderableType:
    """Table, comparison and timeline of a plan for a profile."""
    return Group(_units(profile, plan), _techniques(profile, plan), Text(timeline(profile, plan)))


def timeline(profile: Profile, plan: Plan, columns: int = COLUMNS) -> str:
    """One step on three lanes; a column shows what took most of its time, `.` where a lane waits."""
    link = (micro_batch(profile, plan.micro_batches) if plan.micro_batches > 1 else profile).link
    outcome = simulate(plan.footprint(profile), link, trace=True)
    end = max((span.end for span in outcome.spans), default=0.0) or 1.0
    lines = [f"one step{_part(plan)}: {outcome.seconds * 1000:.1f} ms, peak {size(outcome.peak_bytes)}"]
    for lane in ("compute", "write", "read"):
        spans = [span for span in outcome.spans if span.lane == lane]
        if spans:
            lines.append(f"{lane:>8} {_lane(spans, end, columns)}")
    lines.append(f"{'':>8} f forward, r recompute, b backward; s saved tensors, w weights; . idle")
    return "\n".join(lines)


def _part(plan: Plan) -> str:
    return f", micro-batch 1 of {plan.micro_batches}" if plan.micro_batches > 1 else ""


def _lane(spans: Sequence[Span], end: float, columns: int) -> str:
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for span in spans:
        first, last = (int(at / end * columns) for at in (span.start, span.end))
        for column in range(first, min(last, columns - 1) + 1):
            low, high = column * end / columns, (column + 1) * end / columns
            shares[column][span.kind] += min(high, span.end) - max(low, span.start)
    half = end / columns / 2
    drawn = []
    for share in shares:
        kind = max(share, key=lambda k: share[k], default=None)
        drawn.append(MARKS[kind] if kind and sum(share.values()) >= half else ".")
    return "".join(drawn)


def _units(profile: Profile, plan: Plan) -> Table:
    table = Table(title="plan", title_justify="left")
    table.add_column("unit")
    table.add_column("what")
    for column in ("forward", "backward", "recompute", "input", "saved", "parameters"):
        table.add_column(column, justify="right")
    for unit, letter in zip(profile.units, plan.letters, strict=True):
        table.add_row(
            unit.name,
            WORDS[letter],
            *(f"{s * 1000:.1f} ms" for s in (unit.forward_seconds, unit.backward_seconds, unit.recompute_seconds)),
            *(size(b) for b in (unit.input_bytes, unit.inner_bytes, unit.parameter_bytes)),
        )
    return table


def _techniques(profile: Profile, plan: Plan) -> RenderableType:
    table = Table(title="predicted", title_justify="left")
    for column in ("", "step", "beside in-core", "peak"):
        table.add_column(column, justify="right" if column else "left")
    whole = profile.compute_seconds
    rows = [("this plan", plan.seconds, plan.peak_bytes, 0)]
    rows += [(t.name, t.seconds, t.peak_bytes, t.lacking_bytes) for t in plan.techniques]
    for name, seconds, peak, lacking in rows:
        step = f"{seconds * 1000:.1f} ms" if not lacking else f"lacks {size(lacking)}"
        table.add_row(name, step, f"{seconds / whole:.2f}" if not lacking and whole else "", size(peak))
    link = profile.link
    out, back = size(int(link.write_bytes_per_second)), size(int(link.read_bytes_per_second))
    facts = [
        f"budget {size(plan.budget_bytes)}, a tenth of it left free; link {out}/s out, {back}/s in",
        *(["parameters and optimizer state are streamed through the link"] if plan.streamed else []),
        *([f"in {plan.micro_batches} micro-batches"] if plan.micro_batches > 1 else []),
        *plan.notes,
    ]
    return Group(Text("\n".join(facts)), table)


def size(count: int) -> str:
    """Bytes for a reader."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
