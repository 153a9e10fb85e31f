"""Compare the cost of training beyond a node's memory with every single technique.

Steps of a network in one process on one thread with a worker's environment, in core and by plans for a part of the
in-core peak, on the disk as it is and throttled in the swap's own threads; techniques take turns, and every step's
gradients are compared with those in core. The plan is the one that trials choose; a technique that does not fit the
budget has no time. Then AdamW with its parameters and state in a file.

    python -m benchmarks.outofcore [--tiny] [--json FILE]

Targets, in geometric means over networks and budgets: the best swap-style technique takes at least 1.52 times as long
as the plan at 100 MB/s (as KARMA reports, arXiv 2008.11421) and 1.15 times at 300 MB/s, where most of a swap hides
behind the computation; the best technique of any kind at least 1.03 times and nowhere below 0.97; on the disk as it is
a plan takes at most 1.15 times a step in core, streamed parameters at most 1.25 times; steps are predicted within 10 %
in the median and within 25 % at worst, their memory within 10 %; none of at least a hundred steps by a plan takes more
than its budget.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adamw import adamw

from benchmarks.networks import UNet, resnet, vgg16, wide_resnet
from benchmarks.outofcore_figures import NAMED, SMALLER, compiled_table, figures_of, mean_ratio, median_ratio, table_of
from benchmarks.report import Figure, at_most, report, with_preset
from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT
from idletrain.nn.models import mlp, transformer
from idletrain.nn.outofcore.executing.backing_file import StateFile
from idletrain.nn.outofcore.executing.disk import DiskSwap
from idletrain.nn.outofcore.executing.execute import CHECKPOINT_BYTES, Executor
from idletrain.nn.outofcore.executing.learn import learn_profile
from idletrain.nn.outofcore.executing.measure import measure_units
from idletrain.nn.outofcore.executing.pinned import PinnedSwap
from idletrain.nn.outofcore.executing.resident import ResidentPeak, release_freed_memory
from idletrain.nn.outofcore.executing.trials import TIMED, WARM_UP, TriedStep, best_of, measured_plan
from idletrain.nn.outofcore.executing.weights import Weights
from idletrain.nn.outofcore.planning.plan import MemoryPlan, least_bytes, make_memory_plan, usable
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink, Unit, micro_batch
from idletrain.nn.outofcore.planning.simulate import Footprint, simulate
from idletrain.nn.units import Piece, pieces_of

REPEATED = 4  # compiled steps, the first of which compiles
NOTES = """
`from` is the least part of the in-core peak that a plan fits with all parameters in memory: thin networks' widest
units. In core is with the same C library's settings as the others, those of a worker that trains by a plan: freed
memory is given back at once, as a memory limit needs it. Memory is the kernel's count of a step's peak and the
parameters. A process that has done many steps keeps some megabytes more in holes of small blocks; a run sets 48 MiB
aside for that, the budgets here do not.

The plan is chosen as a worker chooses it: by trials of what is predicted to be quick. Its prediction is its trial's;
that of plan / in core is the ratio of its trial to one in core. A technique that takes more than the budget in its
steps has no time.

A plan's letters, a unit each: K keep, S swap, R recompute, Q recompute from a swapped input, m as one with the unit
before. `smaller batch` is as many samples in core in as few equal parts as fit: where it is quicker and the network
and loss allow it (no BatchNorm over the batch, a loss that is a mean), it is what to use.
""".strip().split("\n\n")
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
    """Networks and repetitions, chosen so that all of it takes half an hour on two quiet cores."""

    networks: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]]  # module, inputs, tokens (0: floats)
    budgets: tuple[float, ...] = (0.3, 0.4, 0.6)
    megabytes_per_second: tuple[float, ...] = (0.0, 100.0, 300.0)  # 0: the disk as it is
    compiled: tuple[str, ...] = ()
    repetitions: int = 3
    layers: int = 11
    width: int = 1536
    batch: int = 1024


FULL = Sizes(
    {  # thinner than in the papers, but for the GPT: steps of half a second, and activations rather than parameters
        "MLP": (lambda: mlp([512, *[512] * 12, 10]), (2048, 512), 0),
        "VGG-16, 16 wide": (lambda: vgg16(16), (96, 3, 32, 32), 0),
        "ResNet-50, 24 wide": (lambda: resnet((3, 4, 6, 3), 24), (12, 3, 32, 32), 0),
        "ResNet-200, 8 wide": (lambda: resnet((3, 24, 36, 3), 8), (8, 3, 32, 32), 0),
        "WRN-28-2": (lambda: wide_resnet(28, 2), (16, 3, 32, 32), 0),
        "U-Net, 16 wide": (lambda: UNet(16, 4), (48, 3, 32, 32), 0),
        "GPT": (lambda: transformer(512, 128, 128, 4, 512, 8), (12, 128), 512),
    },
    compiled=("MLP", "GPT"),
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


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


class DevicePeak:
    """Measures the peak of a GPU's memory above what is allocated at construction, as its allocator counts it."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    @property
    def bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated() - self._before)


