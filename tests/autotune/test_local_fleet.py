"""Figures of workers on this machine, of which none is started."""

from __future__ import annotations

import pytest

from idletrain.autotune import choose, forecast, local_fleet
from idletrain.nn.prepare import prepare_job

from .test_choose import job


def test_steps_of_all_that_fits_are_timed_and_take_longer_where_workers_share_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(local_fleet.step_time, "step_seconds", lambda *_: 1.0)
    open_ = job(subnets=4, local_steps=5)
    fleet = local_fleet.local_figures(open_, 1 << 30, prepare_job)
    assert fleet.nodes == open_.nodes.count == 4
    assert fleet.step_seconds == {forecast.option_key(method, 4): 2.0 for method in ("ist", "local-sgd")}
    assert set(local_fleet.local_figures(open_, 1, prepare_job).step_seconds) == set()


@pytest.mark.parametrize(
    ("cores", "gpu", "times"), [(2, False, 8.0), (12, False, 16 / 12), (32, False, 1), (32, True, 16)]
)
def test_workers_share_a_gpu_and_cores_that_are_fewer(
    cores: int, gpu: bool, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(local_fleet.step_time, "step_seconds", lambda *_: 1.0)
    open_ = job(subnets=16, local_steps=5)
    open_ = open_.model_copy(update={"nodes": open_.nodes.model_copy(update={"count": 16})})
    seconds = local_fleet.local_figures(open_, 1 << 30, prepare_job).step_seconds.values()
    assert list(seconds) == pytest.approx([times] * len(seconds))


def test_its_figures_choose_local_sgd_for_a_small_network_on_this_machine() -> None:
    open_ = job(subnets=4, local_steps=5)
    fleet = local_fleet.local_figures(open_, 1 << 30, prepare_job)
    assert all(0 < seconds < 1 for seconds in fleet.step_seconds.values())
    assert choose.choose_settings(open_, fleet)[0].training.method == "local-sgd"
