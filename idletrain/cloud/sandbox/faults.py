"""Queue faults that a test or a rehearsal injects, and format AWS' error responses. Pure, but for the queue."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import escape

Wire = tuple[int, str, str]
"""Status, content type, body."""
HTML = "<!doctype html>\n<html><body><h1>Internal Server Error</h1></body></html>"
REQUEST = "<RequestId>00000000-0000-0000-0000-000000000000</RequestId>"


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault of the next calls of an action.

    Attributes:
        action: Name of the action as AWS writes it, such as `CreateFleet`.
        times: Number of calls that fail.
        mode: `error`: answer with the code and status; `drop-reply`: carry the call out, then close the connection
            without an answer; `html`: answer with the status and a page, as a proxy would; `empty`: answer with the
            status alone, as a load balancer would.
    """

    action: str
    code: str = "InternalError"
    message: str = "An injected fault"
    status: int = 400
    times: int = 1
    mode: Literal["error", "drop-reply", "html", "empty"] = "error"


class InjectedFaults:
    """A queue of faults; each call uses the first one for its action."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[InjectedFault] = []

    def add(self, fault: InjectedFault) -> None:
        with self._lock:
            self._queue.append(fault)

    def take(self, action: str) -> InjectedFault | None:
        """Return the fault for a call of this action, if any, and count it as used."""
        with self._lock:
            for fault in self._queue:
                if fault.action == action and fault.times > 0:
                    fault.times -= 1
                    return fault
            return None

    def remaining(self) -> list[dict[str, Any]]:
        """Return the faults that are not used up."""
        with self._lock:
            return [{"action": f.action, "mode": f.mode, "times": f.times} for f in self._queue if f.times > 0]


def error(service: str, code: str, message: str, status: int) -> Wire:
    """Format an error response of a service."""
    inner = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if service == "ec2":
        body = f"<Response><Errors><Error>{inner}</Error></Errors>{REQUEST.replace('Id>', 'ID>')}</Response>"
        return status, "text/xml", body
    if service == "s3":
        return status, "application/xml", f"<Error>{inner}{REQUEST}</Error>"
    if service in ("iam", "sts"):
        kind = "Receiver" if status >= 500 else "Sender"
        return status, "text/xml", f"<ErrorResponse><Error><Type>{kind}</Type>{inner}</Error>{REQUEST}</ErrorResponse>"
    return status, "application/x-amz-json-1.1", json.dumps({"__type": code, "message": message})
