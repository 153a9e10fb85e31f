"""Delays packets where the kernel has no netem: `python -m idletrain_testbed.delayer SECONDS NAMESPACE...`.

Each node's netfilter puts the packets that arrive over its link into queue 0 (NFQUEUE) and keeps them in the kernel.
This process receives each packet's number, waits, and accepts all packets up to a number: packets are never copied, and
one message releases many. It returns once it listens; a child continues until it is killed.
Messages: linux/netfilter/nfnetlink_queue.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from idletrain_testbed.delay import DelayQueue
from idletrain_testbed.processes import enter

NETLINK_NETFILTER = 12
NLM_F_REQUEST, NLM_F_ACK = 1, 4
NLMSG_ERROR = 2
PACKET, CONFIG, VERDICT_BATCH = 0x300, 0x302, 0x303  # NFNL_SUBSYS_QUEUE << 8 | NFQNL_MSG_*
CFG_CMD, CFG_PARAMS, CFG_QUEUE_MAXLEN, CFG_MASK, CFG_FLAGS = range(1, 6)
VERDICT_HDR = 2
CMD_BIND = 1
COPY_META = 1
FLAG_GSO = 1 << 2  # large segments wait whole
ACCEPT = 1
SO_RCVBUFFORCE = 33
MOST_WAITING = 1 << 17  # packets of a link: 1.5 s at 1 Gbit/s
MESSAGES_BYTES = 64 << 20  # of memory for the kernel's unread messages, at about 0.5 kB a packet
PACKET_ID = struct.Struct(">I")
PACKET_ID_OFFSET = 24  # nlmsghdr 16, nfgenmsg 4, the header of the first attribute 4
TYPE = struct.Struct("=H")
TYPE_OFFSET = 4


def attribute(kind: int, value: bytes) -> bytes:
    """Return a netlink attribute, padded to four bytes."""
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(kind: int, flags: int, attributes: bytes) -> bytes:
    """Return a netlink message to queue 0."""
    return struct.pack("=IHHIIBBH", 20 + len(attributes), kind, NLM_F_REQUEST | flags, 0, 0, 0, 0, 0) + attributes


def accept(last: int) -> bytes:
    """Return the message that accepts all packets up to number `last`."""
    return message(VERDICT_BATCH, 0, attribute(VERDICT_HDR, struct.pack(">II", ACCEPT, last)))


def listen(namespace: Path) -> socket.socket:
    """Open a socket that receives the numbers of the packets that wait in a namespace."""
    enter(namespace)
    listener = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, MESSAGES_BYTES)
    listener.bind((0, 0))
    settings = (
        attribute(CFG_CMD, struct.pack(">BBH", CMD_BIND, 0, 0)),
        attribute(CFG_PARAMS, struct.pack(">IB", 0, COPY_META))
        + attribute(CFG_QUEUE_MAXLEN, struct.pack(">I", MOST_WAITING))
        + attribute(CFG_MASK, struct.pack(">I", FLAG_GSO))
        + attribute(CFG_FLAGS, struct.pack(">I", FLAG_GSO)),
    )
    for setting in settings:
        listener.send(message(CONFIG, NLM_F_ACK, setting))
        (fault,) = struct.unpack_from("=i", listener.recv(4096), 16)
        if fault:
            raise OSError(-fault, os.strerror(-fault), str(namespace))
    listener.setblocking(False)
    return listener


def drain(listener: socket.socket, buffer: bytearray) -> int | None:
    """Read all messages; return the number of the last packet, or None if there is none."""
    last = None
    with contextlib.suppress(BlockingIOError):
        while True:
            try:
                listener.recv_into(buffer)
            except OSError as fault:
                if fault.errno != errno.ENOBUFS:  # the kernel dropped packets, as its messages were not read in time
                    raise
                continue
            if TYPE.unpack_from(buffer, TYPE_OFFSET)[0] == PACKET:
                (last,) = PACKET_ID.unpack_from(buffer, PACKET_ID_OFFSET)
    return last


def forward(links: Sequence[socket.socket], delay_seconds: float) -> None:
    """Delay every link's packets, forever."""
    queues = {link: DelayQueue(delay_seconds) for link in links}
    buffer = bytearray(4096)
    while True:
        nexts = [when for queue in queues.values() if (when := queue.next()) is not None]
        wait = max(min(nexts) - time.monotonic(), 0) if nexts else None
        readable, _, _ = select.select(links, (), (), wait)
        now = time.monotonic()
        for link in readable:
            if (last := drain(link, buffer)) is not None:
                queues[link].add(last, now)
        for link, queue in queues.items():
            if (due := queue.due(now)) is not None:
                link.send(accept(due))


def main(argv: Sequence[str]) -> None:
    """Listen, then continue in a child without a terminal."""
    delay_seconds, namespaces = float(argv[0]), [Path(path) for path in argv[1:]]
    with Path("/proc/self/ns/net").open("rb") as original:
        links = [listen(namespace) for namespace in namespaces]
        enter(Path(f"/proc/self/fd/{original.fileno()}"))  # where `processes.end` looks for it
    if os.fork():
        return
    os.setsid()
    with Path(os.devnull).open("r+b", buffering=0) as nothing:
        for standard in range(3):
            os.dup2(nothing.fileno(), standard)
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # a packet that is released late has too long a delay
    forward(links, delay_seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
