"""A run that goes on says so if its data have changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from idletrain.cli.main import app
from idletrain.data_files import SAMPLE_BYTES, changed_files, file_digests


def test_a_file_s_digest_follows_from_its_content_alone(tmp_path: Path) -> None:
    one, same, longer = (tmp_path / name for name in ("one", "same", "longer"))
    one.write_bytes(b"a" * 100)
    same.write_bytes(b"a" * 100)
    longer.write_bytes(b"a" * 101)
    digests = file_digests(map(str, (one, same, longer)))
    assert digests[str(one)] == digests[str(same)] != digests[str(longer)]


@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_a_large_file_is_sampled_everywhere(place: float, tmp_path: Path) -> None:
    file = tmp_path / "large"
    content = bytearray(64 * SAMPLE_BYTES)
    file.write_bytes(content)
    before = file_digests([str(file)])
    start = int(place * len(content))
    content[start : start + len(content) // 10] = b"b" * len(content[start : start + len(content) // 10])
    file.write_bytes(content)
    assert changed_files(before, file_digests([str(file)])) == [str(file)]


def test_what_is_no_file_here_is_left_out(tmp_path: Path) -> None:
    assert file_digests([str(tmp_path), "s3://bucket/x.npy", str(tmp_path / "none")]) == {}
    assert changed_files({"a": "1"}, {"b": "2"}) == []


def test_a_run_that_goes_on_with_other_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = {"method": "ist", "subnets": 2, "local_steps": 2, "rounds": 1, "loss": "mse"}
    tree: dict[str, Any] = {
        "name": "r",
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [8, 16, 1]}},
        "data": {"train": "a.npz"},
        "training": {**training, "optimizer": {"name": "sgd", "lr": 0.01}},
        "nodes": {"count": 1},
    }

    def write(seed: int) -> None:
        draw = np.random.default_rng(seed)
        np.savez("a.npz", x=draw.normal(size=(64, 8)).astype("f4"), y=draw.normal(size=(64, 1)).astype("f4"))

    def launch(rounds: int, *options: str) -> list[str]:
        tree["training"]["rounds"] = rounds
        Path("job.yaml").write_text(yaml.safe_dump(tree))
        done = CliRunner().invoke(app, ["launch", "job.yaml", "--json", *options])
        assert done.exit_code == 0, done.output
        events = [json.loads(line) for line in Path("runs/r/events.jsonl").read_text().splitlines()]
        return [event["reason"] for event in events if event["kind"] == "warning"]

    write(0)
    assert launch(1) == []
    assert launch(2, "--resume") == []
    write(1)
    assert launch(3, "--resume") == ["a.npz has changed since the run began; further rounds train what is new"]
