"""Show a run while it lasts: a live screen on a terminal, plain lines elsewhere, JSON on request.

A display reads a summary, which must get an event before the display does (use `folding`).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from idletrain.held_interrupts import notice_if_slow
from idletrain.observe import charts, status
from idletrain.observe.records import Record, Sink
from idletrain.observe.run_totals import Evaluation
from idletrain.observe.summary import Summary

BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 60  # fits 80 columns beside the curve's range
FRAMES_PER_SECOND = 4
TROUBLES = ("paused", "resumed", "waiting", "worker_refused", "worker_sick")  # must be seen even with JSON output
USELESS = (
    "a prediction that is the same for all samples is no worse: train longer, try another learning rate, or scale "
    "targets and inputs to about 0 and 1"
)
REFUSALS = {
    "not-finite": "it holds NaN or infinity",
    "corrupt": "it was damaged on its way",
    "wrong-shape": "it does not fit the subnet",
    "hung": "its worker had hung",
}
LATE_REPLIES = ("stale-epoch", "stale-round", "not-leased", "enough")  # to an update that is not needed any more
LINE_SECONDS = 10.0  # between plain progress lines when nothing else happens
WORKER_STATES = {True: "[yellow]draining", False: "[green]training"}


class LineDisplay:
    """Print plain log lines: evaluations, joining and leaving workers, and now and then the progress."""

    def __init__(self, out: TextIO, summary: Summary) -> None:
        self.summary = summary
        self._out, self._last = out, time.monotonic()
        self._silent = contextlib.ExitStack()  # until the first event

    def __call__(self, event: Record) -> None:
        self._silent.close()
        line = describe_event(event)
        if line is None and time.monotonic() - self._last > LINE_SECONDS and event["kind"] == "round_committed":
            line = _progress(self.summary)
        if line:
            self._last = time.monotonic()
            self._out.write(f"{event['s']:7.1f}s  {line}\n")
            self._out.flush()

    def __enter__(self) -> LineDisplay:
        self._silent.enter_context(notice_if_slow("starting the run"))
        return self

    def __exit__(self, *_error: object) -> None:
        self._silent.close()


class JsonDisplay:
    """Print one JSON object a round, and the summary at the end."""

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
    """Show a live screen, redrawn a few times a second."""

    def __init__(self, console: Console, summary: Summary) -> None:
        self.summary = summary
        self._console, self._recent = console, list[str]()
        self._waiting = Spinner("dots")
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=FRAMES_PER_SECOND)

    def __call__(self, event: Record) -> None:
        if link := event.get("dashboard"):  # above the frame, where a long line can be copied whole
            self._console.print(link, style="dim", soft_wrap=True, markup=False, highlight=False)
            event = {**event, "dashboard": ""}
        if line := describe_event(event):
            self._recent = [*self._recent[-4:], f"{event['s']:7.1f}s  {line}"]

    def __enter__(self) -> ScreenDisplay:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        summary = self.summary
        title = f"idletrain [bold]{summary.run}[/bold]"
        if summary.status == "starting":
            self._waiting.update(text=summary.note or "starting")
            return self._framed(self._waiting, title)
        body: list[RenderableType] = [
            Text(_progress(summary, separator="\n")),
            Text(_bar(summary.rounds / max(1, summary.total_rounds)), style="cyan"),
            Text(_spark(summary.curve)),
            _workers(summary),
            Text("\n".join(self._recent), style="dim"),
        ]
        if waits := status.waits_for(summary):
            body.append(Text(f"round {summary.rounds + 1} waits for {waits}", style="dim"))
        body.extend(Text(reason, style="yellow") for reason in summary.warnings)
        if summary.note:
            body.append(Text(summary.note, style="yellow"))
        return self._framed(Group(*body), title)

    def _framed(self, body: RenderableType, title: str) -> Panel:
        """Return a frame beside which a terminal's echo of Ctrl-C has room: in the next line, it would shift the next
        frame down.
        """
        return Panel(body, title=title, border_style="cyan", width=self._console.width - len("^C"))


def describe_event(event: Record) -> str | None:
    """Return an event as one line, or None if it is not worth one."""
    describe = _DESCRIPTIONS.get(event["kind"])
    return describe(event) if describe else None


def _describe_start(event: Record) -> str:
    resumed = f", from round {event['resumed_at']}" if event["resumed_at"] else ""
    notes = f"; watch it at {event['dashboard']}" if event["dashboard"] else ""
    notes += f" ({event['dashboard_note']})" if event.get("dashboard_note") else ""
    unlabelled = event.get("data", {}).get("without_labels", 0)
    notes += f"; {unlabelled} rows of the data have no labels" if unlabelled else ""
    several = event.get("phases", 1) > 1
    divided = f"in {event['phases']} phases" if several else f"of {_parts(event.get('method', ''), event['subnets'])}"
    return f"run {event['run']}: {event['rounds']} rounds {divided}{resumed}{notes}"


def _parts(method: str, count: int) -> str:
    """Format what a round trains: so many subnets, or whole networks."""
    return f"{count} {'whole network' if method == 'local-sgd' else 'subnet'}{'s' if count > 1 else ''}"


def _describe_left(event: Record) -> str | None:
    how = {"notice": "left after a notice", "kill": "was killed", "hang": "hung and was ended"}.get(event["cause"])
    return how and f"{event['name']} {how}"


def _describe_lost(event: Record) -> str | None:
    if event["cause"] != "lease":
        return None
    return f"subnet {event['subnet']} of round {event['round']}: {event['worker']} is silent, leased again"


def _describe_refused(event: Record) -> str | None:
    if event["reply"] in LATE_REPLIES:
        return None
    why = REFUSALS.get(event["reply"], event["reply"])
    return f"subnet {event['subnet']} of round {event['round']}: an update is refused: {why}"


def _describe_reason(event: Record) -> str:
    return f"{event['kind'].replace('_', ' ')}: {event['reason']}"


_DESCRIPTIONS: dict[str, Callable[[Record], str | None]] = {
    "run_started": _describe_start,
    "evaluated": lambda e: (
        f"round {e['round']}: {score_text(e['accuracy'], e['loss'], metrics=e.get('metrics'))}{_on(e.get('samples'))}"
    ),
    "phase_started": lambda e: (
        f"phase {e['phase']} begins with round {e['round']}: {e['subnets']} subnets"
        + (f", every neuron in {e['copies']}" if e["copies"] > 1 else "")
    ),
    "worker_joined": lambda e: f"{e['name']} joined ({e['device']}, {e['memory_bytes'] / 2**30:.1f} GiB)",
    "worker_left": _describe_left,
    "worker_refused": _describe_reason,
    "worker_sick": _describe_reason,
    "warning": _describe_reason,
    "paused": _describe_reason,
    "resumed": _describe_reason,
    "waiting": _describe_reason,
    "stopping": _describe_reason,
    "trial": lambda e: str(e["text"]),
    "run_ended": lambda e: f"{e['status']}: " + (e.get("reason") or f"{e['rounds']} rounds are done"),
    "instance_launched": lambda e: f"{e['instance']} launched ({e['market']} {e['type']} in {e['zone']})",
    "instance_ended": lambda e: f"{e['instance']} ended ({e['reason']})",
    "worker_at_risk": lambda e: f"{e['worker']} may be preempted soon: saving its progress, launching a spare",
    "lost": _describe_lost,
    "refused": _describe_refused,
}


def final_lines(summary: Summary, status_text: str, why_low: str = "") -> list[str]:
    """Return the lines to print at a run's end.

    Args:
        summary: The run's.
        status_text: The first line.
        why_low: Where the time went that trained nothing (see `time_use.why_low`).
    """
    useful = "-" if summary.goodput is None else f"{summary.goodput:.1%} of the workers' time"
    useful += f" ({why_low})" if why_low and summary.goodput is not None else ""
    epochs = "" if summary.epochs is None else f", {summary.epochs:.1f} epochs,"
    return [
        status_text,
        f"  {_last_score(summary)}",
        *([f"  {text}"] if (text := _trained_by(summary)) else []),
        *([f"  best {b['metric']} {b['value']:.4f} after {b['round']} rounds"] if (b := summary.best) else []),
        f"  {summary.local_steps} local steps{epochs} in {summary.seconds:.0f} s",
        *_trouble_lines(summary),
        f"  goodput {useful}",
        *([f"  each neuron had at least {least:.0%} of the mean's steps"] if (least := summary.least_trained) else []),
        f"  {summary.bytes_down / 1e6:.0f} MB pulled, {summary.bytes_up / 1e6:.0f} MB pushed",
        *([f"  params_sha256 {summary.params_sha256}"] if summary.params_sha256 else []),
        *(f"  warning: {reason}" for reason in summary.warnings),
        *([f"  warning: {USELESS}"] if _is_useless(summary) else []),
        f"  {summary.run_dir}",
    ]


def _trouble_lines(summary: Summary) -> list[str]:
    """Return the lines on workers that were lost or slow; none where there was nothing of that."""
    lines = []
    if summary.notices or summary.kills:
        lines.append(f"  preemptions: {summary.notices} with notice, {summary.kills} without")
    if summary.reissues or summary.backups:
        again = f"{summary.reissues} subnets were leased again to other workers"
        lines.append(f"  {again}, {summary.backups} slow ones a second time")
    if summary.salvaged_steps or summary.lost_steps:
        lines.append(f"  {summary.salvaged_steps} steps of preempted workers were kept, {summary.lost_steps} lost")
    return lines


def _trained_by(summary: Summary) -> str:
    """Format the method and the optimizer of a run's job; empty before its first event."""
    if not summary.method:
        return ""
    optimizer = summary.settings.get("job", {}).get("training", {}).get("optimizer", {})
    by = [f"trained by {summary.method}: {_parts(summary.method, summary.subnets)} a round"]
    by += [optimizer["name"]] if "name" in optimizer else []
    by += [f"learning rate {optimizer['lr']}"] if "lr" in optimizer else []
    return ", ".join(by)


