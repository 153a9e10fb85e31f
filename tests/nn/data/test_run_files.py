"""Data at hand, as files that workers map."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import scipy.sparse
import torch
from torch.utils.data import TensorDataset

from idletrain.errors import JobError
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.data.run_files import RunData, read_pickled

X, Y = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4)


@pytest.mark.parametrize(
    "data", [(X, Y), {"a/b": X, "mask": X > 2, "labels": Y}, (X, X[:, :1], Y), ({"x": X, "z": X}, Y)]
)
def test_arrays_are_written_once_and_mapped_elsewhere(tmp_path: Path, data: Any) -> None:
    here = RunData(data, tmp_path / "data" / "train")
    here.write()
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")}
    RunData(data, tmp_path / "data" / "train").write()
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")} == files
    sent = cloudpickle.dumps(here)
    there = cloudpickle.loads(sent).open()
    assert all(isinstance(array, np.memmap) for array in there.parts.values())
    ours, theirs = here.open().batch(np.array([3, 1])), there.batch(np.array([3, 1]))
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("data", [(X, Y), {"a/b": X, "c": (X, [X]), "labels": Y}, (scipy.sparse.csr_array(X), Y)])
@pytest.mark.parametrize("original", ["gone", "changed"])
def test_a_run_directory_that_is_moved_or_copied_has_its_own_data(tmp_path: Path, data: Any, original: str) -> None:
    here = RunData(data, tmp_path / "runs" / "a" / "data" / "train")
    here.write()
    pickled = cloudpickle.dumps({"source": here})
    shutil.copytree(tmp_path / "runs", tmp_path / "moved")
    for file in (tmp_path / "runs").rglob("*.npy"):
        file.unlink() if original == "gone" else file.write_bytes(b"")
    there = read_pickled(pickled, tmp_path / "moved" / "a")["source"].open()
    index = np.array([3, 1])
    assert str(there.batch(index)) == str(here.open().batch(index))
    assert all(Path(array.filename).is_relative_to(tmp_path / "moved") for array in there.parts.values())


def test_other_data_for_the_same_run_are_refused(tmp_path: Path) -> None:
    RunData({"x": X, "labels": Y}, tmp_path / "data" / "train").write()
    with pytest.raises(JobError, match=r"train: is not the data that the run in .* began with; give that or another"):
        RunData({"x": X, "labels": Y + 1}, tmp_path / "data" / "train").write()


def test_a_dataset_travels_as_it_is_with_its_collate_fn(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.tensor(X), torch.tensor(Y))

    def doubled(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]) * 2, torch.stack([y for _, y in items])

    here = RunData(dataset, tmp_path / "train", doubled)
    here.write()
    assert not (tmp_path / "train").exists()
    there = read_pickled(cloudpickle.dumps(here), tmp_path / "elsewhere").open()
    assert isinstance(there, MapStyleSource)
    assert there.batch(np.array([3]))[0].tolist() == [[12.0, 14.0]]
