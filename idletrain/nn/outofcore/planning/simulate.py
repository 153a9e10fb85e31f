"""What a plan costs: bytes and seconds of one step, event by event, on a compute lane and two link lanes. Pure.

Letters: one per unit, `K` keep, `S` swap, `R` recompute, `Q` recompute from a swapped input, `m` as one with the
recomputed unit before. The executor keeps to the same limits as the simulator, through `Footprint.room`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from idletrain.nn.outofcore.planning.profile import SwapLink, Unit

LOOKAHEAD = 2  # segments whose parameters are on their way forward while one computes; back it is one, and one leaving


class Segment(NamedTuple):
    """Units that are treated as one, and what that takes.

    `stored_bytes` come to be live in the forward pass, and are written if `swapped`; `read_bytes` must be back when
    its backward pass begins (the input may be another segment's to store), `freed_bytes` are dead after it.
    `forward_bytes` and `backward_bytes` are needed beside all that is live.
    """

    first: int
    last: int
    mode: str
    swapped: bool
    stored_bytes: int
    read_bytes: int
    freed_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    parameter_bytes: int
    state_bytes: int
    swapped_tensors: int


class Span(NamedTuple):
    """One bar of the timeline: `lane` is compute, write or read; `kind` forward, recompute, backward, swap, weights."""

    lane: str
    kind: str
    segment: int
    start: float
    end: float


@dataclass(slots=True)
class SimulatedStep:
    """What a step by a plan is predicted to be; `lacking_bytes` is by how much it exceeds the budget."""

    seconds: float
    peak_bytes: int
    shortfall_bytes: int
    compute_seconds: float
    written_bytes: int
    spans: list[Span] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, float]:
        """Smaller is better: first what fits, then what is quick."""
        return self.shortfall_bytes, self.seconds


class Footprint:
    """A plan's segments, and how much may be live at each of them.

    Args:
        units: The network's units.
        letters: The plan.
        budget_bytes: For all that a step takes.
        resident_bytes: Always there, parameters and optimizer state included unless `streamed`.
        streamed: Whether parameters and optimizer state are brought in a segment at a time.
        known: Segments of other plans for the same units, reused and added to.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        unit_modes: Sequence[str],
        budget_bytes: int,
        resident_bytes: int,
        streamed: bool,
        known: dict[object, Segment] | None = None,
    ) -> None:
        self.segments = _segments(units, unit_modes, streamed, {} if known is None else known)
        self.streamed = streamed
        self.resident_bytes = resident_bytes
        if streamed:
            largest = max(2 * s.parameter_bytes + s.state_bytes for s in self.segments)
            self.resident_bytes += (1 + LOOKAHEAD) * largest
        else:
            self.resident_bytes += sum(s.parameter_bytes + s.state_bytes for s in self.segments)
        self.budget_bytes = budget_bytes
        # What backward passes from the last segment down to one give back: saved tensors less parameters' gradients.
        given = 0
        self._given = [0] * (len(self.segments) + 1)
        for s in range(len(self.segments) - 1, -1, -1):
            self._given[s] = given
            segment = self.segments[s]
            given += segment.freed_bytes - (0 if streamed else segment.parameter_bytes)
        self._gradients = [0] * (len(self.segments) + 1)
        for s in range(len(self.segments) - 1, 0, -1):
            parameters = 0 if streamed else self.segments[s].parameter_bytes
            self._gradients[s - 1] = self._gradients[s] + parameters

    def forward_room(self, s: int) -> int:
        """How many bytes of saved tensors may be live when segment `s` begins its forward pass."""
        return self.budget_bytes - self.resident_bytes - self.segments[s].forward_bytes

    def gradients(self, at: int) -> int:
        """Bytes of parameters' gradients when segment `at`'s backward pass begins."""
        return self._gradients[at]

    def excess(self, live: int, here: Sequence[int]) -> int:
        """By how much the backward pass would exceed the budget if it began now and read what is away on demand.

        Args:
            live: Bytes of saved tensors in memory.
            here: Of each segment's freed bytes, those that are among them.
        """
        free, most = self.budget_bytes - self.resident_bytes, 0
        for s in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[s]
            most = max(most, live + segment.freed_bytes - here[s] + segment.backward_bytes - free)
            live += (0 if self.streamed else segment.parameter_bytes) - here[s]
        return most

    def room(self, at: int, s: int) -> int:
        """How many bytes of saved tensors and gradients may be live at segment `at`'s backward pass once what `s` needs
        is on its way: so few that every segment from there to `s` finds room.
        """
        free = self.budget_bytes - self.resident_bytes
        given = self._given
        return free - given[at] + min(given[j] - self.segments[j].backward_bytes for j in range(s, at + 1))


def simulate(footprint: Footprint, link: SwapLink, trace: bool = False) -> SimulatedStep:
    """Run one step, forward then backward, on paper."""
    return _Run(footprint, link, trace).step()


