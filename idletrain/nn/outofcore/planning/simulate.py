"""Simulate one step by a plan, event by event, on a compute lane and two link lanes: its bytes and seconds. Pure.

Mode letters, one per unit: `K` keep, `S` swap, `R` recompute, `Q` recompute from a swapped input, `m` joined to the
recomputed unit before. The executor keeps to the same limits as the simulator, through `Footprint.room`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from idletrain.nn.outofcore.planning.profile import SwapLink, Unit
from idletrain.nn.outofcore.planning.segments import Segment, build_segments

LOOKAHEAD = 2  # segments whose parameters load while one computes forward; backward one loads and one is written


class Span(NamedTuple):
    """One bar of the timeline: `lane` is compute, write or read; `kind` forward, recompute, backward, swap, weights."""

    lane: str
    kind: str
    segment: int
    start: float
    end: float


@dataclass(slots=True)
class SimulatedStep:
    """A step as predicted; `shortfall_bytes` is by how much it exceeds the budget."""

    seconds: float
    peak_bytes: int
    shortfall_bytes: int
    compute_seconds: float
    spans: list[Span] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, float]:
        """Sort key, smaller is better: first the shortfall, then the seconds."""
        return self.shortfall_bytes, self.seconds


class Footprint:
    """A plan's segments, and the bytes that may be live at each of them.

    Args:
        units: The network's units.
        unit_modes: The plan, a mode letter for each unit.
        budget_bytes: Memory for a whole step.
        resident_bytes: Bytes that are always in memory, beside parameters and optimizer state.
        streamed: Whether parameters and optimizer state are loaded a segment at a time.
        known: Segments of other plans for the same units; reused and added to.
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
        self.segments = build_segments(units, unit_modes, streamed, {} if known is None else known)
        self.streamed = streamed
        self.resident_bytes = resident_bytes
        if streamed:
            largest = max(2 * s.parameter_bytes + s.state_bytes for s in self.segments)
            self.resident_bytes += (1 + LOOKAHEAD) * largest
        else:
            self.resident_bytes += sum(s.parameter_bytes + s.state_bytes for s in self.segments)
        self.budget_bytes = budget_bytes
        # Bytes freed by the backward passes behind each segment: saved tensors less parameters' gradients.
        freed = 0
        self._freed = [0] * (len(self.segments) + 1)
        for s in range(len(self.segments) - 1, -1, -1):
            self._freed[s] = freed
            segment = self.segments[s]
            freed += segment.freed_bytes - (0 if streamed else segment.parameter_bytes)
        self._gradients = [0] * (len(self.segments) + 1)
        for s in range(len(self.segments) - 1, 0, -1):
            parameters = 0 if streamed else self.segments[s].parameter_bytes
            self._gradients[s - 1] = self._gradients[s] + parameters

    def forward_room(self, s: int) -> int:
        """Return the bytes of saved tensors that may be live when segment `s` begins its forward pass."""
        return self.budget_bytes - self.resident_bytes - self.segments[s].forward_bytes

    def gradients(self, at: int) -> int:
        """Return the bytes of parameters' gradients when segment `at`'s backward pass begins."""
        return self._gradients[at]

    def excess(self, live: int, here: Sequence[int]) -> int:
        """Return the bytes by which the backward pass would exceed the budget if it began now and read on demand.

        Args:
            live: Bytes of saved tensors in memory.
            here: Each segment's part of these.
        """
        free, excess = self.budget_bytes - self.resident_bytes, 0
        for s in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[s]
            excess = max(excess, live + segment.freed_bytes - here[s] + segment.backward_bytes - free)
            live += (0 if self.streamed else segment.parameter_bytes) - here[s]
        return excess

    def room(self, at: int, s: int) -> int:
        """Return the bytes of saved tensors and gradients that may be live at segment `at`'s backward pass when segment
        `s`'s tensors are read ahead: few enough that every segment from `at` down to `s` has room.
        """
        free = self.budget_bytes - self.resident_bytes
        freed = self._freed
        return free - freed[at] + min(freed[j] - self.segments[j].backward_bytes for j in range(s, at + 1))


def simulate(footprint: Footprint, link: SwapLink, trace: bool = False) -> SimulatedStep:
    """Simulate one step, forward then backward; with `trace`, record its timeline."""
    return _Run(footprint, link, trace).step()


