"""Steps in compiled code that recomputes a part of the activations: one technique beside a plan's, with other bits.

torch's partitioner chooses what to recompute (`activation_memory_budget`). Its compiler takes from seconds to minutes,
so it runs in a process of its own, which can be ended and whose memory is given back, and leaves what it has made in
this user's cache. Only where a step there took so little memory and time that it may be of use is it loaded here,
for batches of one shape; here, nothing is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from idletrain.errors import RunError
from idletrain.nn.compiler import compiled, compiler, said
from idletrain.nn.data.batches import arguments, shapes_of
from idletrain.nn.outofcore.executing.compiling import MeasuredPart, Request, measured_parts
from idletrain.nn.outofcore.planning.plan import MemoryPlan
from idletrain.nn.outofcore.planning.profile import Profile
from idletrain.nn.outofcore.planning.simulate import Footprint, simulate
from idletrain.nn.scripted import unoptimized

logger = logging.getLogger(__name__)
LEAST_PART = 0.5  # with less, steps of an MLP and a GPT took more memory again (the bench outofcore)
COMPILER_BYTES = 1 << 30  # that torch's and the C++ compiler may take
LIBRARY_BYTES = 64 << 20  # in a process that loads what another has compiled: an MLP's first trial took so much more


@dataclass(frozen=True, slots=True)
class CompiledPlan(MemoryPlan):
    """Steps in compiled code, all parameters in memory.

    Attributes:
        part: The part of its activations' memory that the compiled module may take.
        shapes: Those of a batch's inputs (`shapes_of`): it is compiled for no others.
    """

    part: float = 1.0
    shapes: Any = ()


class NotCompiledError(RunError):
    """A batch cannot go through compiled code; nothing of the step was done."""


class CompiledForward:
    """Computes a module's outputs by code that another process has compiled.

    Args:
        module: The module.
        plan: What was compiled.
    """

    _is_loaded: ClassVar[bool] = False

    def __init__(self, module: nn.Module, plan: CompiledPlan) -> None:
        self._module, self._part, self._shapes = module, plan.part, plan.shapes

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs of a batch.

        Raises:
            NotCompiledError: it has other shapes, or the code cannot be loaded.
        """
        if shapes_of(inputs) != self._shapes:
            raise NotCompiledError(f"a batch has the shapes {shapes_of(inputs)}, not {self._shapes} as the first")
        CompiledForward._is_loaded = True
        args, kwargs = arguments(self._module, inputs)
        try:
            with unoptimized():
                return self._run(*args, **kwargs)  # torch loads it as it is called
        except Exception as error:
            raise NotCompiledError(f"what was compiled cannot be loaded ({said(error)})") from error

    @functools.cached_property
    def _run(self) -> Callable[..., Any]:
        return compiled(self._module, self._part, only_loads=True)

    @classmethod
    def library_bytes(cls) -> int:
        """Return the memory that compiled code has taken in this process for good, used or not."""
        return LIBRARY_BYTES if cls._is_loaded else 0


class CompiledExecutor:
    """Stands in for an `Executor`, as compiled code does by itself what a plan has one for."""

    peak_bytes = swapped_bytes = 0
    forward_seconds: Sequence[float] = ()
    backward_seconds: Sequence[float] = ()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run the body."""
        yield

    def close(self) -> None:
        """Do nothing: the module was left as it is."""


@dataclass
class CompiledSearch:
    """Looks for steps in compiled code that are quicker than a plan's.

    Attributes:
        module: The module in training mode.
        loss: `(outputs, target) -> scalar`.
        profile: The module's profile.
        batch: A batch's inputs and its target.
        unwanted: Returns True if nobody waits any more.
        free_bytes: Tells the memory that nobody uses.
        running: Whether the compiler runs now.
    """

    module: nn.Module
    loss: Callable[[Any, Any], Tensor]
    profile: Profile
    batch: tuple[Any, Any]
    unwanted: Callable[[], bool]
    free_bytes: Callable[[], int]
    running: bool = False

    def __call__(self, plan: MemoryPlan, most_bytes: int) -> CompiledPlan | None:
        """Return what to try beside a plan, or None if nothing is likely to be quicker within the bytes of a step."""
        modes = "K" * len(plan.unit_modes)
        resident, peak = _in_core(self.profile, modes)
        if fault := compiler().fault:
            logger.warning("memory.compile: %s, so this worker compiles nothing", fault)
            return None
        if (free := self.free_bytes()) < (needed := peak + COMPILER_BYTES):
            logger.warning(
                "memory.compile: nothing is compiled, as that may take %d MiB and only %d are free",
                needed >> 20,
                max(0, free) >> 20,
            )
            return None
        libraries = LIBRARY_BYTES - CompiledForward.library_bytes()
        room = most_bytes - resident - libraries
        values = parts_to_try(room, peak - resident)
        started, found = time.perf_counter(), None
        for measured in self._measured(Request(self.module, self.loss, *self.batch, values, room)):
            if measured.fault:
                logger.warning("memory.compile: not taken for this subnet: %s", measured.fault)
                continue
            logger.info(
                "memory.compile: with %g of the activations, a step takes %.3g s and %d MiB of %d MiB",
                measured.part,
                measured.seconds,
                measured.peak_bytes >> 20,
                room >> 20,
            )
            if measured.peak_bytes <= room and (measured.seconds < plan.seconds or plan.peak_bytes > most_bytes):
                found = measured
        took = time.perf_counter() - started
        if found is None:
            logger.info("memory.compile: in %.0f s, no steps were found that are quicker within the budget", took)
            return None
        logger.info("memory.compile: steps of %.3g s after %.0f s of compiling", found.seconds, took)
        given = {field.name: getattr(plan, field.name) for field in fields(MemoryPlan)}
        given |= {"unit_modes": tuple(modes), "streamed": False, "micro_batches": 1, "seconds": found.seconds}
        given["peak_bytes"] = resident + libraries + found.peak_bytes
        return CompiledPlan(**given, part=found.part, shapes=shapes_of(self.batch[0]))

    def _measured(self, request: Request) -> Iterator[MeasuredPart]:
        self.running = True
        try:
            yield from measured_parts(request, self.unwanted)
        finally:
            self.running = False


def parts_to_try(room_bytes: int, in_core_bytes: int) -> tuple[float, ...]:
    """Return at most two parts of the activations' memory to compile for, the likeliest first; none without room.

    Args:
        room_bytes: What a step may take beside what is always in memory.
        in_core_bytes: What a step in core takes beside it.
    """
    if room_bytes <= 0:
        return ()
    share = min(1.0, room_bytes / max(1, in_core_bytes))
    return tuple(dict.fromkeys((round(max(share, LEAST_PART), 2), LEAST_PART)))


def _in_core(profile: Profile, unit_modes: Sequence[str]) -> tuple[int, int]:
    """Return what a step in core has in memory always, and its predicted peak, in bytes."""
    footprint = Footprint(profile.units, unit_modes, 1 << 60, profile.resident_bytes, streamed=False)
    return footprint.resident_bytes, simulate(footprint, profile.link).peak_bytes