class _Run:
    """The state of a simulated step: the lanes' clocks and what is live."""

    def __init__(self, footprint: Footprint, link: SwapLink, trace: bool) -> None:
        self._footprint, self._segments = footprint, footprint.segments
        self._write_seconds, self._read_seconds = 1 / link.write_bytes_per_second, 1 / link.read_bytes_per_second
        self._handling_seconds = link.seconds_per_tensor / 2  # when it leaves, and when it comes back
        self._now = self._out = self._in = 0.0
        self._live = self._peak = self._incomplete = self._written = 0
        self._pending: deque[tuple[float, int, int]] = deque()  # (when written, segment, bytes)
        self._ready = [0.0] * len(self._segments)
        self._weights = [0.0] * len(self._segments)
        self._back = [0.0] * len(self._segments)  # when its parameters are written back
        self._spans: list[Span] | None = [] if trace else None

    def step(self) -> SimulatedStep:
        for s in range(len(self._segments)):
            self._forward(s)
        self._rewind()
        for s in range(len(self._segments) - 1, -1, -1):
            self._backward(s)
        compute = sum(s.forward_seconds + s.recompute_seconds + s.backward_seconds for s in self._segments)
        seconds = max(self._now, self._out) if self._footprint.streamed else self._now
        peak = self._peak + self._footprint.resident_bytes
        return SimulatedStep(seconds, peak, self._incomplete, compute, self._written, self._spans or [])

    def _forward(self, s: int) -> None:
        segment, room = self._segments[s], self._footprint.forward_room(s)
        if self._footprint.streamed and s + LOOKAHEAD < len(self._segments):
            # The first ones are still there from the step before.
            self._fetch(s + LOOKAHEAD, self._segments[s + LOOKAHEAD].parameter_bytes)
        if self._footprint.streamed:
            self._now = max(self._now, self._weights[s])
        self._drain(self._now)
        while self._pending and self._live > room:
            self._now = max(self._now, self._pending[0][0])
            self._drain(self._now)
        self._note(segment.forward_bytes)
        self._compute("forward", s, segment.forward_seconds + segment.swapped_tensors * self._handling_seconds)
        self._live += segment.stored_bytes
        if segment.swapped and segment.stored_bytes:
            start = max(self._out, self._now)
            self._out = start + segment.stored_bytes * self._write_seconds
            self._pending.append((self._out, s, segment.stored_bytes))
            self._written += segment.stored_bytes
            self._span("write", "swap", s, start, self._out)
        self._peak = max(self._peak, self._live)

    def _rewind(self) -> None:
        """Between the passes: find what has to come back."""
        self._drain(self._now)
        here = {s for _, s, _ in self._pending}  # not yet written: used as they are, if there is room
        held = [0 if s.swapped and i not in here else s.freed_bytes for i, s in enumerate(self._segments)]
        while self._pending and self._footprint.excess(self._live, held) > 0:
            self._now, s, _ = self._pending[0]
            held[s] = 0
            here.remove(s)
            self._drain(self._now)
        last = len(self._segments) - 1
        self._swapped_out = [
            s for s, segment in enumerate(self._segments) if segment.read_bytes and self._owner(s) not in here
        ]
        if self._footprint.streamed:
            self._fetch(last, self._segments[last].state_bytes)  # the values are still there

    def _owner(self, s: int) -> int:
        return s if self._segments[s].swapped and self._segments[s].stored_bytes else s - 1

    def _backward(self, s: int) -> None:
        segment = self._segments[s]
        self._prefetch(s)
        if self._swapped_out and self._swapped_out[-1] == s:  # no room for it before: whatever comes of it
            self._read(s)
        if self._footprint.streamed:
            if s:  # into the buffer of the segment that was written back before the last
                ahead = self._segments[s - 1]
                self._in = max(self._in, self._back[s + 2] if s + 2 < len(self._segments) else 0.0)
                self._fetch(s - 1, ahead.parameter_bytes + ahead.state_bytes)
            self._now = max(self._now, self._weights[s])
        self._now = max(self._now, self._ready[s])
        self._note(segment.backward_bytes)
        self._compute("recompute", s, segment.recompute_seconds)
        self._compute("backward", s, segment.backward_seconds + segment.swapped_tensors * self._handling_seconds)
        self._live -= segment.freed_bytes
        if self._footprint.streamed:
            start = max(self._out, self._now)
            size = segment.parameter_bytes + segment.state_bytes
            self._out = self._back[s] = start + size * self._write_seconds
            self._span("write", "weights", s, start, self._out)
        else:
            self._live += segment.parameter_bytes

    def _prefetch(self, at: int) -> None:
        while self._swapped_out:
            s = self._swapped_out[-1]
            if self._live + self._segments[s].read_bytes > self._footprint.room(at, s):
                return
            self._read(s)

    def _read(self, s: int) -> None:
        self._swapped_out.pop()
        size = self._segments[s].read_bytes
        start = max(self._in, self._now)
        self._in = self._ready[s] = start + size * self._read_seconds
        self._live += size
        self._span("read", "swap", s, start, self._in)

    def _fetch(self, s: int, size: int) -> None:
        """Bring a segment's parameters, or parameters and state, into a buffer."""
        start = max(self._in, self._now)
        self._in = self._weights[s] = start + size * self._read_seconds
        self._span("read", "weights", s, start, self._in)

    def _drain(self, now: float) -> None:
        while self._pending and self._pending[0][0] <= now:
            self._live -= self._pending.popleft()[2]

    def _note(self, needed: int) -> None:
        most = self._live + needed
        self._peak = max(self._peak, most)
        room = self._footprint.budget_bytes - self._footprint.resident_bytes
        self._incomplete = max(self._incomplete, most - room)

    def _compute(self, kind: str, s: int, seconds: float) -> None:
        self._span("compute", kind, s, self._now, self._now + seconds)
        self._now += seconds

    def _span(self, lane: str, kind: str, s: int, start: float, end: float) -> None:
        if self._spans is not None and end > start:
            self._spans.append(Span(lane, kind, s, start, end))


