"""Serve control requests of tests and rehearsals to the cloud itself: JSON in and out, below `/_sandbox/`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moto.ec2.models.instances import Instance
from moto.ssm.models import ssm_backends
from werkzeug.wrappers import Request, Response

from idletrain.cloud.sandbox.capacity import with_limit
from idletrain.cloud.sandbox.faults import InjectedFault, InjectedFaults
from idletrain.cloud.sandbox.gateway import Calls
from idletrain.cloud.sandbox.instances import ACCOUNT_ID, SPOT_REASON, Instances, region_backends
from idletrain.cloud.sandbox.machines import MachineProcesses

PREFIX = "/_sandbox/"
ACCOUNT_GROUPS = ("default", "idletrain-ended-heads")  # that no run has created
Body = Mapping[str, Any]


class Control:
    """The control endpoints, as a WSGI application.

    Args:
        instances: The account's instances.
        machines: Their processes.
        faults: The queue that faults are added to.
        calls: The calls counted so far.
        changed: Called after every change to the instances.
    """

    def __init__(
        self,
        instances: Instances,
        machines: MachineProcesses,
        faults: InjectedFaults,
        calls: Calls,
        changed: Callable[[], None],
    ) -> None:
        self._instances, self._machines, self._faults, self._calls = instances, machines, faults, calls
        self._changed = changed
        self._actions: dict[tuple[str, str], Callable[[Body], Any]] = {
            ("GET", "inventory"): lambda _: self.inventory(),
            ("GET", "calls"): lambda _: calls.counts(),
            ("POST", "calls/reset"): lambda _: calls.reset(),
            ("POST", "capacity"): self._capacity,
            ("POST", "fault"): lambda body: faults.add(InjectedFault(**body)),
            ("GET", "faults"): lambda _: faults.remaining(),
            ("POST", "notice"): self._notice,
            ("POST", "rebalance"): self._rebalance,
            ("POST", "take"): self._reclaim,
            ("POST", "shutdown"): self._shutdown,
        }

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        action = self._actions.get((request.method, request.path.removeprefix(PREFIX)))
        if action is None:
            return _json({"error": f"no {request.method} {request.path}"}, 404)(environ, start_response)
        try:
            body = json.loads(request.get_data() or b"{}")
            with self._instances.lock:
                result = action(body)
        except (KeyError, TypeError, ValueError, LookupError) as error:
            return _json({"error": f"{type(error).__name__}: {error}"}, 400)(environ, start_response)
        if request.method == "POST":
            self._changed()
        return _json({} if result is None else result, 200)(environ, start_response)

    def inventory(self) -> dict[str, Any]:
        """List everything that a run could leave behind; all empty after a complete teardown."""
        groups = [g for backend in region_backends() for by_id in backend.groups.values() for g in by_id.values()]
        templates = [template for backend in region_backends() for template in backend.launch_templates.values()]
        parameters = [name for backend in ssm_backends[ACCOUNT_ID].values() for name in backend._parameters]
        return {
            "instances": [instance.id for instance in self._instances.alive()],
            "security_groups": [group.id for group in groups if group.name not in ACCOUNT_GROUPS],
            "launch_templates": [template.id for template in templates],
            "parameters": [name for name in parameters if name.startswith("/idletrain")],
            "processes": self._machines.processes(),
        }

    def _capacity(self, body: Body) -> list[dict[str, Any]]:
        patterns = body.get("market", "*"), body.get("type", "*"), body.get("zone", "*")
        self._instances.limits = with_limit(self._instances.limits, patterns, body["count"])
        return [{"market": k.market, "type": k.type, "zone": k.zone, "count": k.count} for k in self._instances.limits]

    def _notice(self, body: Body) -> None:
        self._instances.notice(self._spot(body).id, float(body["seconds"]))

    def _rebalance(self, body: Body) -> None:
        self._instances.rebalances[self._spot(body).id] = time.time()

    def _reclaim(self, body: Body) -> None:
        self._instances.end(self._spot(body), SPOT_REASON)

    def _shutdown(self, body: Body) -> None:
        self._instances.shut_down(body["instance"], float(body["seconds"]))

    def _spot(self, body: Body) -> Instance:
        instance = self._instances.find(body["instance"])
        if instance is None or not instance.is_running() or instance.lifecycle != "spot":
            raise LookupError(f"{body['instance']} is no running spot instance")
        return instance


def _json(value: Any, status: int) -> Response:
    return Response(json.dumps(value), status, content_type="application/json")
