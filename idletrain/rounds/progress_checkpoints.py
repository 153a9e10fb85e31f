"""Marks at home: of every subnet the latest, and in lockstep older ones until all subnets have a newer one."""

from __future__ import annotations

from collections.abc import Collection

from idletrain.rounds.durable.run_directory import Payload


class ProgressCheckpoints:
    """The open round's marks.

    Args:
        together: How many subnets go back to one step together, 0 if each goes back for itself.
    """

    def __init__(self, together: int = 0) -> None:
        self._together = together
        self._held: dict[int, dict[int, Payload]] = {}

    def keep(self, subnet: int, steps: int, checkpoint: Payload) -> None:
        """Hold a mark, and drop those that nobody can need any more."""
        held = self._held.setdefault(subnet, {})
        held[steps] = checkpoint
        if not self._together:
            self._held[subnet] = {steps: checkpoint}
        elif len(self._held) == self._together:
            common = frozenset.intersection(*(frozenset(marks) for marks in self._held.values()))
            oldest = max(common, default=0)
            for k, marks in self._held.items():
                self._held[k] = {at: kept for at, kept in marks.items() if at >= oldest}

    def clear(self) -> None:
        """Drop all: the round is committed."""
        self._held = {}

    def forget_above(self, steps: int) -> None:
        """Drop all of more steps."""
        self._held = {k: {at: mark for at, mark in held.items() if at <= steps} for k, held in self._held.items()}

    def steps(self, subnet: int) -> Collection[int]:
        """Those that a subnet's marks hold."""
        return self._held.get(subnet, {}).keys()

    def latest(self, subnet: int) -> Payload:
        """The mark with most steps."""
        held = self._held[subnet]
        return held[max(held)]

    def at(self, subnet: int, steps: int) -> Payload | None:
        """The mark of so many steps, if it is held."""
        return self._held.get(subnet, {}).get(steps)
