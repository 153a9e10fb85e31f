"""Keep why workers cannot be used, by the names that a person knows them by. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHOWN = 3
MOST_KEPT = 1000  # names, the latest: those of replaced workers may be new each time
ENDED_WHILE_JOINING = "it ended while it joined; its log says why"


@dataclass(frozen=True)
class Refusal:
    """Why a worker cannot be used, and how many times in a row it was refused for that."""

    reason: str
    times: int = 1


class Refusals:
    """The workers that a run could not use; one that comes back under another address is the same one."""

    def __init__(self) -> None:
        self._by_name: dict[str, Refusal] = {}

    def add(self, name: str, reason: str) -> int:
        """Keep why a worker was refused; return how many times in a row it was refused for that."""
        known = self._by_name.pop(name, None)
        times = known.times + 1 if known and known.reason == reason else 1
        self._by_name[name] = Refusal(reason, times)
        if len(self._by_name) > MOST_KEPT:
            del self._by_name[next(iter(self._by_name))]
        return times

    def lift(self, name: str) -> None:
        """Forget why a worker was refused, which can be used now."""
        self._by_name.pop(name, None)

    def reason_for(self, name: str) -> str | None:
        """Return why the last worker of that name was refused; None if it was not."""
        refusal = self._by_name.get(name)
        return refusal.reason if refusal else None

    def text(self) -> str:
        """Return who was refused and why, in one line; nothing if nobody was."""
        if not self._by_name:
            return ""
        shown = [
            f"{name}{f' ({refusal.times} times)' if refusal.times > 1 else ''}: {refusal.reason}"
            for name, refusal in list(self._by_name.items())[:MOST_SHOWN]
        ]
        more = len(self._by_name) - len(shown)
        return f"{len(self._by_name)} refused: " + "; ".join([*shown, *([f"and {more} more"] if more else [])])
