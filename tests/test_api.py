"""A module and data go in, the trained module comes out: real workers, a run of a few rounds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import idletrain
from idletrain.errors import JobError, RunError
from idletrain.export import LoadedRun, load_run
from idletrain.nn.data.arrays import digits
from idletrain.observe.records import Record
from idletrain.storage import has_head


def make_net() -> nn.Module:
    """A module of a class that workers cannot import: it travels by value, as one of a script or notebook does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)

        def forward(self, x_BI: Tensor) -> Tensor:
            logits: Tensor = self.last(torch.relu(self.norm(self.first(x_BI))))
            return logits

    return Net()


def locked() -> Any:
    """A loss that holds a lock."""
    lock = threading.Lock()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        with lock:
            return nn.functional.cross_entropy(outputs, labels)

    return loss


def make_dataset(part: tuple[Any, Any]) -> Any:
    """Digits as a map-style Dataset of (tensor, int)."""

    class Digits(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(part[1])

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.from_numpy(part[0][i]), int(part[1][i])

    return Digits()


def accuracy_of(module: nn.Module, test: tuple[Any, Any]) -> float:
    with torch.no_grad():
        return float((module(torch.from_numpy(test[0])).argmax(1).numpy() == test[1]).mean())


def test_fit_trains_a_local_class_with_adamw_and_gives_back_what_it_reports(tmp_path: Path) -> None:
    train, test = digits()
    torch.manual_seed(0)
    module = make_net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    seen: list[str] = []
    result = idletrain.fit(
        module,
        train,
        test,
        subnets=2,
        local_steps=10,
        rounds=6,
        batch_size=32,
        optimizer={"name": "adamw", "lr": 0.005},
        workers=2,
        name="local-class",
        run_dir=tmp_path,
        on_event=lambda event: seen.append(event["kind"]),
    )
    assert result.summary["status"] == "completed"
    assert result.summary["rounds"] == 6
    assert result.summary["local_steps"] == 6 * 2 * 10
    assert accuracy_of(module.eval(), test) < 0.3
    assert accuracy_of(result.module, test) > 0.7
    assert accuracy_of(result.module, test) == pytest.approx(result.summary["accuracy"], abs=1e-6)
    assert not result.module.training
    assert type(result.module) is type(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert seen == [event["kind"] for event in result.records]
    assert {"run_started", "worker_joined", "leased", "staged", "round_committed", "run_ended"} <= set(seen)
    assert result.run_dir == tmp_path / "local-class"


def test_fit_takes_a_map_style_dataset_and_a_loss_of_one_s_own(tmp_path: Path) -> None:
    train, test = digits()
    on_the_way: list[LoadedRun] = []

    def load(event: Record) -> None:
        if event["kind"] == "round_committed":
            on_the_way.append(load_run(tmp_path / "own"))

    result = idletrain.fit(
        make_net(),
        make_dataset(train),
        make_dataset(test),
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1),
        subnets=2,
        local_steps=10,
        rounds=3,
        batch_size=32,
        workers=2,
        name="own",
        run_dir=tmp_path,
        on_event=load,
        training={"exchange": {"push": "bf16"}},
    )
    assert result.summary["status"] == "completed"
    assert json.loads((result.run_dir / "job.json").read_text())["training"]["exchange"]["push"] == "bf16"
    assert result.summary["accuracy"] == pytest.approx(accuracy_of(result.module, test), abs=1e-6)
    assert result.summary["accuracy"] > 0.3
    assert [loaded.rounds for loaded in on_the_way] == [1, 2, 3]
    assert on_the_way[0].score().accuracy < result.summary["accuracy"]
    after = load_run(result.run_dir)
    assert after.score().accuracy == pytest.approx(result.summary["accuracy"], abs=1e-6)
    state = after.module().state_dict()
    assert all(torch.equal(state[name], value) for name, value in result.module.state_dict().items())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"rounds": 0}, "training.rounds: 0 should be greater than or equal to 1"),
        ({"loss": "nil"}, "training.loss: 'nil' should be one of"),
        ({"subnets": 33}, "training.subnets: 33 is more than the 32 neurons of group first"),
        ({"test": (np.zeros((3, 64), np.float32), np.zeros(2))}, "data: 3 inputs and 2 labels"),
        ({"loss": 3}, "training.loss: 3 should be a name or a function"),
        (
            {"loss": locked()},
            "fit: cannot travel to workers (cannot pickle '_thread.lock' object); keep open",
        ),
        ({"training": {"exchange": {"push": "int2"}}}, "training.exchange.push: 'int2' should be 'fp32', 'bf16'"),
        ({"checkpiont": {}}, "checkpiont: is not a field of a job; did you mean checkpoint?"),
    ],
)
def test_fit_refuses_before_anything_is_made(tmp_path: Path, asked: dict[str, Any], told: str) -> None:
    test = asked.pop("test", None)
    with pytest.raises(JobError) as caught:
        idletrain.fit(make_net(), digits()[0], test, run_dir=tmp_path / "runs", **asked)
    assert str(caught.value).startswith(told)
    assert not (tmp_path / "runs").exists()


