"""Real machines' ends of a link that lets nothing through between two of them, and all else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from idletrain_testbed import Testbed, missing

from benchmarks.fabric import LINKS_ALONE
from benchmarks.machines import Cast, Shaped
from idletrain.fabric.analysis import statistics
from idletrain.fabric.analysis.samples import Fabric, from_json

MISSING = missing()
PATIENCE_SECONDS = 120.0


def look(bed: Testbed, folder: Path) -> Fabric:
    """What `fabric` finds of links between a testbed's nodes."""
    out = folder / "fabric.json"
    with Cast(Shaped(bed), folder) as cast:
        nodes = [name for name in bed.names if name != "head"]
        arguments = [bed.address("head"), str(len(nodes)), LINKS_ALONE.name, str(out)]
        cast.start("head", [sys.executable, "-m", "benchmarks.fabric", "head", *arguments])
        (serving,) = cast.output.wait("serving", 1, PATIENCE_SECONDS, cast.all_alive)
        for name in nodes:
            cast.start(name, [sys.executable, "-m", "idletrain", "worker", serving["address"], "--name", name])
        cast.output.wait("measured", 1, PATIENCE_SECONDS, cast.all_alive)
    return from_json(out.read_text(), str(out))


@pytest.mark.skipif(bool(MISSING), reason=" ".join(MISSING))
def test_two_of_three_machines_whose_packets_are_dropped_are_named_and_the_third_is_measured(tmp_path: Path) -> None:
    with Testbed(3) as bed:
        dropping = ["ip", "route", "add", "blackhole", f"{bed.address('n0')}/32"]
        assert bed.popen("n1", dropping).wait() == 0
        for node, way in (("n1", False), ("n2", True)):
            arguments = bed.popen(node, ["ip", "route", "get", bed.address("n0")], stdout=subprocess.DEVNULL)
            assert (arguments.wait() == 0) == way
        connections = look(bed, tmp_path)
    blamed = [fault for fault in connections.faults if "cannot reach" in fault]
    assert [fault.split(" at ")[0] for fault in blamed] == ["n0 cannot reach n1", "n1 cannot reach n0"]
    assert all(fault.endswith("; let TCP through between them, all ports") for fault in blamed)
    measured = {(point.source, point.target) for point in statistics.points_of_kind(connections, "one way")}
    assert measured == {(0, 2), (2, 0), (1, 2), (2, 1)}
