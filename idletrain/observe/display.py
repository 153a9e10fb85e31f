"""The run as a person sees it while it goes on: a live screen on a terminal, plain lines elsewhere, JSON on demand.

A display draws from a summary, which must take an event before the display does (`folding` sees to that).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from idletrain.observe.records import Record, Sink
from idletrain.observe.summary import Summary

BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 60  # fits 80 columns beside the curve's range
FRAMES_PER_SECOND = 4
TROUBLES = ("paused", "resumed", "waiting", "worker_refused")  # what a person must hear of, whatever is shown
LINE_SECONDS = 10.0  # between plain lines when nothing else happens
WORKER_STATES = {True: "[yellow]draining", False: "[green]training"}


class LineDisplay:
    """Plain log lines: evaluations, workers coming and going, and a sign of life."""

    def __init__(self, out: TextIO, summary: Summary) -> None:
        self.summary = summary
        self._out, self._last = out, time.monotonic()

    def __call__(self, event: Record) -> None:
        line = describe_event(event)
        if line is None and time.monotonic() - self._last > LINE_SECONDS and event["kind"] == "round_committed":
            line = _progress(self.summary)
        if line:
            self._last = time.monotonic()
            self._out.write(f"{event['s']:7.1f}s  {line}\n")
            self._out.flush()

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class JsonDisplay:
    """One JSON object a round, and the summary as the last."""

    def __init__(self, out: TextIO, summary: Summary) -> None:
        self.summary = summary
        self._out = out

    def __call__(self, event: Record) -> None:
        if event["kind"] == "round_committed":
            self._print(self.summary.round_record(event))
        elif event["kind"] == "run_ended":
            self._print(self.summary.as_record())
        elif event["kind"] in TROUBLES:
            sys.stderr.write(f"idletrain: {describe_event(event)}\n")

    def _print(self, record: dict[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()

    def __enter__(self) -> JsonDisplay:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class ScreenDisplay:
    """A live screen, redrawn a few times a second while the head has time for it."""

    def __init__(self, console: Console, summary: Summary) -> None:
        self.summary = summary
        self._recent: list[str] = []
        self._waiting = Spinner("dots")
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=FRAMES_PER_SECOND)

    def __call__(self, event: Record) -> None:
        if line := describe_event(event):
            self._recent = [*self._recent[-4:], f"{event['s']:7.1f}s  {line}"]

    def __enter__(self) -> ScreenDisplay:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        summary = self.summary
        title = f"idletrain [bold]{summary.run}[/bold]  [dim]{summary.dashboard}"
        if summary.status == "starting":
            self._waiting.update(text=summary.note or "starting")
            return Panel(self._waiting, title=title, border_style="cyan")
        body: list[RenderableType] = [
            Text(_progress(summary, separator="\n")),
            Text(_bar(summary.rounds / max(1, summary.total_rounds)), style="cyan"),
            Text(_spark([point.accuracy for point in summary.curve if point.accuracy is not None])),
            _workers(summary),
            Text("\n".join(self._recent), style="dim"),
        ]
        body.extend(Text(reason, style="yellow") for reason in summary.warnings)
        if summary.note:
            body.append(Text(summary.note, style="yellow"))
        return Panel(Group(*body), title=title, border_style="cyan")


def describe_event(event: Record) -> str | None:
    """An event in one line, or None where it is not news."""
    teller = _DESCRIPTIONS.get(event["kind"])
    return teller(event) if teller else None


def _tell_start(event: Record) -> str:
    resumed = f", from round {event['resumed_at']}" if event["resumed_at"] else ""
    seen = f"; watch it at {event['dashboard']}" if event["dashboard"] else ""
    seen += f" ({event['dashboard_note']})" if event.get("dashboard_note") else ""
    odd = event.get("data", {}).get("without_labels", 0)
    seen += f"; {odd} rows of the data are without labels" if odd else ""
    return f"run {event['run']}: {event['rounds']} rounds of {event['subnets']} subnets{resumed}{seen}"


def _tell_left(event: Record) -> str | None:
    how = {"notice": "left after a notice", "kill": "was killed"}.get(event["cause"])
    return how and f"{event['name']} {how}"


def _tell_lost(event: Record) -> str | None:
    if event["cause"] != "lease":
        return None
    return f"subnet {event['subnet']} of round {event['round']}: no sign of {event['worker']}, leased again"


def _tell_reason(event: Record) -> str:
    return f"{event['kind'].replace('_', ' ')}: {event['reason']}"


_DESCRIPTIONS: dict[str, Callable[[Record], str | None]] = {
    "run_started": _tell_start,
    "evaluated": lambda e: f"round {e['round']}: {score_text(e['accuracy'], e['loss'])}",
    "worker_joined": lambda e: f"{e['name']} joined ({e['device']}, {e['memory_bytes'] / 2**30:.1f} GiB)",
    "worker_left": _tell_left,
    "worker_refused": _tell_reason,
    "warning": _tell_reason,
    "paused": _tell_reason,
    "resumed": _tell_reason,
    "waiting": _tell_reason,
    "stopping": _tell_reason,
    "instance_launched": lambda e: f"{e['instance']} launched ({e['market']} {e['type']} in {e['zone']})",
    "instance_ended": lambda e: f"{e['instance']} ended ({e['reason']})",
    "worker_at_risk": lambda e: f"{e['worker']} is at risk: its state goes home, a spare comes",
    "lost": _tell_lost,
    "refused": lambda e: f"subnet {e['subnet']} of round {e['round']}: a push was refused ({e['reply']})",
}


def final_lines(summary: Summary, status_text: str) -> list[str]:
    """What is printed at the end."""
    goodput = "-" if summary.goodput is None else f"{summary.goodput:.1%}"
    return [
        status_text,
        f"  {_last_score(summary)}",
        f"  {summary.local_steps} local steps in {summary.seconds:.0f} s",
        f"  preemptions: {summary.notices} with notice, {summary.kills} without",
        f"  {summary.reissues} subnets went on elsewhere",
        f"  goodput {goodput}; {summary.salvaged_steps} steps of preempted workers kept, {summary.lost_steps} lost",
        f"  {summary.bytes_down / 1e6:.0f} MB down, {summary.bytes_up / 1e6:.0f} MB up",
        *([f"  params_sha256 {summary.params_sha256}"] if summary.params_sha256 else []),
        *(f"  warning: {reason}" for reason in summary.warnings),
        f"  {summary.run_dir}",
    ]


def score_text(
    accuracy: float | None, loss: float | None, calibration_error: float | None = None, temperature: float | None = None
) -> str:
    """Accuracy, test loss, expected calibration error and best temperature, as far as there are any."""
    parts = [f"accuracy {accuracy:.4f}"] if accuracy is not None else []
    parts += [f"loss {loss:.4f}"] if loss is not None else []
    parts += [f"calibration error {calibration_error:.4f}"] if calibration_error is not None else []
    parts += [f"best temperature {temperature:.2f}"] if temperature is not None else []
    return ", ".join(parts) or "not evaluated"


def _last_score(summary: Summary) -> str:
    """The last evaluation and the rounds done, which may be more."""
    text = score_text(summary.accuracy, summary.loss, summary.calibration_error, summary.temperature)
    at = summary.curve[-1][0] if summary.curve else summary.rounds
    return f"{text} after {at} rounds" + (f" ({summary.rounds} are done)" if at != summary.rounds else "")


def choose_display(as_json: bool, console: Console, summary: Summary) -> LineDisplay | JsonDisplay | ScreenDisplay:
    """The display that fits where output goes."""
    if as_json:
        return JsonDisplay(sys.stdout, summary)
    return ScreenDisplay(console, summary) if console.is_terminal else LineDisplay(sys.stdout, summary)


def folding(summary: Summary, *sinks: Sink) -> Sink:
    """A sink that sums up before it hands on."""

    def take(event: Record) -> None:
        for sink in (summary.add, *sinks):
            sink(event)

    return take


def _progress(summary: Summary, separator: str = "  ") -> str:
    goodput = "" if summary.goodput is None else f"  goodput {summary.goodput:.0%}"
    speed = ""
    if summary.round_seconds:
        left = (summary.total_rounds - summary.rounds) * summary.round_seconds
        rate = (summary.bytes_down + summary.bytes_up) / max(summary.seconds, 1e-9) / 1e6
        speed = f"  {summary.steps_per_second:.0f} steps/s  {rate:.1f} MB/s  ETA {left:.0f} s"
    alive = sum(worker.left is None for worker in summary.workers.values())
    score = f"  {score_text(summary.accuracy, summary.loss)}" if summary.curve else ""
    return f"round {summary.rounds}/{summary.total_rounds}{score}{separator}{alive} workers{speed}{goodput}"


def _bar(share: float) -> str:
    return "━" * round(BAR_WIDTH * share) + "┄" * (BAR_WIDTH - round(BAR_WIDTH * share))


def _spark(values: Sequence[float]) -> str:
    """Accuracy over evaluations as a row of bars, its range beside it."""
    if not values:
        return "accuracy: -"
    low, high = min(values), max(values)
    span = max(high - low, 1e-9)
    shown = values[-BAR_WIDTH:]
    bars = "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)
    return f"accuracy {low:.3f} {bars} {high:.3f}"


def _workers(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    for worker in summary.workers.values():
        if worker.left is None:
            age = f"{summary.seconds - worker.joined:.0f} s"
            table.add_row(worker.name, worker.device, age, WORKER_STATES[worker.noticed], worker.subnet or "idle")
    return table
