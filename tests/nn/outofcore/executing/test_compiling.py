"""A process of its own compiles and measures; what it has made is loaded where the steps are taken."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional

from idletrain.nn.compiler import compiler
from idletrain.nn.outofcore.executing.compiled import CompiledPlan
from idletrain.nn.outofcore.executing.compiling import MeasuredPart, Request, measured_parts
from idletrain.nn.outofcore.executing.trainer import Known
from outofcore.executing.test_trainer import move, planned
from outofcore.networks import Case

PART = 0.5


def small() -> Case:
    """Few kernels to compile, and no dropout, whose random numbers are others in compiled code."""
    case = Case("mlp")
    case.module = nn.Sequential(nn.Linear(case.x.shape[1], 16), nn.Linear(16, 10))
    return case


def request(case: Case) -> Request:
    return Request(case.module, functional.cross_entropy, case.x, case.y, (PART,), 1 << 30)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, by itself
@pytest.mark.skipif(bool(compiler().fault), reason="there is no C++ compiler here")
def test_steps_are_compiled_in_another_process_and_taken_here_from_the_cache(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    case = small()
    (measured,) = measured_parts(request(case), lambda: False)
    assert (measured.part, measured.fault) == (PART, "")
    assert measured.seconds > 0
    known: Known = {}
    uncompiled = planned(case, copy.deepcopy(case.module), tmp_path, 1 << 30, known)
    uncompiled.step(case.x, case.y)
    uncompiled.close()
    ((shapes, prepared),) = known.items()
    fields = {name: getattr(prepared.plan, name) for name in prepared.plan.__slots__}
    known[shapes] = replace(prepared, plan=CompiledPlan(**fields, part=PART))
    ours, plain = copy.deepcopy(case.module), copy.deepcopy(case.module)
    counters.clear()
    steps = planned(case, ours, tmp_path, 1 << 30, known)
    for _ in range(3):
        steps.step(case.x, case.y)
        plain.zero_grad()
        case.loss(plain(case.x)).backward()
        with torch.no_grad():
            for i, p in enumerate(plain.parameters()):
                move(i, p, [])
    steps.store(steps._state_file)
    steps.close()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert isinstance(steps.plan, CompiledPlan)
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


def test_a_compiler_that_takes_too_long_is_ended() -> None:
    before = set(psutil.Process().children(recursive=True))
    (measured,) = measured_parts(request(small()), lambda: False, 0.05)
    assert measured == MeasuredPart(0.0, fault="torch took more than 0 s to compile it")
    assert set(psutil.Process().children(recursive=True)) <= before


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
