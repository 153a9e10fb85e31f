"""Find the C++ compiler that `torch.compile` uses on a CPU, and compile modules into a folder of this user's own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from idletrain import storage
from idletrain.errors import RunError

CHECK_SECONDS = 20.0  # for a program of one line and the version; on a busy machine of two cores it took 2
COMMAND = "clang++" if sys.platform == "darwin" else "g++"  # torch's own choice (torch/_inductor/config.py)
CPU_INFO = Path("/proc/cpuinfo")
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILATIONS = 64  # of one module's code, for widths and parts of memory; torch would go on uncompiled after 8
# What code that torch generates needs: its loaders include Python's header, its loops OpenMP's.
SOURCE = (
    '#include <Python.h>\n#include <omp.h>\n#include <cmath>\nextern "C" double f(double x) { return std::exp(x); }\n'
)


class Compiler(NamedTuple):
    """A C++ compiler: its version, as it tells it; or, with an empty one, why none can be used."""

    version: str
    fault: str = ""


def compiler() -> Compiler:
    """Return the C++ compiler that torch takes here; it is tried once in a process, on one line."""
    return tried_compiler(os.environ.get("CXX") or COMMAND)


@functools.cache
def tried_compiler(command: str) -> Compiler:
    """Return what a C++ compiler is, after it has made a library of one line."""
    flags = ["-x", "c++", "-", "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
    ends = time.monotonic() + CHECK_SECONDS
    try:
        with tempfile.TemporaryDirectory(prefix="idletrain-compiler-") as folder:
            failed, _, said = _ran([command, *flags, "-o", f"{folder}/one.so"], ends)
        if failed:
            return Compiler("", f"{command} does not compile a line of C++ ({_error_in(said)})")
        _, version, _ = _ran([command, "--version"], ends)
        return Compiler(version.partition("\n")[0].strip() or command)
    except subprocess.TimeoutExpired:
        return Compiler("", f"{command} took more than {CHECK_SECONDS:.0f} s for a line of C++")
    except OSError as error:
        return Compiler("", f"{command} cannot be run ({error.strerror})")


def _ran(command: list[str], ends: float) -> tuple[int, str, str]:
    """Run a command on the line until a time at most; return its exit code and what it wrote to both outputs.

    What it starts ends with it: a wrapper's compiler would hold the outputs open.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            out, error = process.communicate(SOURCE, timeout=ends - time.monotonic())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, error


def _error_in(text: str) -> str:
    """Return the line of a compiler's output that says what is wrong."""
    lines = text.splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[-1]).strip()


def compiled(
    module: nn.Module, part: float | None = None, cache: Path | None = None, *, only_loads: bool = False
) -> Callable[..., Any]:
    """Return a module's forward as code that `torch.compile` makes of it, when it is first run.

    What is compiled is found again by its shapes, in this process and in later ones.

    Args:
        module: The module.
        part: The part of its activations' memory that a step may take; what is beyond is recomputed. The module must
            then be one graph. All of it, and as many graphs as need be, when None.
        cache: The folder of what is compiled; `private_cache` when None.
        only_loads: With a part, take what another process has compiled; where there is none, the call fails.
    """
    os.environ[CACHE_VARIABLE] = str(cache or private_cache())
    from torch._dynamo import config as limits  # with the next, 70 MB, which only who compiles should pay
    from torch._inductor import config

    config.compile_threads = 1  # more are processes, which outlive a worker that is killed
    config.cpp_cache_precompile_headers = False  # torch keeps them in /tmp, under a name that others may take
    limits.recompile_limit = COMPILATIONS
    if part is None:
        return torch.compile(module, dynamic=False)
    return torch.compile(module, backend=_within(part, only_loads=only_loads), dynamic=False, fullgraph=True)


@functools.cache
def _within(part: float, *, only_loads: bool) -> Callable[..., Any]:
    """Return the backend that keeps to a part of the activations' memory: one for each, as torch tells code by it."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=part):
            return compile_fx(graph, inputs, inner_compile=_refuse if only_loads else compile_fx_inner)

    return compile_graph


def said(error: Exception) -> str:
    """Return what torch's compiler says in one line: some errors tell their cause in the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _refuse(*_args: Any, **_options: Any) -> Any:
    """Fail in the place of the compiler, which runs only for what is not in the cache."""
    raise RunError("it is not in torch's cache")


@functools.cache
def private_cache() -> Path:
    """Return a folder for compiled code that nobody else can write to: torch loads what it finds there.

    It is the one of `TORCHINDUCTOR_CACHE_DIR`, if that is the user's own; else one in this user's cache, for this kind
    of machine. torch's choice is a folder of a known name in /tmp, which another user may have made. Where the cache is
    of no use, it is a new folder that is deleted with the process.
    """
    ours = storage.cache_folder() / "torch"
    given = Path(os.environ.get(CACHE_VARIABLE) or ours)
    with contextlib.suppress(OSError):
        if ours not in (given, given.parent) and _is_private(given):  # or a process before this one has set it
            return given
    with contextlib.suppress(OSError):
        storage.make_private(ours)
        if _is_private(ours):
            folder = ours / machine_digest()
            storage.make_private(folder)
            return folder
    _temporary.append(tempfile.TemporaryDirectory(prefix="idletrain-torch-"))
    return Path(_temporary[-1].name)


def machine_digest() -> str:
    """Return a short name of all machines that may run what is compiled on this one: homes are shared by others."""
    flags = _cpu_info("flags") or _cpu_info("Features")  # code is made for the processor at hand (-march=native)
    told = (platform.machine(), cpu_model(), flags, torch.__version__, compiler().version)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def cpu_model() -> str:
    """Return the processor's name."""
    return _cpu_info("model name") or platform.processor()


def _cpu_info(field: str) -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


_temporary: list[tempfile.TemporaryDirectory[str]] = []  # deleted as the process ends


def _is_private(folder: Path) -> bool:
    """Return whether a path is a directory of this user's, that no other can enter."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
