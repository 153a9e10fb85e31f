"""What tests of several parts share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from rehearsal import Sandbox
from skips import skipped_for

from idletrain import storage
from idletrain.job import TrainingSettings
from idletrain.nn import compiler, models
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.data.given import as_samples
from idletrain.nn.prepare import Prepared, named_loss, prepare

settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])  # which is the machine's fault here
settings.load_profile("busy")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name in one line what this machine lacks, and how many tests that skipped."""
    if line := skipped_for(report.longrepr for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of the test's own: the user's is left alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(storage, "cache_folder", lambda: folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def compiled_code() -> None:
    """A folder of compiled code that tests share: compilers take seconds a kernel."""
    folder = storage.cache_folder() / "torch-of-tests"
    storage.make_private(folder)
    os.environ.setdefault(compiler.CACHE_VARIABLE, str(folder))


@pytest.fixture(autouse=True, scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A state directory of the tests' own, with a key that signs their runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


class Given:
    """Samples at hand, as a source."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def open(self) -> Any:
        return as_samples((self.x, self.y))


def flowers(samples: int, features: int, classes: int) -> Given:
    """Random inputs and labels that depend on them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, features)).astype(np.float32)
    return Given(x, (x[:, :classes].argmax(1)).astype(np.int64))


@pytest.fixture
def small_program() -> Callable[..., Prepared]:
    """A small MLP prepared for training; keyword arguments are training settings."""

    def make(
        widths: Sequence[int] = (6, 8, 8, 3),
        norm: str | None = None,
        source: MapStyleSource | Given | None = None,
        **options: Any,
    ) -> Prepared:
        settings = {
            "subnets": 2,
            "local_steps": 3,
            "rounds": 2,
            "batch_size": 4,
            "optimizer": {"name": "sgd", "lr": 0.1},
        } | options
        training = TrainingSettings.model_validate(settings)
        source = source or flowers(32, widths[0], widths[-1])
        return prepare(models.mlp(widths, norm), source, None, named_loss(training.loss), training)

    return make


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """One rehearsal cloud for all tests."""
    sandbox = Sandbox(tmp_path_factory.mktemp("machines"))
    yield sandbox
    sandbox.close()
    assert sandbox.process.returncode == 0


@pytest.fixture
def cloud(running: Sandbox) -> Iterator[Sandbox]:
    """A cloud with nothing in it, of which nothing was asked yet."""
    running.clean()
    yield running
    running.clean()


@pytest.fixture
def account(cloud: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our account in it, reached as any process of the cloud would."""
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    from idletrain.cloud.aws.account import Account

    return Account()


@pytest.fixture
def prefix(account: Any) -> Any:
    """An empty prefix in its bucket."""
    from idletrain.storage import S3Prefix

    s3_prefix = S3Prefix(account.s3, account.bucket, f"test-{time.monotonic_ns()}/")
    yield s3_prefix
    s3_prefix.delete(s3_prefix.names())