def _segments(
    units: Sequence[Unit], unit_modes: Sequence[str], streamed: bool, known: dict[object, Segment]
) -> list[Segment]:
    firsts = [i for i, letter in enumerate(unit_modes) if letter != "m"]
    ends = [*firsts[1:], len(unit_modes)]
    found: list[Segment] = []
    before, swapped = "", False
    for first, end in zip(firsts, ends, strict=True):
        mode = unit_modes[first]
        # The first to save a tensor stores it: a ReLU's output is also the next unit's input.
        stored = bool(before) and before in "KS" and units[first - 1].saves_output
        after = end < len(unit_modes) and (unit_modes[end] in "RQ" or units[end].saves_input)
        held = max(_held(units, unit_modes, unit) for unit in units[first:end])
        key = (first, end, mode, stored, stored and swapped, after, held)
        if key not in known:
            build = _kept if mode in "KS" else _recomputed
            segment = build(units, first, end - 1, mode, stored, stored and swapped, streamed, after)
            known[key] = segment._replace(forward_bytes=segment.forward_bytes + held)
        found.append(known[key])
        before, swapped = mode, mode in "SQ"
    return found


def _held(units: Sequence[Unit], unit_modes: Sequence[str], unit: Unit) -> int:
    """What the network holds while a unit runs, as far as it does not live as saved anyway."""
    return sum(
        h.size for h in unit.held if h.owner < 0 or unit_modes[h.owner] in "SQm" or not units[h.owner].saves_input
    )


def _kept(
    units: Sequence[Unit], first: int, last: int, mode: str, stored: bool, by_swap: bool, streamed: bool, after: bool
) -> Segment:
    unit = units[first]
    own_input = unit.input_bytes if unit.saves_input and not stored else 0
    size = own_input + unit.inner_bytes + (unit.output_bytes if unit.saves_output else 0)
    read = size if mode == "S" else 0
    if mode == "S" and unit.saves_output and after:
        read -= unit.output_bytes  # the next segment's backward pass brought it
    if by_swap and unit.saves_input:
        read += unit.input_bytes
    held = unit.input_bytes if not stored or by_swap else 0  # by the caller, while it runs
    gradient = unit.parameter_bytes if not streamed else 0
    return Segment(
        first,
        last,
        mode,
        mode == "S",
        size,
        read,
        size,
        held + unit.saving_bytes,
        unit.output_bytes + unit.backward_bytes + unit.waiting_bytes + gradient,
        unit.forward_seconds,
        0.0,
        unit.backward_seconds,
        unit.parameter_bytes,
        unit.state_bytes,
        unit.tensors - (stored and unit.saves_input) if mode == "S" else 0,
    )


def _recomputed(
    units: Sequence[Unit], first: int, last: int, mode: str, stored: bool, by_swap: bool, streamed: bool, _after: bool
) -> Segment:
    mine = units[first : last + 1]
    entering = mine[0].input_bytes
    size = 0 if stored else entering
    swapped = mode == "Q"
    read = entering if by_swap or (not stored and swapped) else 0
    held = most = gradients = 0
    saved = []
    for u, unit in enumerate(mine):
        again = unit.inner_bytes + (unit.output_bytes if unit.saves_output else 0)
        if u and unit.saves_input and not mine[u - 1].saves_output:
            again += unit.input_bytes
        most = max(most, held + (unit.input_bytes if u else 0) + unit.saving_bytes)
        saved.append(again)
        held += again
    most += mine[-1].output_bytes  # the gradient waits meanwhile
    for unit, again in zip(reversed(mine), reversed(saved), strict=True):
        gradients += 0 if streamed else unit.parameter_bytes
        most = max(most, held + unit.output_bytes + unit.backward_bytes + gradients)
        held -= again
    most += max(unit.waiting_bytes for unit in mine)
    between = max(unit.forward_bytes + (unit.input_bytes if u else 0) for u, unit in enumerate(mine))
    return Segment(
        first,
        last,
        mode,
        swapped,
        size,
        read,
        size,
        entering * (not stored or by_swap) + between,
        most,
        sum(unit.forward_seconds for unit in mine),
        sum(unit.recompute_seconds for unit in mine),
        sum(unit.backward_seconds for unit in mine),
        sum(unit.parameter_bytes for unit in mine),
        sum(unit.state_bytes for unit in mine),
        int(swapped and not stored),
    )
