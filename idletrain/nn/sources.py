"""Find the training and test data that a job's settings name: a data set, files, a folder or a factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from idletrain.errors import JobError
from idletrain.job import DataSettings
from idletrain.nn.data import remote
from idletrain.nn.data.arrays import FileSource, Source
from idletrain.nn.data.extreme import SparseFiles, sparse_names
from idletrain.nn.data.given import FactorySource
from idletrain.nn.data.images import FolderSource
from idletrain.nn.data.known import digits, fashion_mnist
from idletrain.nn.data.remote import Remote
from idletrain.nn.faults import FAULTY, FaultCollector, resolve


def of_settings(faults: FaultCollector, data: DataSettings) -> tuple[Any, Any]:
    """Return the sources of training and test data (None without), each FAULTY if it is not available."""
    faulty = (FAULTY, FAULTY)
    if faults.check(_check_choice, data) is FAULTY:
        return faulty
    if data.name == "digits":
        return FactorySource(digits, 0), FactorySource(digits, 1)
    if data.name == "fashion-mnist":
        sources = faults.check(fashion_mnist, data.path)
        return faulty if sources is FAULTY else sources
    if data.factory is not None:
        factory = faults.check(resolve, data.factory, "data.factory")
        return faults.check(FactorySource, factory, 0, data.args), faults.check(_test_of_factory, factory, data.args)
    train = faults.check(_files, data.train, "data.train", data, None)
    test = None if data.test is None else faults.check(_files, data.test, "data.test", data, data.test_rows)
    if isinstance(train, FolderSource) and isinstance(test, FolderSource):
        images = faults.check(train.open)
        test = test if images is FAULTY else replace(test, classes=images.dataset.classes)
    return train, test


def _test_of_factory(factory: Callable[..., Any], args: dict[str, Any]) -> Source | None:
    """Return the source of a factory's test data, None if it makes none."""
    source = FactorySource(factory, 1, args)
    return None if source.parts()[1] is None else source


def _check_choice(data: DataSettings) -> None:
    """Check that the job names its data in one way only, and sets no field that belongs to another way."""
    chosen = [f for f in ("name", "train", "factory") if getattr(data, f) is not None]
    if len(chosen) != 1:
        raise JobError(f"data: has {' and '.join(chosen) or 'neither'}; give one of name, train (with test) or factory")
    of_images = isinstance(data.train, str) and Path(data.train).is_dir()
    owners = {"path": data.name == "fashion-mnist", "test": data.train is not None, "args": data.factory is not None}
    owners |= {"image_size": of_images, "num_workers": of_images}
    folder = "a folder of images in train"
    needs = {"path": "name: fashion-mnist", "test": "train", "args": "factory"}
    needs |= {"image_size": folder, "num_workers": folder}
    strays = [
        f"data.{field}: {getattr(data, field)!r} goes with {needs[field]} alone; leave it out"
        for field, belongs in owners.items()
        if getattr(data, field) and not belongs
    ]
    if strays:
        raise JobError(strays)


def _files(where: str | tuple[str, str], field: str, data: DataSettings, most_rows: int | None) -> Source:
    if names := sparse_names(where):
        return SparseFiles(tuple(_pinned(name, field) for name in names), field, data.empty, most_rows)
    if most_rows is not None:
        raise JobError(f"data.test_rows: {most_rows} goes with sparse rows alone; leave it out")
    if isinstance(where, tuple):
        return FileSource(_pinned(where[0], field), _pinned(where[1], field), field=field)
    if Path(where).is_dir():
        return FolderSource(where, field, data.image_size, num_workers=data.num_workers)
    if not where.endswith(".npz"):
        raise JobError(
            f"{field}: {where!r} should be an .npz file, a pair [inputs, labels] of .npy or IDX files, a folder of "
            "images, or sparse rows: an extreme-classification .txt, or a pair of CSR .npz; read other files, such as "
            "CSV, by a function that data.factory names"
        )
    both = _pinned(where, field)
    return FileSource(both, both, field=field)


def _pinned(where: str, field: str) -> str | Remote:
    return remote.find_remote(where, field) if where.startswith(remote.SCHEME) else where
