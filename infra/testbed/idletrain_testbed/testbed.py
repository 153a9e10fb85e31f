"""A testbed as a context manager: it lives as long as the block, or as its process at most."""

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
from idletrain_testbed.settings import rate, settings


class Testbed:
    """A head and `nodes` nodes, each with a link of its own to one switch.

    Args:
        nodes: `n0`, `n1`, ...; the `head` comes on top.
        link: each link's rate on the wire, both ways (`100mbit`); None leaves links as fast as the machine.
        head_link: the head's; `link` otherwise.
        cpus: of the machine's CPUs, what each node may use.
        memory: what each node may use (`1GiB`); a node that takes more is killed by the kernel.
        delay: from any node to any other, one way (`2ms`).
        loss: share of the packets that get lost from any node to any other (`1%`).
        queue: what may wait before a link, each way (`64KiB`); what comes then is lost. By default 50 ms.
        congestion: TCP's congestion control.
        name: the instance's, for the command line; a free one by default.

    Raises:
        TestbedError: something asked for is wrong, or missing here (`missing()` tells which).
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
        asked = settings(
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
        # SIGTERM unwinds the owner, and so cleans up, where nobody has decided otherwise.
        self._handles_sigterm = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            and signal.signal(signal.SIGTERM, lifecycle.leave) is signal.SIG_DFL
        )
        self._open = True
        try:
            self.instance = lifecycle.up(asked, name)
        except BaseException:
            self._restore()
            raise
        atexit.register(self.close)

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names, the head's first."""
        return self.instance.nodes

    def address(self, node: str) -> str:
        """A node's IPv4 address; the other nodes of this instance reach it, nobody else."""
        return self.instance.address(node)

    def popen(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a node; `options` are those of `subprocess.Popen` (not `shell`, not `executable`).

        It has the number that is returned, gets the signals that are sent to it, and is killed when the testbed closes.
        A command that cannot be started exits with 127.
        """
        self._started = [process for process in self._started if process.poll() is None]
        before = processes.into(self.instance, self.instance.known(node))
        process: subprocess.Popen[Any] = subprocess.Popen([*before, *argv], **options)
        self._started.append(process)
        return process

    def link(self, node: str, to: str) -> None:
        """Give a node's link another rate, such as `10mbit`."""
        network.shape(self.instance, node, rate(to))

    def cut(self, node: str) -> None:
        """Let nothing through a node's link; nobody is told."""
        network.cut(self.instance, node)

    def heal(self, node: str) -> None:
        """Undo `cut`."""
        network.heal(self.instance, node)

    def counters(self, node: str) -> Counters:
        """What a node's link has carried since it was made, in bytes."""
        return network.counters(self.instance, node)

    def delivered(self) -> int:
        """What all shaped links together have brought to their nodes, in bytes."""
        return network.delivered(self.instance)

    def close(self) -> None:
        """End all processes on the nodes and remove everything; harmless if done before."""
        if not self._open or os.getpid() != self._owner:  # a fork of the owner owns nothing
            return
        for process in self._started:  # also one that is still on its way into its node
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
