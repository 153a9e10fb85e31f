"""Name an instance's parts, and record it with its owner in /run, so that others can clean up after a dead owner."""

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
    """A process, by its id and the time at which it started (clock ticks since boot), as ids are used again."""

    pid: int
    started: int

    @staticmethod
    def this() -> Owner:
        """Return the calling process."""
        return Owner(pid=os.getpid(), started=_started(os.getpid()) or 0)

    def alive(self) -> bool:
        return _started(self.pid) == self.started


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One testbed; the names of all its parts follow from its own."""

    name: str
    nodes: tuple[str, ...]
    owner: Owner | None  # None: stays until `down`
    queue: int | None  # bytes that wait before each direction of a link

    @staticmethod
    def of(name: str, nodes: int, owner: Owner | None, queue: int | None) -> Instance:
        """Return an instance of a head and `nodes` nodes.

        Raises:
            TestbedError: the name has other characters than small letters, digits and hyphens.
        """
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
            raise TestbedError(f"name {name!r}: use up to 31 small letters, digits and hyphens.")
        return Instance(name=name, nodes=(HEAD, *(f"n{i}" for i in range(nodes))), owner=owner, queue=queue)

    def namespace(self, node: str) -> str:
        """Return the name of the network namespace of a node or of the switch."""
        return f"idletrain-{self.name}-{node}"

    def namespace_path(self, node: str) -> Path:
        return NAMESPACES / self.namespace(node)

    def namespaces(self) -> list[str]:
        """Return the nodes, and the switch, whose namespaces exist."""
        return [node for node in (SWITCH, *self.nodes) if self.namespace_path(node).exists()]

    def address(self, node: str) -> str:
        """Return a node's IPv4 address, in a /24 that follows from the instance's name."""
        high, low = divmod(zlib.crc32(self.name.encode()) & 0xFFFF, 256)
        return f"10.{high}.{low}.{self.nodes.index(self.known(node)) + 1}"

    def known(self, node: str) -> str:
        """Return `node`, or raise TestbedError if the instance has none of that name."""
        if node not in self.nodes:
            raise TestbedError(
                f"{self.name} has no node {node!r}: name one of {self.nodes[0]}, n0 to {self.nodes[-1]}."
            )
        return node

    def record(self, *, first: bool = False) -> None:
        """Write the record atomically; with `first`, raise TestbedError if the name is taken."""
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
        """Remove the record, once nothing of the instance is left."""
        (RECORDS / f"{self.name}.json").unlink(missing_ok=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of all testbeds on this machine while the context lasts; it is not reentrant."""
    RECORDS.mkdir(mode=0o755, exist_ok=True)
    with (RECORDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def recorded() -> list[Instance]:
    """Return all instances on this machine, by name."""
    instances = []
    for path in sorted(RECORDS.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            fields = json.loads(path.read_text())
            owner = fields["owner"] and Owner(**fields["owner"])
            instances.append(Instance(**fields | {"nodes": tuple(fields["nodes"]), "owner": owner}))
    return instances


def chosen(name: str | None) -> Instance:
    """Return the instance called `name`, or the only one.

    Raises:
        TestbedError: there is none, or no name is given and there are several.
    """
    instances = recorded()
    names = ", ".join(instance.name for instance in instances) or "none"
    matching = [instance for instance in instances if name in {None, instance.name}]
    if len(matching) == 1:
        return matching[0]
    if name is not None or not instances:
        raise TestbedError(f"No instance {name or ''} is up ({names}): `idletrain-testbed up` creates one.")
    raise TestbedError(f"Several instances are up ({names}): choose one with --name.")


def _started(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])  # proc(5): the third field and the 22nd
