"""torchft's lighthouse, on the head."""

from __future__ import annotations

import signal

from torchft.coordination import LighthouseServer

from benchmarks.peers.node import read_spec, say

JOIN_MILLISECONDS = 1000


def main() -> None:
    """Serve until the bench ends us."""
    spec = read_spec()
    server = LighthouseServer(
        bind=f"{spec.address}:{spec.port}",
        min_replicas=spec.settings.get("min_nodes", spec.nodes),
        join_timeout_ms=JOIN_MILLISECONDS,
    )
    say("serving", address=server.address())
    signal.pause()


if __name__ == "__main__":
    main()