def _is_useless(summary: Summary) -> bool:
    """Return whether the last evaluated network is no better than a constant prediction."""
    return summary.loss is not None and summary.constant_loss is not None and summary.loss >= summary.constant_loss


def score_text(
    accuracy: float | None,
    loss: float | None,
    calibration_error: float | None = None,
    temperature: float | None = None,
    constant_loss: float | None = None,
    metrics: Mapping[str, float | None] | None = None,
) -> str:
    """Format accuracy, test loss beside a constant prediction's, calibration error, best temperature, and the metrics.

    None values are left out, except of metrics, which are nan.
    """
    parts = [f"accuracy {accuracy:.4f}"] if accuracy is not None else []
    beside = "" if constant_loss is None else f" (a constant prediction's: {constant_loss:.4f})"
    parts += [f"loss {loss:.4f}{beside}"] if loss is not None else []
    parts += [f"calibration error {calibration_error:.4f}"] if calibration_error is not None else []
    parts += [f"best temperature {temperature:.2f}"] if temperature is not None else []
    parts += [f"{name} {'nan' if value is None else f'{value:.4f}'}" for name, value in (metrics or {}).items()]
    return ", ".join(parts) or "not evaluated"


def _on(samples: int | None) -> str:
    """Format the number of test samples of a score, where not all were used."""
    return "" if samples is None else f" on {samples} test samples"


