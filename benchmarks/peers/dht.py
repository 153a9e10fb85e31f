"""The first peer of hivemind's DHT, on the head; it only helps others find each other."""

from __future__ import annotations

import signal

import hivemind

from benchmarks.peers.node import read_spec, say


def main() -> None:
    """Serve until the bench ends us."""
    spec = read_spec()
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{spec.address}/tcp/{spec.port}"], start=True)
    say("serving", address=[str(address) for address in dht.get_visible_maddrs()])
    signal.pause()


if __name__ == "__main__":
    main()
