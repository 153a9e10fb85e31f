"""Check that `idletrain fabric` finds the links that the testbed shapes, and distinguishes equal from unequal ones.

Machines of the testbed (root only): a head with the scheduler, workers on nodes. What is measured between them is put
beside the settings of the testbed: rates, a delay, the same links twice, links a tenth slower.

    python -m benchmarks.fabric [--tiny] [--json FILE] [--nodes 2,4,8] [--links 10mbit,100mbit,1gbit]

Targets: rates within 5 %, an added delay within 10 %, no significant effect between two measurements of the same links,
90 and 100 Mbit/s distinguished, and the quick preset in a minute on eight nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from benchmarks.machines import START_SECONDS, Bed, Cast, Shaped, print_line
from benchmarks.report import Figure, at_least, at_most, parser, report
from benchmarks.time_to_accuracy import numbers, words
from benchmarks.where_time_goes import link_bytes
from idletrain.cluster import dask_scheduler, dask_settings
from idletrain.fabric.analysis import compare, statistics
from idletrain.fabric.analysis.samples import Fabric, from_json
from idletrain.fabric.measuring import presets
from idletrain.fabric.measuring.measure import measure_fabric

MEASURE_SECONDS = 400.0
RATE, DELAY, QUICK_SECONDS = 0.05, 0.10, 60.0
LINKS_ALONE = replace(presets.QUICK, sizes=(), models=(), name="links")  # what rates and delays are seen by
DELAY_SECONDS = 0.005  # one way


async def lead(host: str, nodes: int, preset: str, to: Path) -> None:
    """Run a head: serve the scheduler, and measure once all workers have joined."""
    dask_settings.apply()
    settings = LINKS_ALONE if preset == LINKS_ALONE.name else presets.PRESETS[preset]
    async with dask_scheduler.started(to.parent, host=host) as address:
        print_line({"kind": "serving", "address": address})
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            await client.wait_for_workers(nodes)
            measured = await measure_fabric(client, settings, _say)
    to.write_text(measured.as_json())
    print_line({"kind": "measured"})


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


@contextlib.contextmanager
def shaped(nodes: int, link: str, delay: str | None = None) -> Iterator[Bed]:
    """Yield machines with such links.

    Raises:
        RuntimeError: links cannot be shaped here; it says what is missing.
    """
    import idletrain_testbed

    if missing := idletrain_testbed.missing():
        raise RuntimeError(f"links cannot be shaped here: {'; '.join(missing)}")
    with idletrain_testbed.Testbed(nodes=nodes, link=link, delay=delay) as bed:
        yield Shaped(bed)


def measure_machines(nodes: int, link: str, preset: str, delay: str | None = None) -> Fabric:
    """Measure machines with such links."""
    with (
        tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder,
        shaped(nodes, link, delay) as bed,
        Cast(bed, Path(folder)) as cast,
    ):
        out = Path(folder) / "fabric.json"
        me = [sys.executable, "-m", "benchmarks.fabric"]
        cast.start("head", [*me, "head", bed.address("head"), str(nodes), preset, str(out)])
        try:
            (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
            for name in bed.names[1:]:
                cast.start(name, [sys.executable, "-m", "idletrain", "worker", serving["address"], "--name", name])
            cast.output.wait("measured", 1, MEASURE_SECONDS, lambda: cast.processes["head"].poll() is None)
        except RuntimeError:
            sys.stderr.write((Path(folder) / "stderr").read_text()[-5000:])
            raise
        return from_json(out.read_text(), str(out))


def rates(nodes: Sequence[int], links: Sequence[str]) -> Iterator[Figure]:
    """Yield the measured rate of each link over its set rate."""
    for link in links:
        for count in nodes:
            measured = measure_machines(count, link, LINKS_ALONE.name)
            each = [
                statistics.on_the_wire(measured, p) / link_bytes(link)
                for p in statistics.points_of_kind(measured, "one way")
            ]
            typical = (statistics.link_rate(measured) or 0.0) / link_bytes(link)
            yield at_most(f"{link}, {count} nodes: rate, off by", abs(typical - 1), "", RATE, each)


def delays(link: str) -> Iterator[Figure]:
    """Yield the measured delay over the delay added in both directions."""
    bare, late = (measure_machines(2, link, LINKS_ALONE.name, delay) for delay in (None, f"{DELAY_SECONDS * 1e3:g}ms"))
    added = (round_trip_seconds(late) or 0.0) - (round_trip_seconds(bare) or 0.0)
    yield at_most(f"{link}: an added delay, off by", abs(added / (2 * DELAY_SECONDS) - 1), "", DELAY)


def verdicts(nodes: int) -> Iterator[Figure]:
    """Yield whether equal clusters compare as equal and different ones do not."""
    first, again, slower = (measure_machines(nodes, link, "quick") for link in ("100mbit", "100mbit", "90mbit"))
    yield at_most(f"quick, {nodes} nodes", float(first.about["seconds"]), "s", QUICK_SECONDS)
    for name, other, wanted in (
        ("twice 100mbit", again, "No significant"),
        ("100 and 90mbit", slower, "The two differ"),
    ):
        verdict = compare.overall(compare.compare(first, other))
        sys.stderr.write(f"{name}: {verdict}\n")
        yield at_least(f"{name}, {nodes} nodes: the right conclusion", float(verdict.startswith(wanted)), "", 1)


def round_trip_seconds(fabric: Fabric) -> float | None:
    """Return the median over pairs of their median round trips, in seconds; None without any."""
    medians = [median(point.samples) for point in statistics.points_of_kind(fabric, "round trip")]
    return median(medians) if medians else None


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    command = parser(__doc__)
    command.add_argument("--nodes", type=numbers, default=[2, 4, 8])
    command.add_argument("--links", type=words, default=["10mbit", "100mbit", "1gbit"])
    options = command.parse_args(argv)
    if options.tiny:
        return report("fabric", options, list(rates([2], ["100mbit"])))
    figures = [*rates(options.nodes, options.links), *delays("100mbit"), *verdicts(max(options.nodes))]
    return report("fabric", options, figures)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, nodes, preset, to]:
            asyncio.run(lead(host, int(nodes), preset, Path(to)))
        case _:
            main()
