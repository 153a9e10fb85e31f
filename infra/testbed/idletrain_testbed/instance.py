"""An instance's names, and its record in /run: who owns it, so that others can clean up after a dead owner."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from idletrain_testbed.settings import TestbedError

RECORDS = Path("/run/idletrain-testbed")
NAMESPACES = Path("/run/netns")  # where `ip netns` keeps them
HEAD = "head"
SWITCH = "switch"  # the namespace of the bridge; no node is called so


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, told from later ones with its number by when it started (clock ticks since boot)."""

    pid: int
    started: int

    @staticmethod
    def this() -> Owner:
        """The process that asks."""
        return Owner(pid=os.getpid(), started=_started(os.getpid()) or 0)

    def alive(self) -> bool:
        return _started(self.pid) == self.started


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One testbed: all that is made of it bears names that follow from its own."""

    name: str
    nodes: tuple[str, ...]
    owner: Owner | None  # None: stays until `down`
    queue: int | None  # bytes that wait before each direction of a link

    @staticmethod
    def of(name: str, nodes: int, owner: Owner | None, queue: int | None) -> Instance:
        """A head and `nodes` nodes."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
            raise TestbedError(f"name {name!r}: use up to 31 small letters, digits and hyphens.")
        return Instance(name=name, nodes=(HEAD, *(f"n{i}" for i in range(nodes))), owner=owner, queue=queue)

    def namespace(self, node: str) -> str:
        """The network namespace of a node or of the switch."""
        return f"idletrain-{self.name}-{node}"

    def namespace_path(self, node: str) -> Path:
        return NAMESPACES / self.namespace(node)

    def namespaces(self) -> list[str]:
        """Those that are there, the switch's included."""
        return [node for node in (SWITCH, *self.nodes) if self.namespace_path(node).exists()]

    def address(self, node: str) -> str:
        """A node's IPv4 address, in a /24 that follows from the instance's name."""
        high, low = divmod(zlib.crc32(self.name.encode()) & 0xFFFF, 256)
        return f"10.{high}.{low}.{self.nodes.index(self.known(node)) + 1}"

    def known(self, node: str) -> str:
        """`node`, if it is one of this instance."""
        if node not in self.nodes:
            raise TestbedError(
                f"{self.name} has no node {node!r}: name one of {self.nodes[0]}, n0 to {self.nodes[-1]}."
            )
        return node

    def record(self, *, first: bool = False) -> None:
        """Write the record, whole or not at all; `first` refuses a name that is taken."""
        RECORDS.mkdir(mode=0o755, exist_ok=True)
        whole = RECORDS / f"{self.name}.{os.getpid()}.new"
        whole.write_text(json.dumps(dataclasses.asdict(self)))
        try:
            if first:
                os.link(whole, RECORDS / f"{self.name}.json")
            else:
                whole.replace(RECORDS / f"{self.name}.json")
        except FileExistsError:
            raise TestbedError(f"{self.name} is up already: choose another name, or take it down first.") from None
        finally:
            whole.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the record: nothing of the instance is left."""
        (RECORDS / f"{self.name}.json").unlink(missing_ok=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep other processes of testbeds out meanwhile; not to be entered twice."""
    RECORDS.mkdir(mode=0o755, exist_ok=True)
    with (RECORDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def recorded() -> list[Instance]:
    """All instances on this machine, by name."""
    found = []
    for path in sorted(RECORDS.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # taken down meanwhile
            fields = json.loads(path.read_text())
            owner = fields["owner"] and Owner(**fields["owner"])
            found.append(Instance(**fields | {"nodes": tuple(fields["nodes"]), "owner": owner}))
    return found


def chosen(name: str | None) -> Instance:
    """The instance called `name`, or the only one."""
    found = recorded()
    names = ", ".join(instance.name for instance in found) or "none"
    matching = [instance for instance in found if name in {None, instance.name}]
    if len(matching) == 1:
        return matching[0]
    if name is not None or not found:
        raise TestbedError(f"No instance {name or ''} is up ({names}): `idletrain-testbed up` makes one.")
    raise TestbedError(f"Several instances are up ({names}): choose one with --name.")


def _started(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])  # proc(5): the third field and the 22nd