class Network:
    """One network with a batch on a device, its profile, and its gradients in core."""

    def __init__(self, make: Callable[[], nn.Module], shape: Sequence[int], tokens: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self._peak = DevicePeak if device == "cuda" else ResidentPeak
        x = torch.randint(tokens, tuple(shape)) if tokens else torch.randn(*shape)
        self.x, self.module = x.to(device), make().train().to(device)
        with torch.no_grad():
            outputs = copy.deepcopy(self.module)(self.x)
        self.y = torch.randint(10, outputs.shape[:-1], device=device)
        link = SwapLink(1e9, 1e9)  # to be measured
        learnt = learn_profile(
            self.module, self.x, self.y, _loss, state_slots=0, resident_bytes=0, link=link, by_kernel=True
        )
        self.names = [piece.name for piece in learnt.pieces]
        # A run's budget holds what checkpoint takes once, too; here that is there from the first step on.
        once = 0 if device == "cuda" else CHECKPOINT_BYTES
        self.profile = replace(learnt.profile, resident_bytes=learnt.profile.resident_bytes - once)
        whole = Footprint(self.profile.units, "K" * len(self.profile.units), 1 << 60, 0, streamed=False)
        self.predicted_in_core_bytes = simulate(whole, link).peak_bytes
        self.gradients()  # a kernel's first run takes memory for its code
        _, peak_bytes, self.expected = self.gradients()
        self.in_core_bytes = peak_bytes + sum(p.nbytes for p in self.module.parameters())

    def loss(self, outputs: Tensor) -> Tensor:
        return _loss(outputs, self.y)

    def gradients(
        self,
        plan: MemoryPlan | None = None,
        swap: DiskSwap | PinnedSwap | None = None,
        parts: int = 1,
        settle: Callable[[], None] = release_freed_memory,
    ) -> tuple[float, int, list[Tensor]]:
        """Return seconds, bytes and gradients of one step: in core, in micro-batches, or by a plan."""
        module = copy.deepcopy(self.module)
        gc.collect()
        settle()
        resident = self._peak()
        started = time.perf_counter()
        if plan and swap:
            named = {piece.name: piece for piece in pieces_of(module)}
            executor = Executor(module, [named[n] for n in self.names], plan.footprint(self.profile), swap)
            with executor.step():
                self.loss(module(self.x)).backward()  # type: ignore[no-untyped-call]
            executor.close()
        else:
            for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
                loss = _loss(module(x), y) / parts
                loss.backward()  # type: ignore[no-untyped-call]
        if self.x.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return seconds, resident.bytes, [p.grad for p in module.parameters() if p.grad is not None]


def compare(network: Network, budget: int, swap: DiskSwap | PinnedSwap, repetitions: int) -> dict[str, Any]:
    """Time every technique that fits a budget, and the plan that trials choose, in turns."""
    profile = replace(network.profile, link=swap.speed())

    def trial(plan: MemoryPlan) -> TriedStep:
        always = plan.footprint(profile).resident_bytes
        return best_of([TriedStep(took, always + resident) for took, resident in tried_steps(network, plan, swap)])

    predicted = make_memory_plan(profile, budget, stream=False)
    plan = measured_plan(profile, budget, trial, stream=False) if isinstance(swap, DiskSwap) else predicted
    fitting = {t.name: t for t in predicted.techniques if not t.shortfall_bytes and t.name in NAMED}
    same_as = [name for name, t in fitting.items() if t.unit_modes == plan.unit_modes]
    plans: dict[str, MemoryPlan | None] = {"in core": None, "plan": plan}
    plans |= {name: replace(predicted, unit_modes=t.unit_modes) for name, t in fitting.items() if name not in same_as}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    parts = _parts(network, budget)
    if parts:
        seconds[SMALLER] = []
    resident_bytes: dict[str, list[int]] = {name: [] for name in seconds}
    same = True
    for repetition in range(repetitions + 1):
        turn = [*seconds][repetition % len(seconds) :] + [*seconds][: repetition % len(seconds)]
        for name in turn:
            took, resident, gradients = network.gradients(plans.get(name), swap, parts if name == SMALLER else 1)
            if repetition:  # the first warms up
                seconds[name].append(took)
                resident_bytes[name].append(resident)
            same &= name == SMALLER or all(map(torch.equal, gradients, network.expected))
    always = plan.footprint(profile).resident_bytes
    for name in fitting.keys() & seconds.keys():  # which no plan would be, either
        if always + max(resident_bytes[name]) > budget:
            del seconds[name]
    return {
        "budget": budget,
        "letters": "".join(plan.unit_modes),
        "seconds": seconds,
        "same_plan": same_as,
        "smaller_batch_parts": parts,
        "micro_batches": network.profile.across_batch or "allowed",
        "same_bits": same,
        "link": list(profile.link),
        "predicted_in_core_seconds": profile.compute_seconds,
        "tried_in_core_seconds": min(seconds for seconds, _ in tried_steps(network)),
        "predicted_in_core_bytes": network.predicted_in_core_bytes,
        "in_core_bytes": network.in_core_bytes,
        "predicted_seconds": plan.seconds,
        "predicted_bytes": plan.peak_bytes,
        "seconds_before_trials": predicted.seconds,
        "bytes_before_trials": predicted.peak_bytes,
        "step_bytes": [always + resident for resident in resident_bytes["plan"]],
    }


def tried_steps(
    network: Network, plan: MemoryPlan | None = None, swap: DiskSwap | PinnedSwap | None = None
) -> list[tuple[float, int]]:
    """Return seconds and bytes of a trial's steps, by a plan or in core."""
    return [network.gradients(plan, swap)[:2] for _ in range(WARM_UP + TIMED)][WARM_UP:]


def _parts(network: Network, budget: int) -> int:
    """Return into how few equal parts a batch must be cut to fit in core; 0 if one sample does not."""
    parts = 2
    while parts <= len(network.x):
        part = micro_batch(network.profile, parts)
        whole = Footprint(part.units, "K" * len(part.units), 1 << 60, 0, streamed=False)
        if len(network.x) % parts == 0 and simulate(whole, part.link).peak_bytes <= usable(budget):
            return parts
        parts += 1
    return 0


def activations(sizes: Sizes, folder: Path) -> list[dict[str, Any]]:
    """Compare all networks at all link speeds and budgets that a plan fits, or else at the least that one fits."""
    rows = []
    cases = [(name, speed) for name in sizes.networks for speed in sizes.megabytes_per_second]
    networks: dict[str, Network] = {}
    for name, speed in track(cases, "networks and links", console=Console(stderr=True)):
        if name not in networks:
            networks = {name: Network(*sizes.networks[name])}
        network = networks[name]
        least = math.ceil(100 * least_bytes(network.profile, stream=False) / network.in_core_bytes) / 100
        swap = DiskSwap(folder, SCRATCH_BYTES, TokenBucket(speed * 1e6) if speed else None)
        for part in [part for part in sizes.budgets if part >= least] or [least]:
            row = compare(network, int(network.in_core_bytes * part), swap, sizes.repetitions)
            rows.append({"network": name, "mb_per_second": speed, "part": part, "least_part": least, **row})
        swap.close()
    return rows


def giving_back(sizes: Sizes) -> dict[str, float]:
    """Return how many times as long a step in core takes where freed memory is returned at once."""
    by_network = {}
    for name, network in sizes.networks.items():
        subject = Network(*network)
        ratios = []
        for _ in range(sizes.repetitions):
            returning, keeping = (  # the second of two steps: the first finds the other's memory
                [subject.gradients(settle=settle)[0] for _ in range(2)][1]
                for settle in (release_freed_memory, keep_freed_memory)
            )
            ratios.append(returning / keeping)
        by_network[name] = statistics.median(ratios)
    release_freed_memory()
    return by_network


def keep_freed_memory() -> None:
    """Set glibc to keep freed memory, as it comes to do by itself (mallopt(3): its threshold grows up to 32 MiB)."""
    mallopt = ctypes.CDLL(None).mallopt
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(parameter, 32 << 20)


def adam(folder: Path, sizes: Sizes) -> tuple[list[float], list[float], int]:
    """Return the seconds of AdamW's steps in core and streamed, and how many parameters differ afterwards."""
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(sizes.width, sizes.width) for _ in range(sizes.layers)))
    plain, x = copy.deepcopy(ours), torch.randn(sizes.batch, sizes.width)
    optimizer = torch.optim.AdamW(plain.parameters(), foreach=False)
    pieces = [Piece(str(i), ours, (layer,), follows=i > 0) for i, layer in enumerate(ours)]
    _, units = measure_units(ours, pieces, x, lambda out: out.square().mean(), state_slots=2)
    parameters = list(ours.parameters())
    counts = [torch.zeros(()) for _ in parameters]
    state_file = StateFile(folder, [tuple(p.shape) for p in parameters], 3)
    for i, p in enumerate(parameters):
        state_file.slot(i).copy_(p.detach())
    state_file.mark_arrived(range(len(parameters)))

    def update(number: int, p: nn.Parameter, state: list[Tensor]) -> None:
        assert p.grad is not None
        how = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
        adamw([p], [p.grad], [state[0]], [state[1]], [], [counts[number]], amsgrad=False, foreach=False, **how)  # type: ignore[arg-type]

    swap = DiskSwap(folder, SCRATCH_BYTES)
    groups = [[(2 * i + j, p) for j, p in enumerate(layer.parameters())] for i, layer in enumerate(ours)]
    weights = Weights(state_file, groups, [], swap, update, streamed=True)
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
    weights.store(state_file, 3)
    executor.close()
    weights.close()
    differing = sum(not torch.equal(a, b) for a, b in zip(parameters, plain.parameters(), strict=True))
    swap.close()
    return seconds[0][1:], seconds[1][1:], differing


