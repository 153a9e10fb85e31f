"""A process of its own compiles and measures; what it has made is loaded where the steps are taken."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional

from idletrain.nn.compiler import compiler
from idletrain.nn.outofcore.executing.compiled import LIBRARY_BYTES, CompiledForward, CompiledPlan
from idletrain.nn.outofcore.executing.compiling import LENGTH_BYTES, MeasuredPart, Request, measured_parts
from idletrain.nn.outofcore.executing.trainer import Known, PlannedSteps
from outofcore.executing.test_trainer import move, planned
from outofcore.networks import Case

PART = 0.5


@pytest.fixture(autouse=True)
def _unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests in this process plan as if no code had been loaded."""
    monkeypatch.setattr(CompiledForward, "_is_loaded", False)


def small(dropout: float = 0.0) -> Case:
    """Few kernels to compile."""
    case = Case("mlp")
    case.module = nn.Sequential(nn.Linear(case.x.shape[1], 16), nn.Dropout(dropout), nn.Linear(16, 10))
    return case


def request(case: Case) -> Request:
    return Request(case.module, functional.cross_entropy, case.x, case.y, (PART,), 1 << 30)


def known_compiled(case: Case, scratch: Path) -> Known:
    """Return what a worker knows after its trials have chosen compiled code for such batches."""
    known: Known = {}
    uncompiled = planned(case, copy.deepcopy(case.module), scratch, 1 << 30, known)
    uncompiled.step(case.x, case.y)
    uncompiled.close()
    ((shapes, prepared),) = known.items()
    fields = {name: getattr(prepared.plan, name) for name in prepared.plan.__slots__}
    known[shapes] = replace(prepared, plan=CompiledPlan(**fields, part=PART, shapes=tuple(case.x.shape)))
    return known


def trained(case: Case, scratch: Path, known: Known, lengths: Sequence[int] = (0, 0, 0)) -> tuple[PlannedSteps, Any]:
    """Return steps on batches without so many of their first samples, and the module after them."""
    module = copy.deepcopy(case.module)
    steps = planned(case, module, scratch, 1 << 30, known)
    torch.manual_seed(3)
    for length in lengths:
        steps.step(case.x[length:], case.y[length:])
    steps.store(steps._state_file)
    steps.close()
    return steps, module.state_dict()


def plain(case: Case, lengths: Sequence[int] = (0, 0, 0)) -> Any:
    module = copy.deepcopy(case.module)
    for length in lengths:
        module.zero_grad()
        functional.cross_entropy(module(case.x[length:]), case.y[length:]).backward()
        with torch.no_grad():
            for i, p in enumerate(module.parameters()):
                move(i, p, [])
    return module.state_dict()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("idletrain.")]


def alike(ours: Any, theirs: Any) -> bool:
    return all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, by itself
@pytest.mark.skipif(bool(compiler().fault), reason="there is no C++ compiler here")
def test_steps_are_compiled_in_another_process_and_taken_here_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._dynamo.utils import counters

    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    case = small()
    (measured,) = measured_parts(request(case), lambda: False)
    assert (measured.part, measured.fault) == (PART, "")
    assert measured.seconds > 0
    assert not list((tmp_path / "tmp").glob("torchinductor_*"))  # a folder that another user may have made
    counters.clear()
    known = known_compiled(case, tmp_path)
    steps, ours = trained(case, tmp_path, known)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert isinstance(steps.plan, CompiledPlan)
    assert alike(ours, plain(case))
    assert logged(caplog) == []
    assert CompiledForward.library_bytes() == LIBRARY_BYTES

    lengths = (0, 3, 0)  # the second batch has other shapes
    steps, ours = trained(case, tmp_path, known, lengths)
    assert steps.plan
    assert not isinstance(steps.plan, CompiledPlan)
    assert not any(isinstance(prepared.plan, CompiledPlan) for prepared in known.values())
    assert alike(ours, plain(case, lengths))
    (said,) = logged(caplog)
    assert said.startswith("memory.compile: steps follow a plan from now on, as a batch has the shapes")
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, by itself
@pytest.mark.skipif(bool(compiler().fault), reason="there is no C++ compiler here")
def test_what_is_not_in_the_cache_is_not_compiled_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from torch._dynamo.utils import counters

    case = small()
    case.module = nn.Sequential(case.module, nn.Linear(10, 7), nn.Softsign(), nn.Linear(7, 10))  # in no other test
    counters.clear()
    steps, ours = trained(case, tmp_path, known_compiled(case, tmp_path))
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1
    assert not isinstance(steps.plan, CompiledPlan)
    assert alike(ours, plain(case))
    (said,) = logged(caplog)
    assert "what was compiled cannot be loaded" in said
    assert "it is not in torch's cache" in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, by itself
@pytest.mark.skipif(bool(compiler().fault), reason="there is no C++ compiler here")
def test_random_numbers_of_compiled_steps_follow_from_the_seed(tmp_path: Path) -> None:
    case = small(dropout=0.5)
    (measured,) = measured_parts(request(case), lambda: False)
    assert measured.fault == ""
    known, ends = known_compiled(case, tmp_path), []
    for _ in range(2):
        torch._dynamo.reset()  # so that it is loaded anew
        steps, end = trained(case, tmp_path, known)
        assert isinstance(steps.plan, CompiledPlan)
        ends.append(end)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not alike(ends[0], plain(small()))


class Slow:
    """Takes a minute to be unpickled."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


def test_the_compiler_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    content = pickle.dumps(Slow())
    (tmp_path / "request").write_bytes(len(content).to_bytes(LENGTH_BYTES) + content)
    starter = (
        "import pathlib, subprocess, sys, time\n"
        "command = [sys.argv[1], '-P', '-m', 'idletrain.nn.outofcore.executing.compiling']\n"
        "p = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)\n"
        "p.stdin.write(pathlib.Path(sys.argv[2]).read_bytes())\n"
        "p.stdin.flush()\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-S", "-c", starter, sys.executable, str(tmp_path / "request")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        score = Path(f"/proc/{child.pid}/oom_score_adj")
        while score.read_text().strip() != "1000":  # it has begun
            time.sleep(0.01)
        process.kill()
    _, alive = psutil.wait_procs([child], 10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_compiler_that_takes_too_long_is_ended() -> None:
    before = set(psutil.Process().children(recursive=True))
    (measured,) = measured_parts(request(small()), lambda: False, 0.05)
    assert measured == MeasuredPart(0.0, fault="torch took more than 0 s to compile it")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_what_the_process_fails_with_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idletrain.nn.outofcore.executing.compiling.dumps", lambda _: pickle.dumps((1, Path(), {})))
    (measured,) = measured_parts(request(small()), lambda: False)
    assert measured.fault == "torch cannot compile it ('module')"


def test_nobody_waits_for_a_compiler_whose_steps_are_not_wanted() -> None:
    assert list(measured_parts(request(small()), lambda: True)) == []


def test_a_module_that_cannot_travel_is_left_uncompiled() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    own = Request(Locked(), functional.cross_entropy, None, None, (PART,), 1)
    (measured,) = measured_parts(own, lambda: False)
    assert "cannot be sent to a process that compiles it" in measured.fault