class _Run:
    """The state of a simulated step: the lanes' clocks and the live bytes."""

    def __init__(self, footprint: Footprint, link: SwapLink, trace: bool) -> None:
        self._footprint, self._segments = footprint, footprint.segments
        self._write_seconds, self._read_seconds = 1 / link.write_bytes_per_second, 1 / link.read_bytes_per_second
        self._handling_seconds = link.seconds_per_tensor / 2  # half when it is written, half when it is read back
        self._now = self._out = self._in = 0.0
        self._live = self._peak = self._shortfall = 0
        self._pending: deque[tuple[float, int, int]] = deque()  # (when written, segment, bytes)
        self._ready = [0.0] * len(self._segments)
        self._weights = [0.0] * len(self._segments)
        self._written_at = [0.0] * len(self._segments)  # when its parameters are written back
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
        return SimulatedStep(seconds, peak, self._shortfall, compute, self._spans or [])

    def _forward(self, s: int) -> None:
        segment, room = self._segments[s], self._footprint.forward_room(s)
        if self._footprint.streamed and s + LOOKAHEAD < len(self._segments):
            # The first segments' parameters are still in memory from the step before.
            self._fetch(s + LOOKAHEAD, self._segments[s + LOOKAHEAD].parameter_bytes)
        if self._footprint.streamed:
            self._now = max(self._now, self._weights[s])
        self._drain(self._now)
        while self._pending and self._live > room:
            self._now = max(self._now, self._pending[0][0])
            self._drain(self._now)
        self._need(segment.forward_bytes)
        self._compute("forward", s, segment.forward_seconds + segment.swapped_tensors * self._handling_seconds)
        self._live += segment.stored_bytes
        if segment.swapped and segment.stored_bytes:
            start = max(self._out, self._now)
            self._out = start + segment.stored_bytes * self._write_seconds
            self._pending.append((self._out, s, segment.stored_bytes))
            self._span("write", "swap", s, start, self._out)
        self._peak = max(self._peak, self._live)

    def _rewind(self) -> None:
        """Turn from forward to backward: find the segments whose tensors must be read back."""
        self._drain(self._now)
        here = {s for _, s, _ in self._pending}  # not yet written: used from memory if there is room
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
            self._fetch(last, self._segments[last].state_bytes)  # the values are still in memory

    def _owner(self, s: int) -> int:
        """Return the segment that stores what segment `s` reads."""
        return s if self._segments[s].swapped and self._segments[s].stored_bytes else s - 1

    def _backward(self, s: int) -> None:
        segment = self._segments[s]
        self._prefetch(s)
        if self._swapped_out and self._swapped_out[-1] == s:  # there was no room to read it ahead
            self._read(s)
        if self._footprint.streamed:
            if s:  # into the buffer of the segment written back before the last
                following = self._segments[s - 1]
                self._in = max(self._in, self._written_at[s + 2] if s + 2 < len(self._segments) else 0.0)
                self._fetch(s - 1, following.parameter_bytes + following.state_bytes)
            self._now = max(self._now, self._weights[s])
        self._now = max(self._now, self._ready[s])
        self._need(segment.backward_bytes)
        self._compute("recompute", s, segment.recompute_seconds)
        self._compute("backward", s, segment.backward_seconds + segment.swapped_tensors * self._handling_seconds)
        self._live -= segment.freed_bytes
        if self._footprint.streamed:
            start = max(self._out, self._now)
            size = segment.parameter_bytes + segment.state_bytes
            self._out = self._written_at[s] = start + size * self._write_seconds
            self._span("write", "weights", s, start, self._out)
        else:
            self._live += segment.parameter_bytes

    def _prefetch(self, at: int) -> None:
        """Begin to read back as many segments' tensors as there is room for."""
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
        """Load a segment's parameters, or parameters and state, into a buffer."""
        start = max(self._in, self._now)
        self._in = self._weights[s] = start + size * self._read_seconds
        self._span("read", "weights", s, start, self._in)

    def _drain(self, now: float) -> None:
        """Free the tensors that are written by now."""
        while self._pending and self._pending[0][0] <= now:
            self._live -= self._pending.popleft()[2]

    def _need(self, size: int) -> None:
        """Count `size` temporary bytes beside the live ones in peak and shortfall."""
        total = self._live + size
        self._peak = max(self._peak, total)
        room = self._footprint.budget_bytes - self._footprint.resident_bytes
        self._shortfall = max(self._shortfall, total - room)

    def _compute(self, kind: str, s: int, seconds: float) -> None:
        self._span("compute", kind, s, self._now, self._now + seconds)
        self._now += seconds

    def _span(self, lane: str, kind: str, s: int, start: float, end: float) -> None:
        if self._spans is not None and end > start:
            self._spans.append(Span(lane, kind, s, start, end))
