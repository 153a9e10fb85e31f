"""Progress checkpoints in the head's memory: each subnet's latest, in lockstep also those that all have."""

from __future__ import annotations

from collections.abc import Collection

from idletrain.rounds.durable.run_directory import Payload


class ProgressCheckpoints:
    """The open round's progress checkpoints.

    Args:
        together: Number of subnets that roll back to one step together, 0 if each rolls back for itself.
    """

    def __init__(self, together: int = 0) -> None:
        self._together = together
        self._held: dict[int, dict[int, Payload]] = {}

    def keep(self, subnet: int, steps: int, checkpoint: Payload) -> None:
        """Hold a checkpoint, and drop those that no attempt can need any more."""
        held = self._held.setdefault(subnet, {})
        held[steps] = checkpoint
        if not self._together:
            self._held[subnet] = {steps: checkpoint}
        elif len(self._held) == self._together:
            common = frozenset.intersection(*(frozenset(checkpoints) for checkpoints in self._held.values()))
            oldest = max(common, default=0)
            for k, checkpoints in self._held.items():
                self._held[k] = {at: saved for at, saved in checkpoints.items() if at >= oldest}

    def open_round(self, together: int = 0) -> None:
        """Drop all, as the round is committed.

        Args:
            together: The next round's number of subnets that roll back to one step together.
        """
        self._held, self._together = {}, together

    def forget(self, subnet: int) -> None:
        """Drop a subnet's: it is committed, and another has its number."""
        self._held.pop(subnet, None)

    def forget_above(self, steps: int) -> None:
        """Drop the checkpoints of more steps."""
        self._held = {k: {at: saved for at, saved in held.items() if at <= steps} for k, held in self._held.items()}

    def steps(self, subnet: int) -> Collection[int]:
        """Return the steps of a subnet's checkpoints."""
        return self._held.get(subnet, {}).keys()

    def latest(self, subnet: int) -> Payload:
        """Return the checkpoint with most steps."""
        held = self._held[subnet]
        return held[max(held)]

    def at(self, subnet: int, steps: int) -> Payload | None:
        """Return the checkpoint of so many steps, or None."""
        return self._held.get(subnet, {}).get(steps)