def _last_score(summary: Summary) -> str:
    """Format the last evaluation, and the number of rounds done if there are more."""
    scores = summary.calibration_error, summary.temperature, summary.constant_loss, summary.metrics
    text = score_text(summary.accuracy, summary.loss, *scores)
    at = summary.rounds
    if summary.curve:
        text, at = text + _on(summary.curve[-1].samples), summary.curve[-1].round
    return f"{text} after {at} rounds" + (f" ({summary.rounds} are done)" if at != summary.rounds else "")


def choose_display(as_json: bool, console: Console, summary: Summary) -> LineDisplay | JsonDisplay | ScreenDisplay:
    """Return the display that suits the output: JSON, a terminal, or plain lines."""
    if as_json:
        return JsonDisplay(sys.stdout, summary)
    return ScreenDisplay(console, summary) if console.is_terminal else LineDisplay(sys.stdout, summary)


def folding(summary: Summary, *sinks: Sink) -> Sink:
    """Return a sink that adds an event to the summary and then passes it to the sinks."""

    def forward(event: Record) -> None:
        for sink in (summary.add, *sinks):
            sink(event)

    return forward


def _progress(summary: Summary, separator: str = "  ") -> str:
    goodput = "" if summary.goodput is None else f"  goodput {summary.goodput:.0%}"
    speed = ""
    if summary.round_seconds:
        left = (summary.total_rounds - summary.rounds) * summary.round_seconds
        rate = (summary.bytes_down + summary.bytes_up) / max(summary.seconds, 1e-9) / 1e6
        speed = f"  {summary.steps_per_second:.0f} steps/s ({summary.samples_per_second:,.0f} samples/s)"
        speed += f"  {rate:.1f} MB/s  ETA {charts.duration(left)}"
    alive = sum(worker.left is None for worker in summary.workers.values())
    score = f"  {score_text(summary.accuracy, summary.loss)}" if summary.curve else ""
    epochs = "" if summary.epochs is None else f" ({summary.epochs:.1f} epochs)"
    bill = status.cost_of(summary, time.time())
    usd = f"  ${bill['spent_usd']:.4f} so far, ${bill['usd_per_hour']:.4f}/h" if bill else ""
    workers = f"{alive} worker{'' if alive == 1 else 's'}"
    return f"round {summary.rounds}/{summary.total_rounds}{epochs}{score}{separator}{workers}{speed}{goodput}{usd}"


