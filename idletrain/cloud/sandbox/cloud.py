"""Compose the rehearsal cloud: HTTP server, account, machines, and the clock that reclaims nodes."""

from __future__ import annotations

import base64
import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moto.ec2.models.instances import Instance
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from idletrain.cloud.sandbox import account, reclaims
from idletrain.cloud.sandbox.capacity import with_limit
from idletrain.cloud.sandbox.control import PREFIX, Control
from idletrain.cloud.sandbox.faults import InjectedFaults
from idletrain.cloud.sandbox.gateway import Gateway
from idletrain.cloud.sandbox.guard import Guard
from idletrain.cloud.sandbox.instances import SHUTDOWN_REASON, SPOT_REASON, Instances
from idletrain.cloud.sandbox.machines import MachineProcesses
from idletrain.cloud.sandbox.signatures import owner_keys
from idletrain.cluster.forked_processes import WarmParent

CLOUD_TICK_SECONDS = 0.1  # also the longest delay from a machine's end to its instance's; EC2 calls take effect at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSettings:
    """Settings of a rehearsal cloud.

    Attributes:
        memory_bytes: RAM that each machine reports.
        market: How it reclaims spot instances.
        notice_seconds: Time from a notice to the instance's end.
        logs: Directory for the machines' output; None for a temporary one that is deleted with the cloud.
        port: Port of the endpoint; 0 for any free one.
    """

    memory_bytes: int = 2 << 30
    market: reclaims.ReclaimPolicy = reclaims.ReclaimPolicy()
    notice_seconds: float = 120.0
    logs: Path | None = None
    port: int = 0


class RehearsalCloud:
    """A running cloud on loopback, until it is closed.

    Args:
        rehearsal: Its settings.
        parent: What starts its machines.

    Attributes:
        endpoint: Its address.
        owner: Keys of the user who runs it: of whoever may do all.
    """

    def __init__(self, rehearsal: RehearsalSettings, parent: WarmParent) -> None:
        self._closers = contextlib.ExitStack()
        logs = rehearsal.logs or Path(self._closers.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._wake, self._closing = threading.Event(), threading.Event()
        self._server = make_server(
            "127.0.0.1", rehearsal.port, self._serve, threaded=True, request_handler=_QuietHandler
        )
        port = self._server.server_port
        host = f"127.0.0.1:{port}"
        self.endpoint, self.owner = f"http://{host}", owner_keys()
        keys = {self.owner.id: self.owner}
        self._instances = Instances(f"127.{port >> 8}.{port & 255}.")
        self._machines = MachineProcesses(self.endpoint, rehearsal.memory_bytes, logs, keys, parent)
        faults = InjectedFaults()
        gateway = Gateway(self._instances, faults, logs, self._wake.set)
        control = Control(self._instances, self._machines, faults, gateway.calls, self._wake.set)
        self._gateway = Guard(gateway, host, keys)
        self._control = Guard(control, host, {self.owner.id: self.owner})  # no machine takes another one
        self._market, self._notice_seconds = rehearsal.market, rehearsal.notice_seconds
        self._started = time.monotonic()
        account.provision()
        self._threads = [threading.Thread(target=self._server.serve_forever, args=(CLOUD_TICK_SECONDS,), daemon=True)]
        self._threads.append(threading.Thread(target=self._run_clock, daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Kill all machines and stop serving."""
        self._closing.set()
        self._wake.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._machines.close()
        self._server.server_close()
        self._closers.close()

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        is_control = environ["PATH_INFO"].startswith(PREFIX)
        return (self._control if is_control else self._gateway)(environ, start_response)

    def _run_clock(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(CLOUD_TICK_SECONDS)
            self._wake.clear()
            self._tick()

    def _tick(self) -> None:
        """End instances that are due, reclaim spot instances, and start and kill machines to match the instances."""
        instances, machines = self._instances, self._machines
        with instances.lock:
            for instance, reason in list(instances.due(time.time())):
                instances.end(instance, reason)
            ended = machines.ended()
            for instance in instances.running():
                if instance.id in ended:
                    instances.end(instance, SHUTDOWN_REASON)
            self._reclaim()
            instances.forget_the_ended()
            running = instances.running()
        machines.keep_only({instance.id for instance in running})
        booted = machines.running()
        for instance in running:
            if instance.id not in booted:
                self._boot(instance)

    def _boot(self, instance: Instance) -> None:
        program = base64.b64decode(str(instance.user_data or ""))
        try:
            facts = functools.partial(self._instances.facts, instance)
            self._machines.boot(instance.id, program, facts, functools.partial(self._shut_down, instance.id))
        except OSError as error:  # no more processes, files or memory
            with self._instances.lock:
                self._instances.end(instance, ("Server.InternalError", str(error)))

    def _shut_down(self, instance: str, seconds: float) -> None:
        with self._instances.lock:
            self._instances.shut_down(instance, seconds)
        self._wake.set()

    def _reclaim(self) -> None:
        elapsed = time.monotonic() - self._started
        self._market, step = reclaims.next_reclaims(self._market, elapsed, self._instances.takeable())
        if step.capacity is not None:
            self._instances.limits = with_limit(self._instances.limits, ("spot", "*", "*"), step.capacity)
        for reclaim in step.reclaims:
            if reclaim.notice:
                self._instances.notice(reclaim.instance, self._notice_seconds)
            elif instance := self._instances.find(reclaim.instance):
                self._instances.end(instance, SPOT_REASON)


class _QuietHandler(MotoRequestHandler):
    """Handle requests without logging successful ones."""

    timeout = 30  # a caller that connects and says nothing

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""
