"""What does training beyond a node's memory cost, beside every single technique?

Steps of a network in one process on one thread, in core and by plans for a part of the in-core peak, on the disk as it
is and throttled in the swap's own threads; techniques take turns, and every step's gradients are compared with those
in core. A technique that does not fit the budget has no time. Then AdamW with its parameters and state in a file.

    python -m benchmarks.outofcore [--tiny] [--json FILE]

Targets (KARMA, arXiv 2008.11421, reports 1.52 over swap-style methods): in the geometric mean over networks and
budgets, the best swap-style technique takes at least 1.52 times as long as the plan where the link is the limit; the
best technique of any kind at least 1.03 times and nowhere below 0.97; on the disk as it is a plan takes at most 1.15
times a step in core, streamed parameters at most 1.25 times; steps are predicted within 15 %.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adamw import adamw

from benchmarks.networks import UNet, resnet, vgg16, wide_resnet
from benchmarks.report import Figure, arguments, at_least, at_most, report
from idletrain.nn.models import mlp, transformer
from idletrain.nn.outofcore.disk import DiskSwap
from idletrain.nn.outofcore.execute import Executor, release_freed_memory
from idletrain.nn.outofcore.home import Home
from idletrain.nn.outofcore.measure import across_batch, measure
from idletrain.nn.outofcore.plan import InfeasibleError, Plan, Technique, make_plan, usable
from idletrain.nn.outofcore.profile import Link, Profile, Unit, micro_batch
from idletrain.nn.outofcore.simulate import Footprint, simulate
from idletrain.nn.outofcore.units import Piece, pieces_of
from idletrain.nn.outofcore.weights import Weights

REPEATED = 4  # compiled steps, the first of which compiles
LETTERS = 24  # of a plan in a table
NOTES = """
A plan's letters, a unit each: K keep, S swap, R recompute, Q recompute from a swapped input, m as one with the unit
before. `smaller batch` is as many samples in core in as few equal parts as fit: where it is quicker and the network
and loss allow it (no BatchNorm over the batch, a loss that is a mean), it is what to use.
""".strip().split("\n\n")
SWAPPING = ("swap all", "swap, keep the tail")
SCRATCH_BYTES = 4 << 30


class TokenBucket:
    """Lets bytes through at a rate; called on the swap's own threads, which it makes wait."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free_at, self._lock = bytes_per_second, 0.0, threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            start = max(time.perf_counter(), self._free_at)
            self._free_at = start + size / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how often; so that all of it takes a few minutes."""

    networks: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]]  # module, inputs, tokens (0: floats)
    budgets: tuple[float, ...] = (0.3, 0.4, 0.6)
    megabytes_per_second: tuple[float, ...] = (0.0, 100.0, 300.0)  # 0: the disk as it is
    compiled: tuple[str, ...] = ()
    repetitions: int = 3
    layers: int = 11
    width: int = 1536
    batch: int = 1024


FULL = Sizes(
    {
        "MLP": (lambda: mlp([512, *[512] * 12, 10]), (1024, 512), 0),
        "VGG-16": (vgg16, (12, 3, 32, 32), 0),
        "ResNet-50": (lambda: resnet((3, 4, 6, 3), 24), (12, 3, 32, 32), 0),  # thinner than 64: a third of a second
        "ResNet-200": (lambda: resnet((3, 24, 36, 3), 8), (12, 3, 32, 32), 0),
        "WRN-28-10": (lambda: wide_resnet(28, 10), (2, 3, 32, 32), 0),
        "U-Net": (lambda: UNet(16, 4), (12, 3, 32, 32), 0),
        "GPT": (lambda: transformer(512, 128, 128, 4, 512, 8), (12, 128), 512),
    },
    compiled=("MLP", "VGG-16", "GPT"),
    width=768,
)
TINY = Sizes(
    {"MLP": (lambda: mlp([32] + [64] * 4 + [10]), (256, 32), 0)},
    (0.8,),
    (0.0, 300.0),
    repetitions=1,
    layers=4,
    width=64,
    batch=16,
)


class Resident:
    """Samples the memory of this process, for the most that a step takes beside what was there before."""

    def __enter__(self) -> Resident:
        self._process, self._done = psutil.Process(), threading.Event()
        self._before = self._most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_raised: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self._most - self._before

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._most = max(self._most, self._process.memory_info().rss)


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


class Network:
    """One network with a batch, its profile, and its gradients in core."""

    def __init__(self, make: Callable[[], nn.Module], shape: Sequence[int], tokens: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randint(tokens, tuple(shape)) if tokens else torch.randn(*shape)
        self.module = make().train()
        with torch.no_grad():
            outputs = copy.deepcopy(self.module)(self.x)
        self.y = torch.randint(10, outputs.shape[:-1])
        self.across = across_batch(self.module, _loss, outputs, self.y)
        pieces, units = measure(self.module, pieces_of(self.module), self.x, self.loss)
        self.names = [piece.name for piece in pieces]
        self.profile = Profile(units, Link(1e9, 1e9))
        whole = Footprint(units, "K" * len(units), 1 << 60, 0, streamed=False)
        self.in_core_bytes = simulate(whole, self.profile.link).peak_bytes
        self.expected = self.gradients(None, None, 1)[1]
        self.step_bytes = 0

    def loss(self, outputs: Tensor) -> Tensor:
        return _loss(outputs, self.y)

    def gradients(
        self, plan: Plan | None, swap: DiskSwap | None, parts: int, *, watched: bool = False
    ) -> tuple[float, list[Tensor]]:
        """Seconds and gradients of one step: in core, in micro-batches, or by a plan; if watched, its memory, too."""
        module = copy.deepcopy(self.module)
        executor = None
        if plan and swap:
            named = {piece.name: piece for piece in pieces_of(module)}
            executor = Executor(module, [named[n] for n in self.names], plan.footprint(self.profile), swap)
        with Resident() if watched else contextlib.nullcontext() as memory:
            started = time.perf_counter()
            if executor:
                with executor.step():
                    self.loss(module(self.x)).backward()  # type: ignore[no-untyped-call]
                executor.close()
            else:
                for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
                    loss = _loss(module(x), y) / parts
                    loss.backward()  # type: ignore[no-untyped-call]
            seconds = time.perf_counter() - started
        self.step_bytes = memory.bytes if memory else 0
        return seconds, [p.grad for p in module.parameters() if p.grad is not None]


def compare(network: Network, budget: int, swap: DiskSwap, repetitions: int) -> dict[str, Any] | None:
    """Every technique that fits a budget, and the plan, in turns; None if nothing fits."""
    profile = replace(network.profile, link=swap.speed())
    try:
        plan = make_plan(profile, budget, micro_batches=False)
    except InfeasibleError:
        return None
    fitting: dict[str, Technique] = {t.name: t for t in plan.techniques if not t.lacking_bytes}
    ways: dict[str, Plan | None] = {"in core": None, "plan": plan}
    ways |= {name: replace(plan, letters=t.letters) for name, t in fitting.items() if name in NAMED}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    same = True
    for _ in range(repetitions + 1):
        for name, way in ways.items():
            taken, gradients = network.gradients(way, swap, 1)
            seconds[name].append(taken)
            same &= all(torch.equal(a, b) for a, b in zip(gradients, network.expected, strict=True))
    parts = _parts(network, budget)
    smaller = [network.gradients(None, None, parts)[0] for _ in range(repetitions + 1)] if parts else []
    network.gradients(plan, swap, 1, watched=True)
    resident = plan.footprint(profile).resident_bytes
    return {
        "budget": budget,
        "letters": "".join(plan.letters),
        "seconds": {name: taken[1:] for name, taken in seconds.items()},  # the first warms up
        "smaller_batch_seconds": smaller[1:],
        "smaller_batch_parts": parts,
        "micro_batches": network.across or "allowed",
        "same_bits": same,
        "predicted_seconds": plan.seconds,
        "predicted_step_bytes": plan.peak_bytes - resident,
        "step_bytes": network.step_bytes,
    }


def _parts(network: Network, budget: int) -> int:
    """Into how few equal parts a batch must be cut to fit in core; 0 if one sample does not."""
    parts = 2
    while parts <= len(network.x):
        part = micro_batch(network.profile, parts)
        whole = Footprint(part.units, "K" * len(part.units), 1 << 60, 0, streamed=False)
        if len(network.x) % parts == 0 and simulate(whole, part.link).peak_bytes <= usable(budget):
            return parts
        parts += 1
    return 0


NAMED = ("swap all", "recompute all", "recompute segments", "swap, keep the tail", "recompute, keep the tail")


def activations(sizes: Sizes, folder: Path) -> list[dict[str, Any]]:
    """All networks at all budgets and link speeds."""
    rows = []
    for name, (make, shape, tokens) in sizes.networks.items():
        network = Network(make, shape, tokens)
        for speed in sizes.megabytes_per_second:
            swap = DiskSwap(folder, SCRATCH_BYTES, TokenBucket(speed * 1e6) if speed else None)
            for part in sizes.budgets:
                row = compare(network, int(network.in_core_bytes * part), swap, sizes.repetitions)
                if row:
                    rows.append({"network": name, "mb_per_second": speed, "part": part, **row})
            swap.close()
    return rows


def adam(folder: Path, sizes: Sizes) -> tuple[list[float], list[float], int]:
    """Seconds of steps of AdamW in core and streamed, and how many parameters differ afterwards."""
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(sizes.width, sizes.width) for _ in range(sizes.layers)))
    plain, x = copy.deepcopy(ours), torch.randn(sizes.batch, sizes.width)
    optimizer = torch.optim.AdamW(plain.parameters(), foreach=False)
    pieces = [Piece(str(i), ours, (layer,), follows=i > 0) for i, layer in enumerate(ours)]
    _, units = measure(ours, pieces, x, lambda out: out.square().mean(), state_slots=2)
    parameters = list(ours.parameters())
    counts = [torch.zeros(()) for _ in parameters]
    home = Home(folder, [tuple(p.shape) for p in parameters], 3)
    for i, p in enumerate(parameters):
        home.slot(i).copy_(p.detach())
    home.came(range(len(parameters)))

    def update(number: int, p: nn.Parameter, state: list[Tensor]) -> None:
        assert p.grad is not None
        how = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
        adamw([p], [p.grad], [state[0]], [state[1]], [], [counts[number]], amsgrad=False, foreach=False, **how)  # type: ignore[arg-type]

    swap = DiskSwap(folder, SCRATCH_BYTES)
    groups = [[(2 * i + j, p) for j, p in enumerate(layer.parameters())] for i, layer in enumerate(ours)]
    weights = Weights(home, groups, [], swap, update, streamed=True)
    executor = Executor(ours, pieces, Footprint(units, "K" * len(units), 1 << 60, 0, streamed=True), swap, weights)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(sizes.repetitions + 1):
        started = time.perf_counter()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
        middle = time.perf_counter()
        with executor.step():
            ours(x).square().mean().backward()
        weights.finish()
        seconds[0].append(middle - started)
        seconds[1].append(time.perf_counter() - middle)
    weights.store(home, 3)
    executor.close()
    weights.close()
    differing = sum(not torch.equal(a, b) for a, b in zip(parameters, plain.parameters(), strict=True))
    swap.close()
    return seconds[0][1:], seconds[1][1:], differing


def planning_seconds() -> float:
    """CPU seconds to plan fifty units that neither fit nor swap for free."""
    units = tuple(
        Unit(f"u{i}", 0.03, 0.06, 0.01 + i % 5 / 100, 8 << 20, 8 << 20, (8 + i % 7 * 6) << 20, forward_bytes=8 << 20)
        for i in range(50)
    )
    started = time.thread_time()
    make_plan(Profile(units, Link(3e8, 3e8)), 700 << 20)
    return time.thread_time() - started


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.mean(map(math.log, ratios))) if ratios else 1.0


def compiled(network: Network, part: float) -> dict[str, Any]:
    """Seconds and memory of a step compiled by torch, with that part of its activations' memory and with all of it."""
    found = {}
    for name, share in (("in core", 1.0), ("budget", part)):
        torch._dynamo.reset()
        torch._functorch.config.activation_memory_budget = share
        module = copy.deepcopy(network.module)
        step = torch.compile(module)
        taken = []
        for _ in range(REPEATED):
            module.zero_grad()
            with Resident() as memory:
                started = time.perf_counter()
                network.loss(step(network.x)).backward()  # type: ignore[no-untyped-call]
                taken.append(time.perf_counter() - started)
        found[name] = {"seconds": statistics.median(taken[1:]), "bytes": memory.bytes}
    torch._functorch.config.activation_memory_budget = 1.0
    return found


