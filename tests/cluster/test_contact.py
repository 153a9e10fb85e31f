"""A scheduler answers within seconds, or the error says what answers in its place and which file is to blame."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler
from distributed.security import Security

from idletrain.cluster import certificates, contact
from idletrain.cluster.contact import CertificatesError, UnreachableError, is_address, is_loopback
from idletrain.cluster.identity import Identity

SOON = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As http.server does: one line in, one page out, whatever the line."""
    await reader.read(1)
    writer.write(b"HTTP/1.0 400 Bad request syntax\r\nContent-Type: text/html\r\n\r\n<html></html>")


async def babbling(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail.example ESMTP\r\n" * 100)
    await asyncio.sleep(60)


async def dripping(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Promise a greeting of 2^56 bytes and send one at a time."""
    writer.write(bytes(7) + b"\1")
    while True:
        writer.write(b"\0")
        await writer.drain()
        await asyncio.sleep(0.1)


async def closing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@contextlib.asynccontextmanager
async def serving(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve; yields HOST:PORT."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                await talk(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def ask(address: str, security: Security | None = None) -> Any:
    return await contact.ask(address, security or Security(), "client", lambda remote: remote.identity())


async def answer_of(address: str, security: Security | None = None) -> str:
    with pytest.raises(UnreachableError) as caught:
        await ask(address, security)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "CONTACT_SECONDS", 1.5)
    monkeypatch.setattr(contact, "DASK_GREETING_SECONDS", 0.5)


def test_a_port_that_says_nothing_or_speaks_http_is_refused_in_fifteen_seconds() -> None:
    async def check() -> tuple[list[str], float]:
        async with serving(silent) as one, serving(web) as other:
            began = time.monotonic()
            said = await asyncio.gather(answer_of(f"tcp://{one}"), answer_of(f"tcp://{other}"))
            return said, time.monotonic() - began

    (nothing, page), seconds = asyncio.run(check())
    assert nothing == "UnreachableError: it takes the connection and says nothing"
    assert page == "UnreachableError: a web server answers there: is it the dashboard's port?"
    assert seconds < 15


@pytest.mark.parametrize("talk", [babbling, dripping, closing])
@pytest.mark.usefixtures("quick")
def test_other_talk_is_no_scheduler(talk: Talk) -> None:
    async def check() -> str:
        async with serving(talk) as place:
            return await asyncio.wait_for(answer_of(f"tcp://{place}"), 10)

    assert asyncio.run(check()).startswith("UnreachableError: ")


@pytest.mark.usefixtures("quick")
def test_a_closed_port_is_named_so() -> None:
    async def check() -> str:
        async with serving(silent) as place:
            pass
        return await answer_of(f"tcp://{place}")

    assert asyncio.run(check()) == "UnreachableError: Connection refused"


def test_a_scheduler_at_an_ipv6_address_answers() -> None:
    async def check() -> Any:
        async with Scheduler(host="[::1]", port=0, dashboard=False, dashboard_address=":0") as scheduler:
            assert scheduler.address.startswith("tcp://[::1]:")
            assert is_address(scheduler.address)
            assert is_loopback(scheduler.address)
            return await ask(scheduler.address)

    assert asyncio.run(check())["type"] == "Scheduler"


def issued(until: datetime.datetime = SOON) -> Identity:
    return certificates.issue("demo", ("head",), until)["head"]


def in_files(place: Path, identity: Identity) -> Security:
    """A client's certificates as files, as a user has them."""
    place.mkdir(exist_ok=True)
    for name in ("ca", "cert", "key"):
        (place / f"{name}.pem").write_text(getattr(identity, name))
    files = {"tls_client_cert": str(place / "cert.pem"), "tls_client_key": str(place / "key.pem")}
    return Security(tls_ca_file=str(place / "ca.pem"), require_encryption=True, **files)


async def with_scheduler(own: Identity, security: Security) -> Any:
    """Ask a scheduler that has certificates of its own."""
    secure = {"security": own.security(), "protocol": "tls"}
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0", **secure) as scheduler:
        return await ask(scheduler.address, security)


@pytest.mark.usefixtures("quick")
def test_certificates_that_fit_are_taken(tmp_path: Path) -> None:
    own = issued()
    assert asyncio.run(with_scheduler(own, in_files(tmp_path, own)))["type"] == "Scheduler"


def expired() -> Identity:
    return issued(datetime.datetime.now(datetime.UTC) - certificates.GRACE - datetime.timedelta(minutes=5))


@pytest.mark.usefixtures("quick")
def test_a_scheduler_whose_certificate_expired_is_named_with_the_reason(tmp_path: Path) -> None:
    old, new = expired(), issued()
    mixed = in_files(tmp_path, Identity(old.ca, new.cert, new.key))  # the old CA knows the scheduler, if expired
    with pytest.raises(CertificatesError, match="expired"):
        asyncio.run(with_scheduler(old, mixed))


@pytest.mark.usefixtures("quick")
def test_a_scheduler_of_a_strange_authority_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CertificatesError, match=r"the scheduler's certificate is not valid: .*certificate"):
        asyncio.run(with_scheduler(issued(), in_files(tmp_path, issued())))


@pytest.mark.usefixtures("quick")
def test_a_client_of_a_strange_authority_is_told_that_it_was_refused(tmp_path: Path) -> None:
    own, other = issued(), issued()
    with pytest.raises(CertificatesError, match="it does not take our certificate"):
        asyncio.run(with_scheduler(own, in_files(tmp_path, Identity(own.ca, other.cert, other.key))))


def removed(file: Path) -> None:
    file.unlink()


def emptied(file: Path) -> None:
    file.write_text("")


def scrambled(file: Path) -> None:
    file.write_bytes(b"\xff\x00 no PEM")


@pytest.mark.parametrize("spoil", [removed, emptied, scrambled])
@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
@pytest.mark.usefixtures("quick")
def test_a_file_of_ours_that_is_missing_or_no_certificate_is_named(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    own = issued()
    security = in_files(tmp_path, own)
    spoil(tmp_path / name)
    with pytest.raises(CertificatesError) as caught:
        asyncio.run(with_scheduler(own, security))
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_our_own_certificate_that_expired_or_has_another_key_is_named(tmp_path: Path) -> None:
    own, old, other = issued(), expired(), issued()
    with pytest.raises(CertificatesError, match=r"cert.pem expired at "):
        asyncio.run(with_scheduler(own, in_files(tmp_path, Identity(own.ca, old.cert, old.key))))
    with pytest.raises(CertificatesError, match=r"key.pem does not belong to the certificate .*cert.pem"):
        asyncio.run(with_scheduler(own, in_files(tmp_path, Identity(own.ca, own.cert, other.key))))


@pytest.mark.usefixtures("quick")
def test_plain_words_to_a_tls_port_are_told_so() -> None:
    async def check() -> str:
        secure = {"security": issued().security(), "protocol": "tls"}
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0", **secure) as scheduler:
            return await answer_of(scheduler.address.replace("tls://", "tcp://"))

    assert asyncio.run(check()) == "CertificatesError: write tls:// in its address"


@pytest.mark.parametrize(
    "address",
    [
        "", "localhost:8786", "tcp://", "tcp://:1", "tcp://h", "tcp://h:", "tcp://h:0", "tcp://h:99999", "tcp://h:x",
        "tcp://[::1]", "tcp://[::1:99", "tcp://::1:8786", "tcp://u@127.0.0.1:1", "tcp://127.0.0.1:1/x", "tls://h:1:2",
        "tcp://127.0.0.1:1?x", "http://127.0.0.1:1", "tcp://h:1\n", "tcp://" + "h" * 1_000_000, "s3://x", "\0",
    ],
)  # fmt: skip
def test_what_is_no_address_is_told_apart(address: str) -> None:
    assert not is_address(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tls://Host.example:65535", "tcp://[::1]:8786"])
def test_what_is_an_address_is_taken(address: str) -> None:
    assert is_address(address)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("127.9.8.7", True), ("localhost", True), ("[::1]", True), ("[::ffff:10.0.0.1]", False),
        ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("10.0.0.5", False), ("[::2]", False),
    ],
)  # fmt: skip
def test_only_this_machines_own_addresses_are_loopback(host: str, here: bool) -> None:
    assert is_loopback(f"tcp://{host}:1") is here
