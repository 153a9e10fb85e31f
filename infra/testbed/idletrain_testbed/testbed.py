"""A testbed as a context manager: it exists until the block ends, or its process."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from idletrain_testbed import lifecycle, network, processes
from idletrain_testbed.network import Counters
from idletrain_testbed.settings import parse_settings, rate


class Testbed:
    """A head and `nodes` nodes, each with a link of its own to one switch.

    Args:
        nodes: `n0`, `n1`, ...; the `head` comes on top.
        link: each link's rate on the wire, in each direction (`100mbit`); None leaves links as fast as the machine.
        head_link: the head's; `link` otherwise.
        cpus: of the machine's CPUs, what each node may use.
        memory: what each node may use (`1GiB`); a node that takes more is killed by the kernel.
        delay: from any node to any other, one way (`2ms`).
        loss: share of the packets that are lost from any node to any other (`1%`).
        queue: the most bytes that wait for a link in each direction (`64KiB`); further packets are lost. By
            default 50 ms of traffic.
        congestion: TCP's congestion control.
        name: the instance's, for the command line; a free one by default.

    Raises:
        TestbedError: a setting is wrong, or something is missing on this machine (`missing()` returns what).
    """

    __test__ = False  # not one of pytest's

    def __init__(  # noqa: PLR0913 - each an option of the command line too
        self,
        nodes: int = 8,
        *,
        link: str | None = None,
        head_link: str | None = None,
        cpus: float | None = None,
        memory: str | None = None,
        delay: str | None = None,
        loss: str | None = None,
        queue: str | None = None,
        congestion: str = "cubic",
        name: str | None = None,
    ) -> None:
        settings = parse_settings(
            nodes=nodes,
            link=link,
            head_link=head_link,
            cpus=cpus,
            memory=memory,
            delay=delay,
            loss=loss,
            queue=queue,
            congestion=congestion,
        )
        self._started: list[subprocess.Popen[Any]] = []
        self._owner = os.getpid()
        # SIGTERM raises SystemExit in the owner, so that the testbed is removed, unless the program handles it itself.
        self._handles_sigterm = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            and signal.signal(signal.SIGTERM, lifecycle.leave) is signal.SIG_DFL
        )
        self._open = True
        try:
            self.instance = lifecycle.up(settings, name)
        except BaseException:
            self._restore()
            raise
        atexit.register(self.close)

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def names(self) -> tuple[str, ...]:
        """Return the nodes' names, the head's first."""
        return self.instance.nodes

    def address(self, node: str) -> str:
        """Return a node's IPv4 address, which only the other nodes of this instance can reach."""
        return self.instance.address(node)

    def popen(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a node; `options` are those of `subprocess.Popen` (not `shell`, not `executable`).

        The process that is returned is the command's own; it is killed when the testbed closes. A command that cannot
        be started exits with 127.
        """
        self._started = [process for process in self._started if process.poll() is None]
        before = processes.into(self.instance, self.instance.known(node))
        process: subprocess.Popen[Any] = subprocess.Popen([*before, *argv], **options)
        self._started.append(process)
        return process

    def link(self, node: str, to: str) -> None:
        """Change the rate of a node's link, such as `10mbit`."""
        network.shape(self.instance, node, rate(to))

    def cut(self, node: str) -> None:
        """Drop all packets of a node's link; its device stays up."""
        network.cut(self.instance, node)

    def heal(self, node: str) -> None:
        """Undo `cut`."""
        network.heal(self.instance, node)

    def counters(self, node: str) -> Counters:
        """Return the bytes that a node's link has carried since it was created."""
        return network.counters(self.instance, node)

    def delivered(self) -> int:
        """Return the bytes that all shaped links together have delivered to their nodes."""
        return network.delivered(self.instance)

    def close(self) -> None:
        """End all processes on the nodes and remove everything; do nothing if that is done."""
        if not self._open or os.getpid() != self._owner:  # a fork of the owner owns nothing
            return
        for process in self._started:  # also one that has not entered its node yet
            process.kill()
        lifecycle.down(self.instance)
        for process in self._started:
            process.wait()
        atexit.unregister(self.close)
        self._restore()

    def _restore(self) -> None:
        self._open = False
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) is lifecycle.leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
