"""Let nobody in but the sandbox's own keys: the first thing that a request meets.

A listening port on loopback is open to every user of the machine, and to every page in a browser on it. So a request
names this sandbox as its host, comes from no page, and is signed by keys that only the owner's processes have.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moto.core.request import PRESERVED_HEADER_NAMES_ENVIRON_KEY
from werkzeug.wrappers import Response
from werkzeug.wsgi import get_input_stream

from idletrain.cloud.sandbox import faults, signatures
from idletrain.cloud.sandbox.signatures import Keys, SignatureError

FROM_A_PAGE = ("origin", "sec-fetch-site", "sec-fetch-mode")  # only browsers send them, and no page can leave them out

LONGEST_REASON = 200  # characters of what a request broke on
logger = logging.getLogger(__name__)
REFUSAL = "this is a rehearsal cloud of idletrain, for signed requests of its own run alone\n"


class Guard:
    """A WSGI application in front of another one.

    Args:
        application: Gets the requests that pass; their bodies are read already.
        host: The only host, `address:port`, that a request may name.
        known: Keys by their id; may change.
    """

    def __init__(
        self, application: Callable[[dict[str, Any], Any], Iterable[bytes]], host: str, known: Mapping[str, Keys]
    ) -> None:
        self._application, self._host, self._known = application, host, known

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        headers = headers_of(environ)
        if headers.get("host") != self._host or not _from_a_program(environ, headers):
            return Response(REFUSAL, 403)(environ, start_response)
        service = "s3"
        try:
            claim = signatures.claim_of(headers)
            service = claim.service
            keys = signatures.keys_of(claim, headers, self._known, time.time())
            body = get_input_stream(environ).read()  # in memory: only who knows a key's id comes so far
            url = f"http://{self._host}{environ['RAW_URI']}"
            signatures.check(claim, keys, environ["REQUEST_METHOD"], url, headers, body)
        except SignatureError as error:
            status, kind, text = faults.error(service, error.code, str(error), 403)
            return Response(text, status, content_type=kind)(environ, start_response)
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
        try:
            return self._application(environ, _without_cors(start_response))
        except Exception as error:  # its own run's request, that moto cannot read
            logger.warning("a request to %s cannot be answered", service, exc_info=True)
            reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            status, kind, text = faults.error(service, "ValidationError", reason, 400)
            return Response(text, status, content_type=kind)(environ, start_response)


def _from_a_program(environ: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Return whether a request looks as AWS' clients write it: no page's, no preflight, and no proxy's."""
    return (
        not headers.keys() & set(FROM_A_PAGE)
        and environ["REQUEST_METHOD"] != "OPTIONS"
        and str(environ["RAW_URI"]).startswith("/")
    )


def headers_of(environ: Mapping[str, Any]) -> dict[str, str]:
    """Return a request's headers by lower-case name; moto keeps the spelling of names with underscores."""
    spelling: Mapping[str, str] = environ.get(PRESERVED_HEADER_NAMES_ENVIRON_KEY, {})
    names = {key: key.removeprefix("HTTP_").replace("_", "-") for key in environ if key.startswith("HTTP_")}
    names |= {key: key.replace("_", "-") for key in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(key)}
    return {spelling.get(key, name).lower(): environ[key] for key, name in names.items()}


def _without_cors(start_response: Any) -> Any:
    """Return `start_response` without the permission that moto gives to any page to read its answers."""

    def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
        allowed = [(name, value) for name, value in headers if not name.lower().startswith("access-control-")]
        return start_response(status, allowed, *more)

    return start
