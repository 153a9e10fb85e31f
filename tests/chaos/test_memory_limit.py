"""A true memory limit: in core the kernel ends the step, by a plan it is done, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup/memory")
ROOM_BYTES = 160 << 20  # beside what the process has once torch is loaded

STEP = """
import hashlib, os, sys, torch, torch._dynamo  # which torch's checkpoint would import
from pathlib import Path
from torch import nn
from idletrain.nn.outofcore.executing.disk import DiskSwap
from idletrain.nn.outofcore.executing.execute import Executor
from idletrain.nn.outofcore.executing.resident import release_freed_memory
from idletrain.nn.outofcore.executing.measure import measure_units
from idletrain.nn.outofcore.planning.plan import make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile
from idletrain.nn.units import Piece

how, group, scratch, room = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
release_freed_memory()
module = nn.Sequential(nn.Linear(8, 512), *(nn.Sigmoid() for _ in range(16)))
x = torch.arange(8 * 8192, dtype=torch.float32).reshape(8192, 8) / 65536
for p in module.parameters():
    nn.init.constant_(p, 0.01)
loss = lambda out: out.square().mean()
loss(module(x[:8])).backward()
module.zero_grad()
(group / "cgroup.procs").write_text(str(os.getpid()))
used = int((group / "memory.usage_in_bytes").read_text())
(group / "memory.max_usage_in_bytes").write_text("0")
(group / "memory.limit_in_bytes").write_text(str(used + room))  # what a process brought along is not counted anew
peak = 0
if how == "plan":
    pieces = [Piece(str(i), module, (layer,), follows=i > 0) for i, layer in enumerate(module)]
    swap = DiskSwap(scratch, 1 << 30)
    pieces, units = measure_units(module, pieces, x, loss)
    profile = Profile(units, swap.speed())
    plan = make_memory_plan(profile, room)
    executor = Executor(module, pieces, plan.footprint(profile), swap)
    with executor.step():
        loss(module(x)).backward()
    print("letters", "".join(plan.unit_modes), plan.peak_bytes)
else:
    loss(module(x)).backward()
print("peak", int((group / "memory.max_usage_in_bytes").read_text()) - used)
print("grad", hashlib.sha256(module[0].weight.grad.numpy().tobytes()).hexdigest())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of our own."""
    if os.geteuid() or not (CGROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("there is no memory cgroup (v1) that this user may write")
    group_path = CGROUPS / f"idletrain-test-{os.getpid()}"
    group_path.mkdir()
    yield group_path
    group_path.rmdir()


def run(how: str, group: Path, scratch: Path, room: int) -> tuple[int, dict[str, str]]:
    (group / "memory.limit_in_bytes").write_text("-1")
    command = [sys.executable, "-c", STEP, how, str(group), str(scratch), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_a_limit_that_ends_a_step_in_core_is_kept_by_a_plan(group: Path, tmp_path: Path) -> None:
    ended, _ = run("in-core", group, tmp_path, ROOM_BYTES)
    assert ended == -9  # the kernel's answer
    done, output = run("plan", group, tmp_path, ROOM_BYTES)
    assert done == 0
    assert int(output["peak"]) < ROOM_BYTES
    roomy, expected = run("in-core", group, tmp_path, 8 * ROOM_BYTES)
    assert roomy == 0
    assert int(expected["peak"]) > 1.5 * ROOM_BYTES
    assert output["grad"] == expected["grad"]
    modes, predicted = output["letters"].split()
    assert set(modes) & set("SRQ")
    assert int(output["peak"]) <= 1.1 * int(predicted)