def planning_seconds() -> float:
    """Return the CPU seconds to plan fifty units that neither fit nor swap for free."""
    units = tuple(
        Unit(f"u{i}", 0.03, 0.06, 0.01 + i % 5 / 100, 8 << 20, 8 << 20, (8 + i % 7 * 6) << 20, forward_bytes=8 << 20)
        for i in range(50)
    )
    started = time.thread_time()
    make_memory_plan(Profile(units, SwapLink(3e8, 3e8)), 700 << 20)
    return time.thread_time() - started


def compilations(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure some networks compiled by torch, with all and with a part of their activations' memory.

    Returns nothing where there is no C++ compiler for it to use.
    """
    if shutil.which("g++") is None:
        return []
    return [
        {"network": name, "part": part, **compiled(Network(*sizes.networks[name]), part)}
        for name in sizes.compiled
        for part in (1.0, *sizes.budgets)
    ]


def compiled(network: Network, part: float) -> dict[str, Any]:
    """Return seconds and bytes of a compiled step beside one in core that is not."""
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = part
    module = copy.deepcopy(network.module)
    step = torch.compile(module)
    compiled_seconds, plain, most = [], [], 0
    for repetition in range(REPEATED):
        module.zero_grad()
        gc.collect()
        release_freed_memory()
        resident, started = ResidentPeak(), time.perf_counter()
        network.loss(step(network.x)).backward()  # type: ignore[no-untyped-call]
        if repetition:  # the first compiles
            compiled_seconds.append(time.perf_counter() - started)
            most = max(most, resident.bytes)
            plain.append(network.gradients()[:2])
    torch._functorch.config.activation_memory_budget = 1.0
    seconds, memory = zip(*plain, strict=True)
    return {"over_in_core": median_ratio(compiled_seconds, seconds), "bytes": most, "in_core_bytes": max(memory)}


def be_as_a_worker() -> None:
    """Start this process again with the variables of workers' processes, which set the C library's memory, if it has
    others.
    """
    if not WORKER_ENVIRONMENT.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **WORKER_ENVIRONMENT})


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, sizes = with_preset(__doc__, argv, FULL, TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    release_freed_memory()
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        rows = activations(sizes, Path(folder))
        plain, streamed, differing = adam(Path(folder), sizes)
    by_torch = compilations(sizes)
    back = giving_back(sizes)
    torch.set_num_threads(threads)
    ratio = statistics.median(streamed) / statistics.median(plain)
    figures = [
        *figures_of(rows),
        at_most("AdamW, parameters and state streamed / in core", ratio, "", 1.25, streamed),
        at_most("parameters streamed: in-core / streamed bits differ", float(differing), "parameters", 0.0),
        at_most("planning 50 units", planning_seconds(), "s", 1.0),
        Figure(
            "a step in core, freed memory given back at once / kept, mean",
            mean_ratio([*back.values()]),
            "x",
            samples=[*back.values()],
        ),
    ]
    return report(
        "outofcore",
        options,
        figures,
        tables=[table_of(rows), compiled_table(by_torch)],
        notes=NOTES,
        rows=rows,
        compiled=by_torch,
    )


if __name__ == "__main__":
    be_as_a_worker()
    main()