def compilations(sizes: Sizes) -> dict[str, Any]:
    """The same of some networks and budgets; nothing where there is no C++ compiler for it to use."""
    if shutil.which("g++") is None:
        return {}
    return {
        name: {part: compiled(Network(*sizes.networks[name]), part) for part in sizes.budgets}
        for name in sizes.compiled
    }


def figures_of(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Sum the rows up: ratios of medians."""
    for row in rows:
        row["medians"] = {name: statistics.median(taken) for name, taken in row["seconds"].items()}
        row["plan_over_in_core"] = row["medians"]["plan"] / row["medians"]["in core"]
        row["swap_style_over_plan"] = _over(row, SWAPPING)
        row["any_single_over_plan"] = _over(row, NAMED)
        smaller = row["smaller_batch_seconds"]
        row["smaller_batch_over_plan"] = statistics.median(smaller) / row["medians"]["plan"] if smaller else None
    slow = [row["swap_style_over_plan"] for row in rows if row["mb_per_second"] and row["swap_style_over_plan"]]
    every = [row["any_single_over_plan"] for row in rows if row["any_single_over_plan"]]
    native = [row["plan_over_in_core"] for row in rows if not row["mb_per_second"]]
    seconds = [abs(row["medians"]["plan"] / row["predicted_seconds"] - 1) for row in rows]
    memory = [row["step_bytes"] / row["predicted_step_bytes"] - 1 for row in rows]
    return [
        at_least("best swap-style / plan on a throttled link, mean", _mean(slow), "", 1.52, slow),
        at_least("best single technique / plan, mean", _mean(every), "", 1.03, every),
        at_least("best single technique / plan, worst", min(every, default=1.0), "", 0.97),
        at_most("plan / in core on the disk as it is, worst", max(native, default=1.0), "", 1.15, native),
        at_most("predicted step time: worst error", max(seconds, default=0.0), "", 0.15, seconds),
        at_most("memory of a step over its prediction, worst", max(memory, default=0.0), "", 0.10, memory),
        at_most("steps by a plan with other bits than in core", float(sum(not r["same_bits"] for r in rows)), "", 0.0),
    ]


def _over(row: dict[str, Any], names: Sequence[str]) -> float | None:
    """How many times as long the best of some techniques takes; None where none of them fits."""
    fitting = [row["medians"][name] for name in names if name in row["medians"]]
    return float(min(fitting) / row["medians"]["plan"]) if fitting else None


def table_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For RESULTS.md: a row per network, link and budget; `-` where a technique does not fit."""
    ratios = ["plan / in core", *(f"{name} / plan" for name in NAMED), "smaller batch / plan"]
    lines = []
    for row in rows:
        link = f"{row['mb_per_second']:.0f} MB/s" if row["mb_per_second"] else "the disk"
        medians = row["medians"]
        others = [medians[name] / medians["plan"] if name in medians else None for name in NAMED]
        measured = [row["plan_over_in_core"], *others, row["smaller_batch_over_plan"]]
        letters = row["letters"] if len(row["letters"]) <= LETTERS else f"{row['letters'][:LETTERS]}..."
        cells = [row["network"], link, f"{row['part']:.0%}", letters]
        lines.append([*cells, *("-" if r is None else f"{r:.2f}" for r in measured)])
    head = ["network", "link", "budget", "plan", *ratios]
    return {"title": "a step beyond memory, technique by technique (ratios of medians)", "head": head, "rows": lines}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options = arguments(__doc__, argv)
    sizes = TINY if options.tiny else FULL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    release_freed_memory()
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        rows = activations(sizes, Path(folder))
        plain, streamed, differing = adam(Path(folder), sizes)
    by_torch = compilations(sizes)
    torch.set_num_threads(threads)
    ratio = statistics.median(streamed) / statistics.median(plain)
    figures = [
        *figures_of(rows),
        at_most("AdamW, parameters and state streamed / in core", ratio, "", 1.25, streamed),
        at_most("parameters streamed: in-core / streamed bits differ", float(differing), "parameters", 0.0),
        at_most("planning 50 units", planning_seconds(), "s", 1.0),
    ]
    return report("outofcore", options, figures, tables=[table_of(rows)], notes=NOTES, rows=rows, compiled=by_torch)


if __name__ == "__main__":
    main()
