"""Ask a scheduler something within seconds, and say what else answers at its address.

Dask waits without end for the other side's first words, and calls every trouble a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed.core import rpc
from distributed.security import Security

from idletrain.errors import shortened

CONTACT_SECONDS = 10.0  # as long as Dask takes to connect
DASK_GREETING_SECONDS = 1.0  # a Dask scheduler speaks first; what waits for us to begin gets an HTTP request after this
TLS = "TLS"


class UnreachableError(Exception):
    """No scheduler answers; the text says why."""


class CertificatesError(UnreachableError):
    """The scheduler asks for TLS, and certificates are missing or not valid; the text says which and why."""


async def ask(address: str, security: Security, role: str, question: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return a scheduler's answer.

    Args:
        address: Its `tcp://HOST:PORT` or `tls://HOST:PORT`.
        security: Certificates.
        role: Which of them to use, `client` or `worker`.
        question: Called with Dask's remote procedures of the scheduler.

    Raises:
        CertificatesError: there are none for a `tls://` address, or they are refused, here or there.
        UnreachableError: nothing answers in 10 s, or something else than a Dask scheduler does.
    """
    try:
        arguments = security.get_connection_args(role)
        async with (
            asyncio.timeout(CONTACT_SECONDS),
            rpc(address, connection_args=arguments, timeout=CONTACT_SECONDS) as remote,
        ):
            return await question(remote)
    except Exception as error:  # noqa: BLE001 (a stranger's answer, read by Dask, fails in many ways)
        raise await _explained(address, security, role, error) from None


def is_address(address: str) -> bool:
    """Return whether a text is `tcp://HOST:PORT` or `tls://HOST:PORT`, with an IPv6 address in brackets."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("tcp", "tls") and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return usable and address.lower() == f"{parts.scheme}://{host}:{parts.port}"


def is_loopback(address: str) -> bool:
    """Return whether an address is on this machine: `localhost`, 127.0.0.0/8 or ::1, and no name that begins so."""
    host = urlsplit(address).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def shown(text: object) -> str:
    """Return a text as one line that fits an error."""
    return shortened(" ".join(str(text).split()))


async def _explained(address: str, security: Security, role: str, error: Exception) -> UnreachableError:
    """Return the likeliest reason why a question failed: our certificates, theirs, or what answers in truth."""
    if address.startswith("tls://") and (fault := certificate_fault(security, role)):
        return CertificatesError(fault)
    refused = next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLCertVerificationError)), None)
    if refused:
        return CertificatesError(f"the scheduler's certificate is not valid: {refused.verify_message}")
    reason = shown(error) or type(error).__name__
    answering = await what_answers(address)
    if answering == TLS:
        if address.startswith("tls://"):
            return CertificatesError("it does not take our certificate: is it of the same authority as its own?")
        return CertificatesError("write tls:// in its address")
    return UnreachableError(answering or reason)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


async def what_answers(address: str) -> str:
    """Return in words what is at an address that is no Dask scheduler: `TLS` if it speaks that, empty if unknown."""
    host, port = urlsplit(address).hostname, urlsplit(address).port
    try:
        greeting = await _greeting(host, port)
    except TimeoutError:
        return "nothing answers there"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else shown(error)
    if greeting.startswith(b"HTTP/"):
        return "a web server answers there: is it the dashboard's port?"
    if greeting:
        return ""
    return TLS if await _shakes_hands(host, port) else "it takes the connection and says nothing"


async def _greeting(host: str | None, port: int | None) -> bytes:
    """Return the first bytes that a server says, by itself or to an HTTP request."""
    async with asyncio.timeout(DASK_GREETING_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
    greeting = b""
    with contextlib.suppress(OSError):  # TimeoutError is one
        for begin in (b"", b"GET / HTTP/1.0\r\n\r\n"):
            writer.write(begin)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DASK_GREETING_SECONDS):
                    greeting = greeting or await reader.read(64)
    writer.close()
    return greeting


async def _shakes_hands(host: str | None, port: int | None) -> bool:
    """Return whether a server speaks TLS, whatever its certificate."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(DASK_GREETING_SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=anybody)
    except OSError:  # TimeoutError and ssl.SSLError are
        return False
    writer.transport.abort()
    return True


def certificate_fault(security: Security, role: str) -> str:
    """Return what is wrong with a role's own certificates, with the file's name; empty if nothing is."""
    tls = security.get_tls_config_for_role(role)
    for what, name in (("CA", "ca_file"), ("certificate", "cert"), ("key", "key")):
        value = tls.get(name)
        if not value:
            return f"no {what} is named"
        if "\n" not in value:
            try:
                Path(value).read_bytes()
            except OSError as error:
                return f"the {what} {value} cannot be read: {error.strerror}"
    try:
        security.get_connection_args(role)
    except (ssl.SSLError, ValueError) as error:
        return _unusable(tls, error)
    try:
        return _out_of_date(tls)
    except ValueError as error:  # a field that TLS does not look at
        return f"the certificate {_place(tls['cert'])} or its CA cannot be read ({shown(error)})"


def _unusable(tls: dict[str, str], error: Exception) -> str:
    reason = shown(getattr(error, "reason", None) or error)
    if reason == "KEY_VALUES_MISMATCH":
        return f"the key {_place(tls['key'])} does not belong to the certificate {_place(tls['cert'])}"
    try:
        authority = ssl.create_default_context()
        authority.load_verify_locations(**{"cadata" if "\n" in tls["ca_file"] else "cafile": tls["ca_file"]})
    except (ssl.SSLError, ValueError):
        return f"the CA {_place(tls['ca_file'])} is no certificate ({reason})"
    return f"the certificate {_place(tls['cert'])} or the key {_place(tls['key'])} is not in PEM format ({reason})"


def _out_of_date(tls: dict[str, str]) -> str:
    from cryptography import x509  # here: half a second that only a failure needs

    now = datetime.datetime.now(datetime.UTC)
    for what, value in (("CA", tls["ca_file"]), ("certificate", tls["cert"])):
        certificate = x509.load_pem_x509_certificate(value.encode() if "\n" in value else Path(value).read_bytes())
        if now > certificate.not_valid_after_utc:
            return f"the {what} {_place(value)} expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        if now < certificate.not_valid_before_utc:
            return (
                f"the {what} {_place(value)} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            )
    return ""


def _place(value: str) -> str:
    return "in Dask's configuration" if "\n" in value else value
