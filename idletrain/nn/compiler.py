"""Find the C++ compiler that `torch.compile` uses on a CPU, and compile modules into a folder of this user's own."""

from __future__ import annotations

import functools
import os
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from idletrain import storage

CHECK_SECONDS = 20.0  # for a program of one line; on a busy machine of two cores it took 2
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
    return tried_compiler(os.environ.get("CXX") or "g++")


@functools.cache
def tried_compiler(command: str) -> Compiler:
    """Return what a C++ compiler is, after it has made a library of one line."""
    flags = ["-x", "c++", "-", "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
    try:
        with tempfile.TemporaryDirectory(prefix="idletrain-compiler-") as folder:
            made = _ran([command, *flags, "-o", f"{folder}/one.so"])
        if made.returncode:
            return Compiler("", f"{command} does not compile a line of C++ ({_error_in(made.stderr)})")
        return Compiler(_ran([command, "--version"]).stdout.partition("\n")[0].strip() or command)
    except subprocess.TimeoutExpired:
        return Compiler("", f"{command} took more than {CHECK_SECONDS:.0f} s for a line of C++")
    except OSError as error:
        return Compiler("", f"{command} cannot be run ({error.strerror})")


def _ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=SOURCE, capture_output=True, text=True, errors="replace", timeout=CHECK_SECONDS, check=False
    )


def _error_in(text: str) -> str:
    """Return the line of a compiler's output that says what is wrong."""
    lines = text.splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[-1]).strip()


def compiled(module: nn.Module, part: float | None = None, cache: Path | None = None) -> Callable[..., Any]:
    """Return a module's forward as code that `torch.compile` makes of it, when it is first run.

    What is compiled is found again by its shapes, in this process and in later ones.

    Args:
        module: The module.
        part: The part of its activations' memory that a step may take; what is beyond is recomputed. The module must
            then be one graph. All of it, and as many graphs as need be, when None.
        cache: The folder of what is compiled; `private_cache` when None.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache or private_cache())
    from torch._dynamo import config as limits  # with the next, 70 MB, which only who compiles should pay
    from torch._inductor import config

    config.compile_threads = 1  # more are processes, which outlive a worker that is killed
    limits.recompile_limit = COMPILATIONS
    if part is None:
        return torch.compile(module, dynamic=False)
    return torch.compile(module, backend=_within(part), dynamic=False, fullgraph=True)


@functools.cache
def _within(part: float) -> Callable[..., Any]:
    """Return the backend that keeps to a part of the activations' memory: one for each, as torch tells code by it."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=part):
            return compile_fx(graph, inputs)

    return compile_graph


@functools.cache
def private_cache() -> Path:
    """Return a folder for compiled code that nobody else can write to: torch loads what it finds there.

    Its own choice is a folder of a known name in /tmp, which another user may have made. Where this user's cache is of
    no use, it is a new folder that is deleted with the process.
    """
    folder = storage.cache_folder() / "torch"
    try:
        storage.make_private(folder)
        if _is_private(folder):
            return folder
    except OSError:
        pass
    _temporary.append(tempfile.TemporaryDirectory(prefix="idletrain-torch-"))
    return Path(_temporary[-1].name)


_temporary: list[tempfile.TemporaryDirectory[str]] = []  # deleted as the process ends


def _is_private(folder: Path) -> bool:
    """Return whether a path is a directory of this user's, that no other can enter."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
