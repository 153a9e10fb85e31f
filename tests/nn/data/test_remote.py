"""Data in S3 are fetched once a machine, whole, and as they were when the run began."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rehearsal import Sandbox

from idletrain.errors import JobError
from idletrain.job import DataSettings, ModelSettings, TrainingSettings
from idletrain.nn.data import remote
from idletrain.nn.data.arrays import FileSource
from idletrain.nn.prepare import from_settings
from idletrain.storage import S3Prefix

X, Y = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32), np.arange(40) % 3
FIELD = "data.train"


@pytest.fixture
def train(prefix: S3Prefix, tmp_path: Path) -> str:
    """Samples in the account's bucket."""
    np.savez(tmp_path / "train.npz", x=X, y=Y)
    prefix.put_file("train.npz", tmp_path / "train.npz")
    return f"{prefix.url}train.npz"


def calls(cloud: Sandbox, action: str) -> int:
    count: int = cloud.ask("GET", "calls").get("s3", {}).get(action, 0)
    return count


def test_samples_are_memory_mapped_and_fetched_once(cloud: Sandbox, train: str) -> None:
    remote_data = remote.find_remote(train, FIELD)
    source: FileSource = pickle.loads(
        pickle.dumps(FileSource(remote_data, remote_data, FIELD))
    )  # as it comes to a worker
    cloud.ask("POST", "calls/reset")
    for _ in range(2):
        samples = source.open()
        assert isinstance(samples.x, np.memmap)
        assert np.array_equal(samples.x, X)
        assert np.array_equal(samples.y, Y)
    assert calls(cloud, "GetObject") == 1


def test_of_several_workers_of_a_machine_one_fetches(cloud: Sandbox, train: str, tmp_path: Path) -> None:
    remote_data = remote.find_remote(train, FIELD)
    cloud.ask("POST", "calls/reset")
    copies: list[Path] = []
    threads = [
        threading.Thread(target=lambda: copies.append(remote_data.download(tmp_path / "s3", FIELD))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies) == 4
    assert len(set(copies)) == 1
    assert calls(cloud, "GetObject") == 1


def test_what_was_replaced_since_the_start_is_refused(train: str, prefix: S3Prefix, tmp_path: Path) -> None:
    remote_data = remote.find_remote(train, FIELD)
    prefix.put("train.npz", b"another")
    with pytest.raises(JobError, match=r"data\.train: s3://.*train\.npz cannot be read: it was replaced while"):
        remote_data.download(tmp_path / "s3", FIELD)
    assert not list((tmp_path / "s3").glob("*.npz"))
    assert remote.find_remote(train, FIELD) != remote_data


@pytest.mark.parametrize("damage", [{"size_bytes": 5}, {"hashed": True, "tag": None}])
def test_what_comes_damaged_is_refused_and_not_kept(
    train: str, tmp_path: Path, damage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_data = remote.find_remote(train, FIELD)
    if "tag" in damage:  # the bytes on the way, not what S3 has

        class Digest:
            def update(self, _chunk: bytes) -> None: ...

            def hexdigest(self) -> str:
                return "0" * 32

        monkeypatch.setattr("idletrain.storage.hashlib.md5", lambda **_: Digest())
    else:
        remote_data = replace(remote_data, stored=replace(remote_data.stored, **damage))
    with pytest.raises(JobError, match="came damaged; try again"):
        remote_data.download(tmp_path / "s3", FIELD)
    assert not list((tmp_path / "s3").glob("*.npz"))


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("s3://idletrain-123456789012-eu-west-1/data/none.npz", "there is no such object; name one that is there"),
        ("s3://idletrain-no-such-bucket/train.npz", "there is no such (bucket|object); name one that is there"),
        ("s3://only-a-bucket", "should be s3://bucket/key"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(account: Any, url: str, arguments: str) -> None:
    with pytest.raises(JobError, match=rf"data\.train: .*{arguments}"):
        remote.find_remote(url, FIELD)


def test_what_may_not_be_read_is_refused(cloud: Sandbox, train: str) -> None:
    cloud.ask("POST", "fault", action="HeadObject", code="403", status=403, times=1)
    with pytest.raises(JobError, match="this account may not read it"):
        remote.find_remote(train, FIELD)


def test_a_job_names_them_like_files(train: str, prefix: S3Prefix) -> None:
    model = ModelSettings(factory="idletrain.nn.models:mlp", args={"widths": [6, 8, 3]})
    prepared = from_settings(model, DataSettings(train=train, test=train), TrainingSettings(subnets=2, batch_size=4))
    assert prepared.test
    assert len(prepared.program.source.open()) == len(prepared.test.open()) == 40  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"data\.test: .*there is no such object"):
        from_settings(model, DataSettings(train=train, test=f"{prefix.url}none.npz"), TrainingSettings())
