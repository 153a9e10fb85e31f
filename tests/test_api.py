"""A module and data go in, the trained module comes out: real workers, a run of a few rounds."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import random
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassF1Score

import idletrain
from idletrain import api
from idletrain.cluster import dask_scheduler
from idletrain.cluster.local import LocalFleet
from idletrain.errors import JobError, RunError
from idletrain.export import LoadedRun, later_rounds, load_run, saved_state
from idletrain.fabric.measuring.cluster import existing_cluster
from idletrain.fit_result import FitResult
from idletrain.job_file import parse_job
from idletrain.nn.data.known import digits
from idletrain.nn.local_steps import BatchOrder
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


class Items(Dataset):  # type: ignore[type-arg]
    """A map-style Dataset of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def accuracy_of(module: nn.Module, test: tuple[Any, Any]) -> float:
    with torch.no_grad():
        return float((module(torch.from_numpy(test[0])).argmax(1).numpy() == test[1]).mean())


@dataclass
class Outputs:
    """What Hugging Face's models return: a loss if they get labels, and logits."""

    loss: Tensor | None
    logits: Tensor


def make_named() -> nn.Module:
    """A network that takes its parts by name, with a mask, and computes its loss itself."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)

        def forward(self, pixels: Tensor, mask: Tensor, labels: Tensor | None = None) -> Outputs:
            assert mask.dtype == torch.bool
            kept = pixels if mask.all() else pixels * mask  # it looks at values, as attention masks are looked at
            logits = self.last(torch.relu(self.norm(self.first(kept))))
            return Outputs(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)

    return Named()


def test_fit_trains_a_module_that_takes_parts_by_name_with_its_own_loss(tmp_path: Path) -> None:
    """As it trains the plain module on pairs: the same bits."""
    results = []
    for make, item in (
        (make_net, lambda x, y: (x, y)),
        (make_named, lambda x, y: {"pixels": x, "mask": np.ones(64, np.bool_), "label": y, "unused": 1.0}),
    ):
        train, test = ([item(x, int(y)) for x, y in zip(*part, strict=True)] for part in digits())
        torch.manual_seed(0)
        module = make()
        results.append(
            idletrain.fit(
                module, Items(train), Items(test), method="ist", subnets=2, local_steps=10, rounds=3, evaluate_every=3,
                workers=1, run_dir=tmp_path / str(len(results)), name="parts", optimizer={"name": "sgd", "lr": 0.2},
            )
        )  # fmt: skip
    plain, named = results
    assert named.summary["params_sha256"] == plain.summary["params_sha256"]
    assert named.summary["accuracy"] == plain.summary["accuracy"] > 0.5
    assert torch.equal(named.module.norm.running_mean, plain.module.norm.running_mean)
    outputs = named.module(torch.zeros(1, 64), torch.ones(1, 64, dtype=torch.bool))
    assert outputs.loss is None
    assert outputs.logits.shape == (1, 10)


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
        ({"rounds": 0}, "rounds: 0 should be greater than or equal to 1"),
        ({"loss": "nil"}, "loss: 'nil' should be one of"),
        ({"subnets": 2, "copies": 3}, "copies: 3 is more than subnets: 2"),
        ({"test": (np.zeros((3, 64), np.float32), np.zeros(2))}, "data: 3 inputs and 2 labels"),
        ({"loss": 3}, "loss: 3 should be a name or a function"),
        (
            {"loss": locked()},
            "training.loss.lock: a lock cannot travel to workers (cannot pickle '_thread.lock' object); leave it out",
        ),
        ({"training": {"exchange": {"push": "int2"}}}, "training.exchange.push: 'int2' should be 'fp32', 'bf16'"),
        ({"optimizer": "sdg"}, "optimizer: 'sdg' should be one of sgd, adam, adamw"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)},
            "optimizer: holds parameters of another module; make it from module.parameters()",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": lambda step, steps: (step + steps) / 0}},
            f"optimizer.schedule: {__name__}:<lambda> fails at step 0 (<lambda> at {__file__}:237 raised Zero",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": lambda step, steps: (step + steps) * float("nan")}},
            f"optimizer.schedule: {__name__}:<lambda> returns nan at step 0; it should be a factor of lr",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "groups": [{"parameters": ["frist.*"], "lr": 1}]}},
            "optimizer.groups.0.parameters: 'frist.*' fits no parameter; names are like",
        ),
        ({"nodes": 2}, "nodes: 2 should be fields and their values, as in {count: 4}"),
        ({"log_to": "excel"}, "log_to: there is no excel; choose from mlflow, wandb"),
        ({"training": None}, "training: is empty; it should be fields and their values, below it, or be left out"),
        ({"checkpiont": {}}, "fit: checkpiont is no argument; did you mean checkpoint?"),
    ],
)
def test_fit_refuses_before_anything_is_made(tmp_path: Path, asked: dict[str, Any], told: str) -> None:
    test = asked.pop("test", None)
    with pytest.raises(JobError) as caught:
        idletrain.fit(make_net(), digits()[0], test, run_dir=tmp_path / "runs", **asked)
    assert str(caught.value).startswith(told)
    assert not (tmp_path / "runs").exists()


def test_an_instance_with_groups_and_a_schedule_of_ones_own_train_what_torch_trains(tmp_path: Path) -> None:
    """One subnet: the run's workers do what a loop of torch does."""
    train, _ = digits()
    x, y = torch.tensor(train[0][:256]), torch.tensor(train[1][:256])
    module = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def groups(of: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": of[0].parameters()}, {"params": of[2].parameters(), "lr": 0.02, "weight_decay": 0.3}]

    def falling(step: int, steps: int) -> float:
        return 1 - step / (2 * steps)

    instance = torch.optim.AdamW(groups(module), lr=0.01)
    settings = {"subnets": 1, "workers": 1, "local_steps": 4, "rounds": 2, "batch_size": 256, "run_dir": tmp_path}
    result = idletrain.fit(module, (x, y), optimizer=instance, **settings)
    scheduled = idletrain.fit(module, (x, y), optimizer={"name": "adamw", "lr": 0.01, "schedule": falling}, **settings)
    for trained, plain_groups, factor in ((result, groups, 1), (scheduled, lambda of: of.parameters(), falling)):
        plain = copy.deepcopy(module)
        optimizer = torch.optim.AdamW(plain_groups(plain), lr=0.01, weight_decay=0.01 if factor == 1 else 0.0)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, f=factor: 1 if f == 1 else f(step, 8))
        for step in range(8):
            order = BatchOrder(0, 256, 256, 1).batch(0, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x[order]), y[order].long()).backward()
            optimizer.step()
            rate.step()
        for ours, theirs in zip(trained.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # another process, maybe other threads


def test_an_average_of_the_network_is_what_fit_returns_through_a_resumption(tmp_path: Path) -> None:
    module, (train, _) = make_net(), digits()
    settings: dict[str, Any] = {"method": "ist", "subnets": 2, "workers": 2, "local_steps": 3, "run_dir": tmp_path}
    one, two = (idletrain.fit(module, train, rounds=r, **settings) for r in (1, 2))
    averaged = {**settings, "training": {"ema": 0.5}, "name": "averaged"}
    idletrain.fit(module, train, rounds=1, **averaged)
    result = idletrain.fit(module, train, rounds=2, resume=True, **averaged)
    assert result.summary["params_sha256"] == two.summary["params_sha256"]  # training goes on from the network itself
    later = load_run(result.run_dir).module()
    for first, second, mean, loaded in zip(
        *(of.parameters() for of in (one.module, two.module, result.module, later)), strict=True
    ):
        torch.testing.assert_close(mean, (0.5 * first + second) / 1.5)
        assert torch.equal(mean, loaded)


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
    with pytest.raises(RunError, match=r"fails on .* and .*image file is truncated"):
        idletrain.fit(
            make_net(),
            Damaged(),
            method="ist",
            subnets=2,
            local_steps=30,
            rounds=3,
            batch_size=32,
            workers=2,
            run_dir=tmp_path,
            on_event=events.append,
        )
    assert [event["status"] for event in events if event["kind"] == "run_ended"] == ["failed"]


def test_without_a_method_a_small_network_is_trained_by_local_sgd_and_the_choice_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train, _ = digits()
    settings: dict[str, Any] = {"subnets": 2, "local_steps": 5, "rounds": 2, "workers": 1, "run_dir": tmp_path}
    net, states = make_net(), (random.getstate(), str(np.random.get_state()), torch.get_rng_state())
    chosen = idletrain.fit(net, train, name="chosen", **settings)
    assert states[:2] == (random.getstate(), str(np.random.get_state()))  # steps are timed, and seeded, in this process
    assert torch.equal(states[2], torch.get_rng_state())
    assert "trained by local-sgd, as method is not given" in " ".join(capfd.readouterr().err.split())
    assert [event["method"] for event in chosen.records if event["kind"] == "run_started"] == ["local-sgd"]
    assert all("expected" in event for event in chosen.records if event["kind"] == "round_committed")
    again = idletrain.fit(make_net(), train, name="chosen", resume=True, **settings | {"rounds": 3})
    assert [event["method"] for event in again.records if event["kind"] == "run_started"] == ["local-sgd"]


def test_a_step_that_fails_while_the_method_is_chosen_is_a_fault_before_anything_starts(tmp_path: Path) -> None:
    train, _ = digits()

    class Damaged(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(train[1])

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            if 0 < i < len(train[1]) - 1:  # the ends are looked at sooner
                raise OSError("image file is truncated")
            return torch.from_numpy(train[0][i]), int(train[1][i])

    with pytest.raises(JobError, match="image file is truncated"):
        idletrain.fit(make_net(), Damaged(), subnets=2, rounds=3, workers=1, run_dir=tmp_path)
    assert not list(tmp_path.iterdir())


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
        with pytest.raises(KeyboardInterrupt, match=r"stopped after round \d+; the same call with name='nb', ") as stop:
            loop.run_until_complete(cell())
    finally:
        loop.close()
        signal.signal(signal.SIGINT, handler)
    assert seen[-1] == "run_ended"
    assert not has_head(tmp_path / "nb")
    (line,) = stop.value._render_traceback_()  # what a notebook shows
    assert line.endswith("resume=True goes on")


def test_a_second_ctrl_c_ends_the_run_at_once_and_it_goes_on_all_the_same(tmp_path: Path) -> None:
    train, _ = digits()
    seen: list[str] = []

    def interrupt(event: dict[str, Any]) -> None:
        seen.append(event["kind"])
        if event["kind"] in ("round_committed", "stopping"):
            os.kill(os.getpid(), signal.SIGINT)

    def fit(rounds: int, **more: Any) -> FitResult:
        settings = {"subnets": 2, "local_steps": 20, "workers": 2, "name": "twice", "run_dir": tmp_path}
        return idletrain.fit(make_net(), train, rounds=rounds, **settings, **more)

    with pytest.raises(KeyboardInterrupt, match="ended at once; the same call with name='twice', resume=True goes on"):
        fit(2000, on_event=interrupt)
    assert "stopping" in seen
    assert not has_head(tmp_path / "twice")
    done = len([kind for kind in seen if kind == "round_committed"])
    assert fit(done + 1, resume=True).rounds == done + 1


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


def test_the_workers_of_a_scheduler_are_measured_where_the_method_is_not_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Small networks over loopback: local SGD; with nobody there to measure, the method stays ist."""
    folder, train = tmp_path / "cluster", digits()[0]
    folder.mkdir()
    ended = threading.Event()
    started, ready = Future[str](), Future[bool]()

    async def serve() -> None:
        async with dask_scheduler.started(folder) as address:
            fleet = LocalFleet(address, 1 << 30, folder / "logs")
            try:
                started.set_result(address)
                while not joined.wait(0.05):
                    await asyncio.sleep(0.05)
                fleet.start(1)
                async with existing_cluster(address) as client:
                    await client.wait_for_workers(1)
                ready.set_result(True)
                while not ended.wait(0.05):
                    await asyncio.sleep(0.05)
            finally:
                await fleet.close()

    joined = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(asyncio.run, serve())
        try:
            address = started.result(60)
            job = parse_job({"name": "t", "model": {"factory": "x"}, "data": {}, "nodes": {"count": 1}})
            assert asyncio.run(api._measured(address, job)) is None
            assert "the cluster has no worker" in " ".join(capfd.readouterr().err.split())
            joined.set()
            assert ready.result(60)
            result = idletrain.fit(
                make_net(), train, scheduler=address, subnets=2, local_steps=5, rounds=2, workers=1, run_dir=tmp_path
            )
        finally:
            joined.set()
            ended.set()
            serving.result(60)
    assert "trained by local-sgd, as method is not given" in " ".join(capfd.readouterr().err.split())
    assert result.rounds == 2


def test_a_scheduler_that_cannot_be_reached_is_named_before_any_data_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idletrain.cluster.contact.CONTACT_SECONDS", 1)
    with pytest.raises(JobError, match=r"scheduler: tcp://127\.0\.0\.1:1 cannot be reached"):
        idletrain.fit(make_net(), digits()[0], scheduler="tcp://127.0.0.1:1", run_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("method", ["ist", None])
def test_a_regression_without_norm_ends_as_it_would_in_plain_torch_with_fit_s_defaults(
    method: str | None, tmp_path: Path
) -> None:
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
        method=method,
        rounds=40,
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
    monkeypatch.setattr("idletrain.nn.cuts.with_scaling", lambda _subject, layout, _least: layout)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 16)).astype(np.float32)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    result = idletrain.fit(
        module, (x, x[:, :1].copy()), loss="mse", method="ist", rounds=10, subnets=4, local_steps=50, run_dir=tmp_path,
        workers=2,
        optimizer={"name": "adamw", "lr": 1e-3},
    )  # fmt: skip
    (warning,) = result.summary["warnings"]
    assert "the assembled network's training loss is" in warning
    assert warning.endswith(" in model.exclude, as they differ first in layer 2")
    assert [record["reason"] for record in result.records if record["kind"] == "warning"] == [warning]


def test_lazy_layers_weight_norm_and_statistics_of_one_s_own_are_trained(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.register_buffer("size", torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            size = x.abs().mean(0) if self.training else self.size
            if self.training:
                self.size.mul_(0.99).add_(0.01 * size.detach())
            return x / size

    normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    module = nn.Sequential(normed, Scaled(64), nn.ReLU(), nn.LazyLinear(10))
    train, test = digits()
    done = idletrain.fit(
        module, train, test, subnets=2, rounds=8, local_steps=30, batch_size=32, workers=2, run_dir=tmp_path, name="odd"
    )
    assert done.summary["accuracy"] == pytest.approx(accuracy_of(done.module, test))
    assert done.summary["accuracy"] > 0.9
    assert float(done.module[1].size.min()) != 1  # type: ignore[index]
    assert accuracy_of(load_run(tmp_path / "odd").module(), test) == pytest.approx(accuracy_of(done.module, test))


def test_a_normalisation_of_one_s_own_does_as_well_as_batch_norm(tmp_path: Path) -> None:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
            self.register_buffer("mean", torch.zeros(width))
            self.register_buffer("var", torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            mean, var = self.mean, self.var
            if self.training:
                mean, var = x.mean(0), x.var(0)
                self.mean.mul_(0.9).add_(0.1 * mean.detach())
                self.var.mul_(0.9).add_(0.1 * var.detach())
            return (x - mean) * (var + 1e-5).rsqrt() * self.weight + self.bias

    train, test = digits()
    accuracies = {}
    for norm in (Norm, nn.BatchNorm1d):
        torch.manual_seed(0)
        hidden = (nn.Linear(64, 128), norm(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        done = idletrain.fit(
            nn.Sequential(*hidden, nn.Linear(128, 10)), train, test, subnets=2, rounds=8, local_steps=30,
            batch_size=32, workers=2, run_dir=tmp_path, name=norm.__name__.lower(),
        )  # fmt: skip
        accuracies[norm] = accuracy_of(done.module, test)
        assert done.summary["accuracy"] == pytest.approx(accuracies[norm])
    assert accuracies[nn.BatchNorm1d] > 0.9
    assert accuracies[Norm] == pytest.approx(accuracies[nn.BatchNorm1d], abs=0.02)


def test_fit_stops_early_gives_the_best_network_and_goes_on_with_more_patience(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train, test = digits()
    values = iter([9.0, 3.0, 1.0, 2.0, 1.0, 9.0, 9.0, 2.0, 1.5])  # a 9 when it is tried on a few samples
    measured: list[tuple[int, int]] = []
    seen: dict[int, tuple[nn.Module, dict[str, Any]]] = {}

    def far(outputs: Tensor, labels: Tensor) -> float:
        measured.append((len(outputs), len(labels)))
        return next(values)

    def on_evaluate(module: nn.Module, scores: Any) -> None:
        seen[scores["round"]] = module, dict(scores)
        with torch.no_grad():
            for parameter in copy.deepcopy(module).parameters():
                parameter.zero_()  # of a copy of the copy; and what is done to the copy itself changes no run
        module.eval()

    def fit(patience: int, rounds: int = 50, **more: Any) -> FitResult:
        return idletrain.fit(
            make_net(), train, test, method="ist", subnets=2, local_steps=3, rounds=rounds, evaluate_every=1, workers=1,
            run_dir=tmp_path, name="early", metrics={"far": (far, "lower"), "f1": MulticlassF1Score(num_classes=10)},
            stop={"metric": "far", "patience": patience}, on_evaluate=on_evaluate, **more,
        )  # fmt: skip

    result = fit(2)
    assert measured[1:] == [(len(test[0]), len(test[1]))] * 4
    assert [seen[k][1]["far"] for k in (1, 2, 3, 4)] == [3.0, 1.0, 2.0, 1.0]
    assert (result.summary["status"], result.summary["rounds"], result.rounds) == ("stopped-early", 4, 2)
    assert result.summary["best"] == {"round": 2, "metric": "far", "value": 1.0}
    for name in ("accuracy", "loss"):  # of the network that is returned
        assert result.summary[name] == pytest.approx(seen[2][1][name])
    assert result.summary["metrics"]["f1"] == pytest.approx(seen[2][1]["f1"])
    score = f"accuracy {seen[2][1]['accuracy']:.4g}, loss {seen[2][1]['loss']:.4g}"
    assert f"2 rounds, {score}, constant_loss" in repr(result)
    assert "stopped early: no better far in 2 evaluations" in capfd.readouterr().err
    for name, value in seen[2][0].state_dict().items():
        assert torch.equal(value, result.module.state_dict()[name]), name
    assert not torch.equal(result.module.first.weight, seen[4][0].first.weight)
    logits = result.module(torch.from_numpy(test[0]))
    assert seen[2][1]["f1"] == pytest.approx(float(MulticlassF1Score(num_classes=10)(logits, torch.tensor(test[1]))))
    loaded = load_run(tmp_path / "early")
    assert loaded.rounds == 2
    assert torch.equal(loaded.module().first.weight, result.module.first.weight)
    assert load_run(tmp_path / "early", last=True).rounds == 4
    state, rounds = saved_state(tmp_path / "early")
    assert rounds == 2
    assert torch.equal(state["first.weight"], result.module.first.weight)
    same = fit(2, resume=True)
    told = " ".join(capfd.readouterr().err.split())
    assert "stop.patience: run early stopped early: no better far in 2 evaluations; raise" in told
    assert (same.rounds, same.summary["status"]) == (2, "stopped-early")
    assert torch.equal(same.module.first.weight, result.module.first.weight)
    again = fit(3, resume=True)  # the fourth is measured again, and counts once
    assert (seen[4][1]["far"], seen[5][1]["far"]) == (2.0, 1.5)
    assert (again.summary["status"], again.rounds, again.summary["rounds"]) == ("stopped-early", 2, 5)


def test_fit_says_which_metric_is_no_number_and_that_it_counts_as_no_better(tmp_path: Path) -> None:
    train, test = digits()
    result = idletrain.fit(
        make_net(), train, test, method="local-sgd", subnets=1, local_steps=1, rounds=9, evaluate_every=1, workers=1,
        run_dir=tmp_path, metrics={"odd": (lambda *_: float("nan"), "higher")}, stop={"metric": "odd", "patience": 2},
    )  # fmt: skip
    (warning,) = result.summary["warnings"]
    assert warning == "metric odd is nan on the test data and counts as no better"
    assert (result.summary["status"], result.rounds, result.summary["best"]) == ("stopped-early", 2, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": {"patience": 2}}, "stop.patience: is measured on test data, which are missing"),
        ({"stop": {"metric": "loss"}}, "stop.metric: is measured on test data, which are missing"),
        ({"metrics": {"f1": MulticlassF1Score(10)}}, "metrics: are measured on test data, which are missing"),
        ({"epochs": 2, "rounds": 3}, "epochs: 2 beside rounds: 3; give one of the two"),
    ],
)
def test_fit_refuses_what_it_cannot_measure(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as caught:
        idletrain.fit(make_net(), digits()[0], run_dir=tmp_path, name="t", **given)
    assert caught.value.faults[0].startswith(said)
    assert not (tmp_path / "t").exists()


def test_fit_names_the_metrics_that_can_tell_the_best_network(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"stop.metric: there is no f2; choose from loss, accuracy, f1, or add it to"):
        idletrain.fit(
            make_net(), *digits(), run_dir=tmp_path, metrics={"f1": MulticlassF1Score(10)}, stop={"metric": "f2"}
        )


def test_a_callback_that_fails_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    def broken(module: nn.Module, scores: Any) -> None:
        raise KeyError("bleu")

    with pytest.raises(
        RunError, match=r"on_evaluate fails \(broken at \S+ raised KeyError: 'bleu'\); fix it, and go on with"
    ):
        idletrain.fit(
            make_net(), digits()[0], method="local-sgd", subnets=1, local_steps=1, rounds=2, evaluate_every=1,
            workers=1, run_dir=tmp_path, on_evaluate=broken,
        )  # fmt: skip


class LitNet(lightning.LightningModule):
    """A LightningModule whose training_step is another loss than cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002 (Lightning's)
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y, label_smoothing=0.2)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class StoppingNet(LitNet):
    """One that stops early by what its validation_step logs."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 (Lightning's)
        self.log("evaluations", 1.0)

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("evaluations", mode="max", patience=2), LearningRateMonitor()]


def test_a_lightning_module_s_logged_values_are_metrics_that_its_callbacks_stop_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = digits()
    result = idletrain.fit(
        StoppingNet(), train, test, method="local-sgd", subnets=1, local_steps=2, rounds=9, evaluate_every=1,
        workers=1, run_dir=tmp_path,
    )  # fmt: skip
    assert result.summary["metrics"] == {"evaluations": 1.0}
    assert (result.summary["status"], result.summary["rounds"], result.rounds) == ("stopped-early", 3, 1)
    (began,) = [event for event in result.records if event["kind"] == "run_started"]
    assert began["better"] == {"evaluations": "higher"}
    said = " ".join(capsys.readouterr().err.split())
    assert "LearningRateMonitor is left out: no Trainer runs that would call it" in said


def test_an_optimizer_instance_may_hold_a_lightning_module_s_parameters(tmp_path: Path) -> None:
    lit = LitNet()
    optimizer = torch.optim.Adam(lit.parameters(), lr=0.1)
    with pytest.raises(JobError) as caught:
        idletrain.fit(lit, digits()[0], optimizer=optimizer, rounds=0, run_dir=tmp_path)
    assert caught.value.faults == ("rounds: 0 should be greater than or equal to 1",)


def test_fit_trains_a_lightning_module_as_its_step_and_optimizer_say(tmp_path: Path) -> None:
    """The same bits as the network alone with that loss and optimizer, by ist."""
    train, test = digits()
    settings_: dict[str, Any] = {"subnets": 2, "local_steps": 10, "rounds": 3, "evaluate_every": 3, "workers": 1}
    settings_["method"] = "ist"
    torch.manual_seed(0)
    lit = LitNet()
    before = copy.deepcopy(lit.state_dict())
    f1 = {"f1": MulticlassF1Score(num_classes=10)}
    result = idletrain.fit(lit, train, test, run_dir=tmp_path, name="lit", metrics=f1, **settings_)
    smooth = functools.partial(nn.functional.cross_entropy, label_smoothing=0.2)
    plain = idletrain.fit(
        lit.body, train, test, run_dir=tmp_path, name="plain", loss=smooth, metrics=f1,
        optimizer={"name": "sgd", "lr": 0.2, "momentum": 0.9}, **settings_,
    )  # fmt: skip
    assert result.summary["params_sha256"] == plain.summary["params_sha256"]
    for name in ("loss", "metrics"):
        assert result.summary[name] == plain.summary[name]
    assert result.summary["metrics"]["f1"] > 0.5
    assert type(result.module) is LitNet
    assert torch.equal(result.module(torch.from_numpy(test[0])), plain.module(torch.from_numpy(test[0])))
    assert all(torch.equal(value, lit.state_dict()[name]) for name, value in before.items())
    assert {event["method"] for event in result.records if event["kind"] == "run_started"} == {"ist"}
    loaded = load_run(tmp_path / "lit").module()
    assert torch.equal(loaded.body.first.weight, result.module.body.first.weight)


def test_a_misspelt_argument_is_told_with_those_that_there_are() -> None:
    with pytest.raises(JobError, match=r"^fit: round is no argument; did you mean rounds\?$"):
        idletrain.fit(nn.Linear(2, 2), (), round=3)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="fit: xyzzy is no argument; its arguments are module, train, test, loss, "):
        idletrain.fit(nn.Linear(2, 2), (), xyzzy=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "train", "more", "faults"),
    [
        (nn.Linear, (), {}, ["module: Linear is a class; give an instance, such as Linear()"]),
        ("net", (), {}, ["module: str is no torch.nn.Module; give one"]),
        (nn.Linear(2, 2), np.zeros((4, 2)), {}, ["data: the array has no labels; give (x, y), or (x,) if x"]),
        (
            nn.Linear(2, 2),
            (),
            {"learning_rate": 0.1, "patience": 3},
            [
                'fit: learning_rate is no argument; give it as optimizer={"name": ',
                "patience is no argument; give it as s",
            ],
        ),
    ],
    ids=["a class", "no module", "no labels", "others' names"],
)
def test_what_beginners_give_is_told_with_what_to_give(
    module: Any, train: Any, more: dict[str, Any], faults: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        idletrain.fit(module, train, **more)
    assert [fault in told for fault, told in zip(faults, caught.value.faults, strict=True)] == [True] * len(faults)


def test_an_on_event_that_fails_is_called_no_more_and_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    calls: list[str] = []

    def broken(event: Record) -> None:
        calls.append(event["kind"])
        raise KeyError("kind")

    with pytest.raises(
        RunError, match=r"^broken at \S+ raised KeyError: 'kind'; mend on_event and go on with resume=True$"
    ):
        idletrain.fit(make_net(), digits()[0], subnets=1, rounds=1, workers=1, run_dir=tmp_path, on_event=broken)
    assert len(calls) == 1


def test_another_network_is_no_damage_to_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "local-sgd", "subnets": 1, "workers": 1, "name": "r", "run_dir": tmp_path}

    def net(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    idletrain.fit(net(16), digits()[0], rounds=1, **settings)
    with pytest.raises(RunError, match="holds a network of another size; go on with the module that the run began"):
        idletrain.fit(net(8), digits()[0], rounds=2, resume=True, **settings)
    assert later_rounds(tmp_path / "r", 1) == ""
    assert "round 0 is that of the newest snapshot, and the run went on to round 1;" in later_rounds(tmp_path / "r", 0)
    again = idletrain.fit(net(16), digits()[0], rounds=2, resume=True, **settings)
    assert again.rounds == 2
    assert load_run(str(tmp_path / "r")).rounds == 2


def test_a_call_without_gradients_trains_all_the_same(tmp_path: Path) -> None:
    with torch.no_grad():
        result = idletrain.fit(make_net(), *digits(), rounds=2, local_steps=5, workers=1, name="r", run_dir=tmp_path)
        assert not torch.is_grad_enabled()
    assert result.rounds == 2


def test_a_run_that_has_reached_its_end_gives_its_result_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A notebook's cell may be executed once more."""
    settings: dict[str, Any] = {"subnets": 2, "workers": 1, "name": "r", "run_dir": tmp_path, "local_steps": 5}
    net = make_net()
    first = idletrain.fit(net, *digits(), rounds=2, **settings)
    written = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "r").rglob("*"))
    capfd.readouterr()
    again = idletrain.fit(net, *digits(), rounds=2, resume=True, **settings)
    told = " ".join(capfd.readouterr().err.split())
    assert told.endswith("run r is complete after 2 rounds; ask for more to go on; this is its result")
    assert written == sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "r").rglob("*"))
    assert (again.rounds, again.run_dir, repr(again)) == (2, first.run_dir, repr(first))
    for name in ("status", "rounds", "params_sha256", "accuracy", "loss"):
        assert again.summary[name] == first.summary[name], name
    assert again.curves() == first.curves()
    for name, value in first.module.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[name]), name
    (tmp_path / "r" / "events.jsonl").unlink()
    unrecorded = idletrain.fit(net, *digits(), rounds=2, resume=True, **settings)
    assert torch.equal(next(first.module.parameters()), next(unrecorded.module.parameters()))
    with pytest.raises(JobError, match=r"seed: 7 is not what the run began with, 0"):
        idletrain.fit(net, *digits(), rounds=3, resume=True, seed=7, **settings)
    with pytest.raises(RunError, match="holds a network of another size"):
        idletrain.fit(nn.Linear(64, 10), digits()[0], rounds=2, resume=True, method="local-sgd", **settings)


def test_a_run_is_resumed_by_its_name() -> None:
    with pytest.raises(JobError, match="resume: goes on with a run of a name; give name, too"):
        idletrain.fit(make_net(), digits()[0], resume=True)


def test_a_notebook_completes_the_api() -> None:
    assert {"fit", "FitResult", "IdletrainClassifier", "RunError"} <= set(dir(idletrain))


def test_errors_speak_of_arguments(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"there is no run gone in .* to resume; leave out resume=True"):
        idletrain.fit(make_net(), digits()[0], name="gone", resume=True, run_dir=tmp_path)