def test_a_sample_that_cannot_be_read_ends_the_run_with_its_error(tmp_path: Path) -> None:
    train, _ = digits()

    class Damaged(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(train[1])

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            if i == 700:
                raise OSError("image file is truncated")  # as Pillow does, without a number
            return torch.from_numpy(train[0][i]), int(train[1][i])

    events: list[dict[str, Any]] = []
    with pytest.raises(RunError, match=r"fails on every worker.*image file is truncated"):
        idletrain.fit(
            make_net(),
            Damaged(),
            subnets=2,
            local_steps=30,
            rounds=3,
            batch_size=32,
            workers=2,
            run_dir=tmp_path,
            on_event=events.append,
        )
    assert [event["status"] for event in events if event["kind"] == "run_ended"] == ["failed"]


def test_in_a_notebook_ctrl_c_stops_the_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    """There an event loop runs already, and the run has a thread of its own."""
    train, _ = digits()
    seen: list[str] = []

    def interrupt(event: dict[str, Any]) -> None:
        seen.append(event["kind"])
        if event["kind"] == "round_committed" and event["round"] == 1:
            os.kill(os.getpid(), signal.SIGINT)  # to the process, as a terminal does: the main thread takes it

    async def cell() -> None:
        idletrain.fit(
            make_net(), train, subnets=2, local_steps=20, rounds=2000, workers=2, name="nb", run_dir=tmp_path,
            on_event=interrupt,
        )  # fmt: skip

    handler = signal.getsignal(signal.SIGINT)
    loop = asyncio.new_event_loop()  # asyncio.run would take SIGINT for itself, which a notebook's kernel does not
    try:
        with pytest.raises(KeyboardInterrupt, match=r"stopped after round \d+; fit\(name='nb', resume=True\) goes on"):
            loop.run_until_complete(cell())
    finally:
        loop.close()
        signal.signal(signal.SIGINT, handler)
    assert seen[-1] == "run_ended"
    assert not has_head(tmp_path / "nb")


def test_a_run_s_files_are_neither_rewritten_while_it_goes_on_nor_exchanged_afterwards(tmp_path: Path) -> None:
    train, _ = digits()
    torch.manual_seed(0)
    module = make_net()
    refused: list[str] = []

    def files() -> dict[str, tuple[int, int]]:
        kept = [tmp_path / "r" / "program.pkl", *(tmp_path / "r" / "data").rglob("*.npy")]
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept}

    def go_on(data: Any, rounds: int, on_event: Any = None, *, resume: bool = True) -> None:
        asked: dict[str, Any] = {"subnets": 1, "local_steps": 2, "batch_size": 32, "workers": 1, "name": "r"}
        idletrain.fit(module, data, rounds=rounds, run_dir=tmp_path, resume=resume, on_event=on_event, **asked)

    def second(event: Record) -> None:
        if event["kind"] == "round_committed":
            before = files()
            with pytest.raises(RunError, match="is going on in process") as caught:
                go_on((train[0] + 1, train[1]), 9)
            refused.append(str(caught.value))
            assert files() == before

    go_on(train, 1, second, resume=False)
    assert len(refused) == 1
    before = files()
    assert len(before) == 3
    with pytest.raises(JobError, match=r"^train: is not the data that the run in .* began with; give that or another"):
        go_on((train[0] + 1, train[1]), 2)
    assert files() == before


def test_a_scheduler_that_cannot_be_reached_is_named_before_any_data_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idletrain.providers.scheduler.CLUSTER_CONNECT_SECONDS", 1)
    with pytest.raises(JobError, match=r"--scheduler: tcp://127\.0\.0\.1:1 cannot be reached"):
        idletrain.fit(make_net(), digits()[0], scheduler="tcp://127.0.0.1:1", run_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_regression_without_norm_ends_as_it_would_in_plain_torch_with_fit_s_defaults(tmp_path: Path) -> None:
    """Four subnets of a plain MLP; without sums of the right size its outputs were 15 times too large."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 16)).astype(np.float32)
    y = x[:, :1].copy()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    result = idletrain.fit(
        module,
        (x[:3000], y[:3000]),
        test=(x[3000:], y[3000:]),
        loss="mse",
        rounds=40,
        optimizer={"name": "adamw", "lr": 1e-3},
        run_dir=tmp_path,
    )
    with torch.no_grad():
        mse = float(((result.module(torch.tensor(x[3000:])) - torch.tensor(y[3000:])) ** 2).mean())
    assert mse < 0.01
    assert result.summary["loss"] == pytest.approx(mse, rel=1e-3)
    assert result.summary["train_loss"] < 0.02
    assert result.summary["warnings"] == []


def test_a_run_whose_network_is_worse_than_its_subnets_says_so_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the scaling of sums: what the guard is there for."""
    monkeypatch.setattr("idletrain.nn.checks.with_scaling", lambda _subject, layout: layout)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 16)).astype(np.float32)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    result = idletrain.fit(
        module, (x, x[:, :1].copy()), loss="mse", rounds=10, subnets=4, local_steps=50, run_dir=tmp_path, workers=2,
        optimizer={"name": "adamw", "lr": 1e-3},
    )  # fmt: skip
    (warning,) = result.summary["warnings"]
    assert "the assembled network's training loss is" in warning
    assert "they differ first in layer 2," in warning
    assert [record["reason"] for record in result.records if record["kind"] == "warning"] == [warning]
