"""Compile a module and measure its steps, in a process of its own that is ended when it takes too long.

The process gets the module without values over its standard input, and ends when that does: with the process that
started it. It answers with a line of JSON for each part of the activations' memory. Where memory runs out, the kernel
ends it first.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from idletrain.nn import compiler
from idletrain.nn.data.batches import arguments, fresh
from idletrain.nn.ist.modules import copied
from idletrain.nn.outofcore.executing.resident import ResidentPeak, release_freed_memory
from idletrain.nn.scripted import unoptimized
from idletrain.nn.travel import dumps

COMPILE_SECONDS = 120.0  # for all parts; a part of a GPT of 8 layers took 25 to 63 s on one core
POLL_SECONDS = 0.1
STEPS = 2  # behind the one that compiles
ENDING_SECONDS = 1.0  # for a C++ compiler to delete a library that it has begun
SPREAD = 0.02  # of made-up values of parameters
LENGTH_BYTES = 8  # of a request's length, which comes first
FIRST_ENDED, MOST_LIKELY = Path("/proc/self/oom_score_adj"), "1000"  # proc(5)


@dataclass(frozen=True)
class Request:
    """What to compile and measure.

    Attributes:
        module: The module in training mode.
        loss: `(outputs, target) -> scalar`.
        inputs: A batch.
        target: Its target.
        parts: Parts of the activations' memory, until one takes at most `room_bytes`.
        room_bytes: What a step may take beside parameters and optimizer state.
    """

    module: nn.Module
    loss: Callable[[Any, Any], Tensor]
    inputs: Any
    target: Any
    parts: tuple[float, ...]
    room_bytes: int


class MeasuredPart(NamedTuple):
    """Seconds and bytes of a step with a part of the activations' memory; or with a text, why there is none."""

    part: float
    seconds: float = 0.0
    peak_bytes: int = 0
    fault: str = ""


def measured_parts(
    request: Request, unwanted: Callable[[], bool], limit_seconds: float = COMPILE_SECONDS
) -> Iterator[MeasuredPart]:
    """Yield what the parts of a request came to, each as soon as it is known; the last may be a fault.

    Args:
        request: What to compile and measure.
        unwanted: Returns True if nobody waits any more.
        limit_seconds: After which the compiler is ended.
    """
    if not request.parts:
        return
    ends, path = time.monotonic() + limit_seconds, os.pathsep.join(folder for folder in sys.path if folder)
    try:
        given = vars(request) | {"module": _without_values(request.module)}
        sent = dumps((torch.get_num_threads(), compiler.private_cache(), given))
    except Exception as error:  # noqa: BLE001 (whatever a user's module raises)
        yield MeasuredPart(0.0, fault=f"it cannot be sent to a process that compiles it ({error})")
        return
    command = [sys.executable, "-P", "-m", "idletrain.nn.outofcore.executing.compiling"]
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    ) as process:
        assert process.stdin
        assert process.stdout
        sending = threading.Thread(target=_send, args=(process.stdin, sent), daemon=True)
        del sent
        sending.start()
        try:
            answered = False
            for line in _lines(process.stdout.fileno(), ends, unwanted):
                answered = True
                yield MeasuredPart(**json.loads(line))
            if time.monotonic() > ends:
                yield MeasuredPart(0.0, fault=f"torch took more than {limit_seconds:.0f} s to compile it")
            elif not answered and not unwanted():
                yield MeasuredPart(0.0, fault=f"the process that compiles it ended with {process.wait()}")
        finally:
            _end(process)
            sending.join()


def _send(to: IO[bytes], content: bytes) -> None:
    """Write a request, which blocks until the process has read it or ends."""
    with contextlib.suppress(OSError):
        to.write(len(content).to_bytes(LENGTH_BYTES))
        to.write(content)
        to.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its C++ compiler, which would leave half a library under its name if it were killed at once."""
    ends = time.monotonic() + ENDING_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < ends:
            process.poll()
            os.killpg(process.pid, 0)  # raises when none of them is left
            time.sleep(POLL_SECONDS / 10)
        os.killpg(process.pid, signal.SIGKILL)


def _lines(file: int, ends: float, unwanted: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the lines of a pipe until it is closed, time is over, or nobody wants them."""
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(file, selectors.EVENT_READ)
        while time.monotonic() <= ends and not unwanted():
            if not ready.select(POLL_SECONDS):
                continue
            if not (read := os.read(file, 1 << 16)):
                return
            *whole, rest = (rest + read).split(b"\n")
            yield from whole


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters are on the meta device; buffers keep their values."""
    return copied(module, {id(p): _like(p, "meta") for p in module.parameters()})


def _like(p: nn.Parameter, device: str) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)


# --- in the process -------------------------------------------------------------------------------------------------


def main() -> None:
    """Read a request, and answer it part by part; the last answer may be a fault."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what compilers print
    with contextlib.suppress(OSError):
        FIRST_ENDED.write_text(MOST_LIKELY)
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES))
    content = sys.stdin.buffer.read(length)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    warnings.simplefilter("ignore")  # torch's compiler warns of its own code
    try:
        threads, cache, given = pickle.loads(content)
        del content
        torch.set_num_threads(threads)
        for measured in _answers(given, cache):
            print(json.dumps(measured._asdict()), file=answers, flush=True)
    except Exception as error:  # noqa: BLE001 (of a user's module, of torch's compiler, or of the C++ compiler)
        fault = MeasuredPart(0.0, fault=f"torch cannot compile it ({compiler.said(error)})")
        print(json.dumps(fault._asdict()), file=answers, flush=True)


def _answers(given: dict[str, Any], cache: Path) -> Iterator[MeasuredPart]:
    """Yield what the parts came to, until one keeps to the room."""
    bare = given["module"]
    request = Request(**given | {"module": copied(bare, {id(p): _like(p, "cpu") for p in bare.parameters()})})
    with torch.no_grad():
        for p in request.module.parameters():
            p.normal_(std=SPREAD)
            p.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    for part in request.parts:
        measured = _measure(request, part, cache)
        yield measured
        if measured.peak_bytes <= request.room_bytes:
            break


def _drop_gradient(p: Tensor) -> None:
    """Free a gradient that is ready, as a step does that has moved its parameter."""
    p.grad = None


def _measure(request: Request, part: float, cache: Path) -> MeasuredPart:
    """Compile for a part of the activations' memory, and take steps."""
    run, tried = compiler.compiled(request.module, part, cache), []
    for _ in range(1 + STEPS):
        release_freed_memory()
        peak, started = ResidentPeak(), time.perf_counter()
        args, kwargs = arguments(request.module, fresh(request.inputs))
        with unoptimized():
            torch.autograd.backward(request.loss(run(*args, **kwargs), request.target))
        tried.append((time.perf_counter() - started, peak.bytes))
    seconds, peaks = zip(*tried[1:], strict=True)
    return MeasuredPart(part, min(seconds), max(peaks))


def _end_with_starter() -> None:
    """End at once when the standard input does, as its other end is closed with the process that holds it."""
    sys.stdin.buffer.read(1)
    os.killpg(0, signal.SIGTERM)  # which a C++ compiler heeds, and deletes what it has begun


if __name__ == "__main__":
    main()
