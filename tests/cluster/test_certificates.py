"""A run's certificates work with Dask's own comms, and nobody else's do."""

from __future__ import annotations

import asyncio
import datetime
import ssl

import pytest
from cryptography import x509
from distributed.core import Server, rpc
from distributed.security import Security

from idletrain.cluster import certificates
from idletrain.cluster.identity import Identity

SOON = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=4)
ROLES = ("head", "worker")


async def call(server: Identity, client: Security) -> str:
    """Ask a server something over TLS."""
    serving = Server({"who": lambda: "head"})
    await serving.listen("tls://127.0.0.1:0", **server.security().get_listen_args("scheduler"))
    try:
        async with rpc(serving.address, connection_args=client.get_connection_args("worker"), timeout=5) as remote:
            answer: str = await remote.who()
            return answer
    finally:
        await serving.close()


def test_roles_of_one_run_talk_to_each_other() -> None:
    issued = certificates.issue("night", ROLES, SOON)
    assert asyncio.run(call(issued["head"], issued["worker"].security())) == "head"


def test_another_run_s_certificate_is_refused() -> None:
    ours, theirs = (certificates.issue(name, ROLES, SOON) for name in ("night", "day"))
    with pytest.raises((OSError, ssl.SSLError)):
        asyncio.run(call(ours["head"], theirs["worker"].security()))


def test_they_end_a_day_after_the_run() -> None:
    issued = certificates.issue("night", ROLES, SOON)
    for text in (issued["head"].cert, issued["head"].ca, issued["worker"].cert):
        loaded = x509.load_pem_x509_certificate(text.encode())
        assert abs(loaded.not_valid_after_utc - SOON - certificates.GRACE) < datetime.timedelta(seconds=1)


def test_each_role_has_a_key_of_its_own() -> None:
    issued = certificates.issue("night", ROLES, SOON)
    assert issued["head"].key != issued["worker"].key