def _bar(share: float) -> str:
    return "━" * round(BAR_WIDTH * share) + "┄" * (BAR_WIDTH - round(BAR_WIDTH * share))


def _spark(curve: Sequence[Evaluation]) -> str:
    """Draw accuracy over evaluations, or the loss where there is none, as bars between its lowest and highest value."""
    accuracies = [point.accuracy for point in curve if point.accuracy is not None]
    losses = [point.loss for point in curve if point.loss is not None and math.isfinite(point.loss)]
    name, values = ("accuracy", accuracies) if accuracies else ("loss", losses)
    if not values:
        return "not evaluated yet"
    low, high = min(values), max(values)
    bars = "".join(bar_of(value, low, high) for value in values[-BAR_WIDTH:])
    return f"{name} {low:.3f} {bars} {high:.3f}"


def bar_of(value: float, low: float, high: float) -> str:
    """Return the bar of a value: the lowest one at `low`, the highest one at `high`."""
    return BARS[round((value - low) / max(high - low, 1e-9) * (len(BARS) - 1))]


def _workers(summary: Summary) -> Table:
    table, is_slow = Table.grid(padding=(0, 2)), status.slowness(summary)
    for worker in summary.workers.values():
        if worker.left is None:
            age = f"{summary.seconds - worker.joined:.0f} s"
            pace = "" if worker.pace is None else f"{worker.pace:.0f} steps/s"
            pace = f"[yellow]slow: {pace}" if is_slow(worker) else pace
            state, subnet = WORKER_STATES[worker.noticed], worker.subnet or "idle"
            table.add_row(worker.name, worker.device, age, state, subnet, pace)
    return table
