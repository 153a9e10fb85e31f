"""Render a plan: a table of its units, a comparison with single techniques, and the timeline of a step. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from idletrain.nn.outofcore.planning.plan import MemoryPlan
from idletrain.nn.outofcore.planning.profile import Profile, micro_batch
from idletrain.nn.outofcore.planning.simulate import Span, simulate

MODE_WORDS = {
    "K": "keep",
    "S": "swap",
    "R": "recompute",
    "Q": "recompute, input swapped",
    "m": "joined to the one before",
}
LANE_LETTERS = {"forward": "f", "recompute": "r", "backward": "b", "swap": "s", "weights": "w"}
COLUMNS = 72
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def plan_text(profile: Profile, plan: MemoryPlan) -> RenderableType:
    """Render a plan for a profile as tables and a timeline."""
    return Group(_units(profile, plan), _techniques(profile, plan), Text(plan_timeline(profile, plan)))


def plan_timeline(profile: Profile, plan: MemoryPlan, columns: int = COLUMNS) -> str:
    """Draw one step on three lanes; a column shows the kind that took most of its time, `.` where a lane is idle."""
    link = (micro_batch(profile, plan.micro_batches) if plan.micro_batches > 1 else profile).link
    outcome = simulate(plan.footprint(profile), link, trace=True)
    end = max((span.end for span in outcome.spans), default=0.0) or 1.0
    lines = [f"one step{_part(plan)}: {outcome.seconds * 1000:.1f} ms, peak {bytes_text(outcome.peak_bytes)}"]
    for lane in ("compute", "write", "read"):
        spans = [span for span in outcome.spans if span.lane == lane]
        if spans:
            lines.append(f"{lane:>8} {_lane(spans, end, columns)}")
    lines.append(f"{'':>8} f forward, r recompute, b backward; s saved tensors, w weights; . idle")
    return "\n".join(lines)


def _part(plan: MemoryPlan) -> str:
    return f", micro-batch 1 of {plan.micro_batches}" if plan.micro_batches > 1 else ""


def _lane(spans: Sequence[Span], end: float, columns: int) -> str:
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for span in spans:
        first, last = (int(at / end * columns) for at in (span.start, span.end))
        for column in range(first, min(last, columns - 1) + 1):
            low, high = column * end / columns, (column + 1) * end / columns
            shares[column][span.kind] += min(high, span.end) - max(low, span.start)
    half = end / columns / 2
    letters = []
    for share in shares:
        kind = max(share, key=lambda k: share[k], default=None)
        letters.append(LANE_LETTERS[kind] if kind and sum(share.values()) >= half else ".")
    return "".join(letters)


def _units(profile: Profile, plan: MemoryPlan) -> Table:
    table = Table(title="plan", title_justify="left")
    table.add_column("unit")
    table.add_column("mode")
    for column in ("forward", "backward", "recompute", "input", "saved", "parameters"):
        table.add_column(column, justify="right")
    for unit, letter in zip(profile.units, plan.unit_modes, strict=True):
        table.add_row(
            unit.name,
            MODE_WORDS[letter],
            *(f"{s * 1000:.1f} ms" for s in (unit.forward_seconds, unit.backward_seconds, unit.recompute_seconds)),
            *(bytes_text(b) for b in (unit.input_bytes, unit.inner_bytes, unit.parameter_bytes)),
        )
    return table


def _techniques(profile: Profile, plan: MemoryPlan) -> RenderableType:
    table = Table(title="predicted", title_justify="left")
    for column in ("", "step", "times in-core", "peak"):
        table.add_column(column, justify="right" if column else "left")
    in_core = profile.compute_seconds
    rows = [("this plan", plan.seconds, plan.peak_bytes, 0)]
    rows += [(t.name, t.seconds, t.peak_bytes, t.shortfall_bytes) for t in plan.techniques]
    for name, seconds, peak, shortfall in rows:
        step = f"{seconds * 1000:.1f} ms" if not shortfall else f"lacks {bytes_text(shortfall)}"
        table.add_row(name, step, f"{seconds / in_core:.2f}" if not shortfall and in_core else "", bytes_text(peak))
    link = profile.link
    out, into = bytes_text(int(link.write_bytes_per_second)), bytes_text(int(link.read_bytes_per_second))
    lines = [
        f"budget {bytes_text(plan.budget_bytes)}, a tenth of it kept free; link {out}/s out, {into}/s in",
        *(["parameters and optimizer state are streamed over the link"] if plan.streamed else []),
        *([f"in {plan.micro_batches} micro-batches"] if plan.micro_batches > 1 else []),
        *plan.notes,
    ]
    return Group(Text("\n".join(lines)), table)


def bytes_text(count: int) -> str:
    """Format a number of bytes as KiB, MiB or GiB."""
    unit, name = next((u for u in UNITS if count >= u[0]), UNITS[-1])
    return f"{count / unit:.1f} {name}"
