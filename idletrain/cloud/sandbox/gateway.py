"""Receive calls in front of moto: count them, inject faults, remember client tokens, and handle EC2 ourselves."""

from __future__ import annotations

import io
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import UnknownServiceError
from moto.core.request import Request
from moto.core.routing import get_service_router
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.exceptions import NotFound
from werkzeug.wrappers import Response
from werkzeug.wsgi import get_input_stream

from idletrain.cloud.sandbox import faults
from idletrain.cloud.sandbox.capacity import INSUFFICIENT
from idletrain.cloud.sandbox.ec2 import RehearsedEC2
from idletrain.cloud.sandbox.faults import InjectedFaults, Wire
from idletrain.cloud.sandbox.instances import REGION, Instances
from idletrain.cloud.sandbox.launches import NoCapacityError

Environ = dict[str, Any]
UNSUPPORTED_SERVICES = ("pricing",)  # moto would crash on it
# A region's instance types never change: the answers, megabytes, are cached.
CATALOGUE = frozenset({"DescribeInstanceTypes", "DescribeInstanceTypeOfferings"})


@dataclass(frozen=True, slots=True)
class Call:
    """A call's service, region and action."""

    service: str
    region: str
    action: str


class Calls:
    """Counts how often each action was called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, call: Call) -> None:
        with self._lock:
            self._counts[call.service, call.action] += 1

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of calls by service, then by action."""
        with self._lock:
            table: dict[str, dict[str, int]] = {}
            for (service, action), count in sorted(self._counts.items()):
                table.setdefault(service, {})[action] = count
            return table

    def reset(self) -> None:
        with self._lock:
            self._counts.clear()


class Gateway:
    """The cloud's services, as a WSGI application.

    Args:
        instances: The account's instances.
        queue: Faults to inject.
        logs: Directory of the machines' output.
        changed: Called after every call that may have changed the instances.
    """

    def __init__(self, instances: Instances, queue: InjectedFaults, logs: Path, changed: Callable[[], None]) -> None:
        self._instances, self._faults, self._logs, self._changed = instances, queue, logs, changed
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.calls = Calls()
        self._tokens: dict[tuple[str, str, str], tuple[Any, Wire]] = {}
        self._catalogue: dict[Any, Wire] = {}
        self._moto_lock = threading.Lock()  # moto compares, sets and replaces objects as if there were one thread

    def __call__(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        request = _buffered(environ)
        call = which(request)
        self.calls.add(call)
        fault = self._faults.take(call.action)
        if fault and fault.mode == "error":
            wire = faults.error(call.service, fault.code, fault.message, fault.status)
            return _response(wire)(environ, start_response)
        if fault and fault.mode in ("html", "empty"):
            page = faults.HTML if fault.mode == "html" else ""
            return _response((fault.status, "text/html", page))(environ, start_response)
        if call.service in UNSUPPORTED_SERVICES:
            message = f"A rehearsal has no {call.service}"
            return _response(faults.error(call.service, "AccessDeniedException", message, 400))(environ, start_response)
        if call.service == "ec2":
            response = _response(self._ec2(request, call))
            self._changed()
        else:
            environ["wsgi.input"] = io.BytesIO(
                get_input_stream(environ).read()
            )  # read before locking: a slow caller must not block others
            with self._moto_lock:
                response = Response.from_app(self._moto, environ, buffered=True)
        if fault:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)  # the call is done, and its answer is lost
        return response(environ, start_response)

    def _ec2(self, request: Request, call: Call) -> Wire:
        parameters = frozenset((key, value) for key, value in request.form.items(multi=True) if key != "ClientToken")
        if call.action in CATALOGUE:
            key = (call.region, parameters)
            if key not in self._catalogue:
                self._catalogue[key] = self._answer(request)
            return self._catalogue[key]
        if call.action == "DescribeSpotPriceHistory":  # concerns no instance: no lock needed
            return self._answer(request)
        with self._instances.lock:
            return self._answer_once(request, call, parameters)

    def _answer_once(self, request: Request, call: Call, parameters: frozenset[tuple[str, str]]) -> Wire:
        """Answer a request, or repeat the earlier answer to the same client token."""
        key = (call.region, call.action, request.form.get("ClientToken", ""))
        earlier, answer = self._tokens.get(key, (parameters, None))
        if earlier != parameters:
            message = "The request uses the same client token as a previous, but non-identical request."
            return faults.error("ec2", "IdempotentParameterMismatch", message, 400)
        answer = answer or self._answer(request)
        if key[-1] and answer[0] == 200:  # a refused request leaves its token unused
            self._tokens[key] = (parameters, answer)
        return answer

    def _answer(self, request: Request) -> Wire:
        try:
            status, _, body = RehearsedEC2(self._instances, self._logs).answer(request)
        except NoCapacityError as error:
            return faults.error("ec2", INSUFFICIENT, str(error), 500)
        return status, "text/xml", body if isinstance(body, str) else body.decode()


def which(request: Request) -> Call:
    """Read a request's service and region from its signature (S3 may be unsigned), its action from form or header."""
    scope = request.headers.get("Authorization", "").partition("Credential=")[2].partition(",")[0].split("/")
    region, service = (scope[2], scope[3].lower()) if len(scope) == 5 else (REGION, "s3")
    named = request.form.get("Action") or request.headers.get("X-Amz-Target", "").rpartition(".")[2]
    if named:
        return Call(service, region, named)
    try:
        operation, _ = get_service_router(service).match(request)
    except (NotFound, UnknownServiceError):
        return Call(service, region, request.method)
    return Call(service, region, str(operation.name))


def _buffered(environ: Environ) -> Request:
    """Return the request, with a form that can be read twice; other bodies are not read yet."""
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        content = environ["wsgi.input"].read(length)
        form = Request({**environ, "wsgi.input": io.BytesIO(content)})
        form.form  # noqa: B018  (read now: the environment's copy is moto's to read)
        environ["wsgi.input"] = io.BytesIO(content)
        form.from_wsgi_server = True
        return form
    return Request({**environ, "wsgi.input": io.BytesIO()})


def _response(wire: Wire) -> Response:
    status, kind, body = wire
    return Response(body, status, content_type=kind)
