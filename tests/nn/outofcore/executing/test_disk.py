"""Test swapping to a disk: every byte is read back, nothing is left behind, and every fault is reported."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from idletrain.errors import DamageError
from idletrain.nn.outofcore.executing.disk import DiskSwap, ScratchError, check_free
from outofcore.networks import Case

MIB = 1 << 20


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[DiskSwap]:
    disk_swap = DiskSwap(tmp_path, 64 * MIB)
    yield disk_swap
    disk_swap.close()


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory of its own; needs root."""
    if os.geteuid():
        pytest.skip("mounting a file system needs root")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode:
        pytest.skip("this machine may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_write_that_is_not_needed_any_more_holds_no_memory(tmp_path: Path) -> None:
    gate = threading.Event()
    swap = DiskSwap(tmp_path, 64 * MIB, lambda _size: gate.wait() and None)
    first, second = (torch.ones(MIB).untyped_storage() for _ in range(2))
    blocking, waiting = swap.put(first), swap.put(second)
    weak = StorageWeakRef(second)  # type: ignore[no-untyped-call]
    gc.disable()  # what only a collection frees counts as held
    try:
        assert waiting.cancel()
        del second, waiting
        assert weak.expired()  # type: ignore[no-untyped-call]
    finally:
        gc.enable()
        gate.set()
        blocking.wait_written()
        swap.close()


def scribble(swap: DiskSwap, offset: int) -> None:
    """Change one byte of the scratch file, as a failing disk would."""
    with Path(f"/proc/self/fd/{swap._file}").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("count", [1, 1000, 1024, 1_000_003])
@pytest.mark.parametrize("skip", [0, 3])
def test_a_storage_comes_back_as_it_went(swap: DiskSwap, count: int, skip: int) -> None:
    tensor = torch.randn(count + skip)[skip:].clone()
    copy = swap.put(tensor.untyped_storage())
    copy.wait_written()
    assert copy.written()
    copy.fetch()
    back = torch.empty(0).set_(copy.fetched())
    assert torch.equal(back, tensor)
    assert back.data_ptr() != tensor.data_ptr()
    copy.drop()
    assert swap.used_bytes == 0


def test_it_passes_the_page_cache_by(swap: DiskSwap) -> None:
    if not swap.direct:
        pytest.skip("this file system refuses O_DIRECT")
    flags = int(Path(f"/proc/self/fdinfo/{swap._file}").read_text().split("flags:\t")[1].split()[0], 8)
    assert flags & os.O_DIRECT


def test_a_changed_byte_is_an_error_and_never_a_wrong_gradient(swap: DiskSwap) -> None:
    case = Case("mlp")
    from idletrain.nn.outofcore.executing.execute import Executor

    module, pieces = case.fresh()
    executor = Executor(module, pieces, case.footprint("S" * len(case.units), 200_000), swap)

    def step() -> None:
        with executor.step():
            value = case.loss(module(case.x))
            for page in range(0, swap.used_bytes, 4096):
                scribble(swap, page + 2048)
            value.backward()

    with pytest.raises(DamageError, match=r"came back from the scratch disk changed .* check that disk"):
        step()
    executor.close()


def test_a_file_system_without_direct_io_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuses(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuses)
    swap = DiskSwap(tmp_path, 4 * MIB)
    assert not swap.direct
    assert "refuses O_DIRECT, so swapping uses the page cache" in caplog.text
    tensor = torch.randn(MIB // 8)
    copy = swap.put(tensor.untyped_storage())
    copy.wait_written()
    copy.fetch()
    assert torch.equal(torch.empty(0).set_(copy.fetched()), tensor)
    copy.drop()
    swap.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_in_the_middle_of_a_step_refuses_it_with_the_bytes(tmp_path: Path) -> None:
    case = Case("mlp")
    with tmpfs(tmp_path / "small", "1m") as folder:
        swap = DiskSwap(folder, MIB)
        (folder / "other").write_bytes(b"x" * (MIB - 65536))  # someone else was quicker

        def step() -> None:
            case.run("S" * len(case.units), swap, 200_000)

        with pytest.raises(ScratchError, match=r"the disk is full, 0 MiB are free and this step needed 1 MiB more"):
            step()
        swap.close()


def test_scratch_is_bounded(swap: DiskSwap) -> None:
    held = [swap.put(torch.zeros(15 * MIB // 4).untyped_storage()) for _ in range(4)]
    with pytest.raises(ScratchError, match=r"3 of 64 MiB are free in pieces and 16 MiB are needed"):
        swap.put(torch.zeros(15 * MIB // 4).untyped_storage())
    for copy in held:
        copy.drop()


def test_missing_room_is_reported_beforehand(tmp_path: Path) -> None:
    check_free(tmp_path, 1)
    with pytest.raises(ScratchError, match=r"has \d+ MiB free and 1073741824 MiB are needed; free some"):
        DiskSwap(tmp_path, 1 << 50)
    with pytest.raises(ScratchError, match=r"cannot be used \(No such file or directory\); name a directory"):
        check_free(tmp_path / "nowhere", 1)


def test_two_in_one_folder_do_not_see_each_other(tmp_path: Path) -> None:
    swaps = [DiskSwap(tmp_path, MIB) for _ in range(2)]
    tensors = [torch.full((MIB // 8,), float(i)) for i in range(2)]
    copies = [swap.put(tensor.untyped_storage()) for swap, tensor in zip(swaps, tensors, strict=True)]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.wait_written()
        copy.fetch()
        assert torch.equal(torch.empty(0).set_(copy.fetched()), tensor)
        copy.drop()
    for swap in swaps:
        swap.close()


VICTIM = """
import sys, time, torch
from pathlib import Path
from idletrain.nn.outofcore.executing.disk import DiskSwap
swap = DiskSwap(Path(sys.argv[1]), 64 << 20)
copy = swap.put(torch.zeros(8 << 20).untyped_storage())
copy.wait_written()
print("written", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", VICTIM, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout as out:
        assert out.readline() == "written\n"
        usage = os.statvfs(tmp_path)
        assert list(tmp_path.iterdir()) == []  # no name even while it runs
        held = [fd.stat() for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert max(s.st_blocks * 512 for s in held if s.st_nlink == 0) >= 32 * MIB
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert usage.f_bsize
    assert list(tmp_path.iterdir()) == []


def test_speed_is_that_of_the_pace(tmp_path: Path) -> None:
    swap = DiskSwap(tmp_path, 64 * MIB, pace=lambda size: time.sleep(size / 200e6))
    link = swap.speed()
    swap.close()
    assert 20e6 < link.write_bytes_per_second < 200e6
    assert 20e6 < link.read_bytes_per_second < 200e6


def test_a_buffer_is_given_back_when_nothing_holds_it(swap: DiskSwap) -> None:
    tensor = torch.randn(MIB)
    copy = swap.put(tensor.untyped_storage())
    copy.wait_written()
    copy.fetch()
    address = copy.fetched().data_ptr() // 4096 * 4096
    copy.drop()
    mapped = ctypes.CDLL(None).msync(ctypes.c_void_p(address), 4096, 1) == 0  # fails on what is not mapped
    assert not mapped
