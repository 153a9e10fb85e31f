"""Give idletrain at least 60 modules that nobody here wrote, each in a process of its own with a limit of time.

    python -m benchmarks.modules [--train] [--only PACKAGE ...] [--resume FILE] [--json FILE]

Of each: is it accepted as its package builds it, how long is it prepared (in seconds of one core, so that other work on
the machine does not count), by which method is it trained, and what share of its parameters can be split. With
`--train`, those are trained beside plain torch and local SGD, with as many passes over generated data (12), and their
losses on held-out data are compared; `ist` is trained once more for as long as local SGD takes, in seconds of one core
for all subnets. `--resume` goes on from a result: a module that is in it is not tried again.

The packages are installed into an environment of their own, which downloads about 1 GB; no weights are downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import MODULES
from benchmarks.modules.case import Case
from benchmarks.modules.catalogue import CASES
from benchmarks.modules.settings import ROUNDS
from benchmarks.report import Figure, at_least, at_most, parser, report

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = {"accept": 120, "train": 900, "longer": 900}
LEAST_ACCEPTED, LEAST_TRIED = 55, 60
PREPARE_SECONDS = 10.0
TINY = ("mlp-mixer-pytorch", "torch-geometric")
WORSE = 1.02  # of local SGD's held-out loss, up to which a loss is as good


def tried(case: Case, stage: str, rounds: int | None = None) -> dict[str, Any]:
    """Return the result of one stage of one module: `longer` trains it by ist for so many rounds."""
    command = [str(MODULES.python()), "-m", "benchmarks.modules.trial", case.package, case.name, stage]
    command += [] if rounds is None else [str(rounds)]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS[stage],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"hangs": True}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"traceback": f"exit code {done.returncode}: {done.stderr[-1000:]}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def figures_of(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the figures with their targets."""
    counted = [row for row in rows if "left_out" not in row["accept"]]
    accepted = [row for row in counted if row["accept"].get("accepted")]
    seconds = [row["accept"]["seconds"] for row in accepted]
    figures = [
        at_least("modules tried", len(counted), "", LEAST_TRIED),
        at_least("accepted as they are, of 60", 60 * len(accepted) / max(1, len(counted)), "", LEAST_ACCEPTED),
        at_most("ends in a traceback", sum("traceback" in row["accept"] for row in counted), "", 0),
        at_most("does not end", sum("hangs" in row["accept"] for row in counted), "", 0),
        Figure("trained by ist", sum(row["accept"]["method"] == "ist" for row in accepted), ""),
        at_most("longest prepared", max(seconds, default=0.0), "s", PREPARE_SECONDS, seconds),
    ]
    for how, stage in (("as many passes", "train"), ("as long", "longer")):
        if ratios := [ratio for row in rows if (ratio := ratio_of(row, stage)) is not None]:
            what = f"ist within {WORSE:g} of local SGD's held-out loss after {how}, of {len(ratios)}"
            figures.append(Figure(what, sum(ratio <= WORSE for ratio in ratios), "", samples=ratios))
    return figures


def ratio_of(row: dict[str, Any], stage: str = "train") -> float | None:
    """Return the held-out loss of ist over that of local SGD; None without both."""
    losses, own = (row.get(name, {}).get("losses", {}) for name in ("train", stage))
    return own["ist"] / losses["local-sgd"] if "ist" in own else None


def longer_rounds(row: dict[str, Any]) -> int | None:
    """Return the rounds of ist that take as long as local SGD took; None if ist was not trained."""
    seconds = row.get("train", {}).get("seconds", {})
    return max(1, round(ROUNDS * seconds["local-sgd"] / seconds["ist"])) if "ist" in seconds else None


def is_due(row: dict[str, Any], stage: str) -> bool:
    """Return whether a stage of a module is to be tried: not yet done, and the one before says that it can be."""
    if stage in row:
        return False
    return stage == "accept" or bool(row["accept"].get("accepted") if stage == "train" else longer_rounds(row))


def table_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of all modules."""
    head = ["module", "package", "parameters", "method", "split", "prepared in", "torch", "local SGD", "ist"]
    head += ["ist, as long"]
    cells = []
    for row in rows:
        accept, losses = row["accept"], row.get("train", {}).get("losses", {})
        if accept.get("accepted"):
            found = [
                f"{accept['parameters']:,}",
                accept["method"],
                f"{accept['split']:.0%}",
                f"{accept['seconds']:.1f} s",
            ]
        else:
            found = ["", next((key.replace("_", " ") for key in accept if key != "accepted"), ""), "", ""]
        all_losses = {**losses, "longer": row.get("longer", {}).get("losses", {}).get("ist")}
        held_out = [
            "" if (loss := all_losses.get(name)) is None else f"{loss:.3g}"
            for name in ("torch", "local-sgd", "ist", "longer")
        ]
        cells.append([row["name"], row["package"], *found, *held_out])
    title = "Modules as their packages build them; the last four columns are losses on held-out data."
    return {"title": title, "head": head, "rows": cells}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Try all modules, and report."""
    command = parser(__doc__)
    command.add_argument("--train", action="store_true", help="train them, too")
    command.add_argument("--only", nargs="+", metavar="PACKAGE", help="modules of these packages alone")
    command.add_argument("--resume", type=Path, metavar="FILE", help="a result of this benchmark to go on from")
    options = command.parse_args(argv)
    earlier = json.loads(options.resume.read_text()) if options.resume else None
    known = {(row["package"], row["name"]): row for row in (earlier["rows"] if earlier else [])}
    packages = TINY if options.tiny else options.only
    for case in CASES:
        if packages and case.package not in packages:
            continue
        row = known.setdefault((case.package, case.name), {"package": case.package, "name": case.name})
        for stage in ("accept", "train", "longer") if options.train else ("accept",):
            if is_due(row, stage):
                row[stage] = tried(case, stage, longer_rounds(row) if stage == "longer" else None)
                print(f"{case.package} {case.name}: {row[stage]}", file=sys.stderr, flush=True)
    rows = list(known.values())
    return report("modules", options, figures_of(rows), earlier, rows=rows, tables=[table_of(rows)])


if __name__ == "__main__":
    main()
