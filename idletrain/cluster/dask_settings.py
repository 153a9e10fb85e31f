"""Dask's settings for idletrain; apply them before a scheduler, worker or client is created."""

from __future__ import annotations

import importlib.util
import logging
import random
import resource
import sys
from types import BuiltinMethodType, MethodType

import dask

from idletrain.cluster import handshakes, steady_clock

DASK_SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,  # the coordinator reacts to a death; Dask does not retry
    "distributed.scheduler.work-stealing": False,  # one lease is one worker
    "distributed.scheduler.worker-ttl": "60s",  # a backstop; leases notice a hang in seconds
    "distributed.scheduler.no-workers-timeout": "30s",  # nothing stays pending for ever
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.comm.compression": False,  # weights do not compress
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.timeouts.tcp": "12s",
    "distributed.comm.retry.count": 2,
    "distributed.worker.memory.target": False,  # memory is planned beforehand, not spilled
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    # Dask measures itself 50 to 100 times a second in every process, which takes a tenth of a small machine.
    "distributed.admin.tick.interval": "200ms",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.profile.interval": "100ms",
    "distributed.worker.profile.cycle": "10s",  # its last 3,600 are kept
    # Logs of tasks and messages for Dask's developers: a run's own records are kept elsewhere.
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.log-length": 1000,
    "distributed.admin.system-monitor.log-length": 300,
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.admin.large-graph-warning-threshold": "1MB",
}


def apply() -> None:
    """Apply the settings to this process."""
    dask.config.set(DASK_SETTINGS)
    logging.getLogger("distributed.comm.tcp").setLevel(logging.WARNING)  # a worker that ends in a handshake is no news
    handshakes.limit()
    steady_clock.use()


def draw_apart() -> None:
    """Let Dask and tornado draw from a generator of their own in this process, and not from that of module `random`.

    A worker's event loop draws whenever it estimates the size of a message of more than ten items, such as a heartbeat.
    From a generator that a training step seeds in another thread, it would take some of the step's numbers.
    """
    shared = vars(random)["_inst"]
    spec = random.__spec__
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)  # the module once more, with a generator of its own
    spec.loader.exec_module(own)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("dask", "distributed", "tornado"):
            for key, value in list(vars(module).items()):
                if value is random:
                    setattr(module, key, own)
                elif isinstance(value, MethodType | BuiltinMethodType) and value.__self__ is shared:
                    setattr(module, key, getattr(own, value.__name__))


def lift_file_limit() -> None:
    """Let this process open as many files as the machine allows.

    Each worker makes three connections to the scheduler and one to the store, and most machines start with a limit of
    1,024 open files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
