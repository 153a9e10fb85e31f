"""Another user of the machine, who attacks a run: becomes `nobody`, tries everything, and tells what worked.

Reads one line of JSON: addresses, pids and paths, which a scan of the machine would give; prints one line of JSON per
stage and reads a line before it ends, so that what it holds open can be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import signal
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.core import rpc
from distributed.security import Security

from idletrain.cluster import certificates, dask_settings
from idletrain.cluster.identity import Identity
from idletrain.exchange.client import StoreClient
from idletrain.exchange.messages import LeaseId

NOBODY = 65534
PATIENCE = 4.0
PAGES = ("/idletrain", "/idletrain/view.json", "/status", "/metrics", "/info/main/workers.html", "/sitemap.json")


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    foreign = certificates.issue("other", ("local",), soon)["local"]
    securities = {"tcp": Security(), "tls": foreign.security(), "blind tls": BlindSecurity.of(foreign)}
    asyncio.run(asyncio.sleep(0))  # all that is imported late is imported now, as the package may not be readable
    dask_settings.lift_file_limit()
    become_nobody()
    done = {
        **asyncio.run(over_the_network(asked, securities)),
        **on_the_machine(asked),
        **on_the_page(asked),
    }
    print(json.dumps(done), flush=True)
    with contextlib.ExitStack() as stack:
        held = [
            [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(asked["half_open"])]
            for port in asked["ports"].values()
        ]
        print(json.dumps({"opened": [len(connections) for connections in held]}), flush=True)
        sys.stdin.readline()


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


class BlindSecurity(Security):
    """TLS that takes any server's certificate: the server alone can refuse."""

    @classmethod
    def of(cls, identity: Identity) -> BlindSecurity:
        parts = {"cert": identity.cert, "key": identity.key}
        files = {f"tls_{role}_{part}": text for role in ("client", "worker") for part, text in parts.items()}
        return cls(tls_ca_file=identity.ca, require_encryption=True, **files)

    def get_connection_args(self, role: str) -> dict[str, Any]:
        arguments: dict[str, Any] = super().get_connection_args(role)
        arguments["ssl_context"].verify_mode = ssl.CERT_NONE
        return arguments


async def over_the_network(asked: dict[str, Any], securities: dict[str, Security]) -> dict[str, str]:
    """Try each kind of connection, by the name that it has in what is told."""
    done = {}
    for scheme, security in securities.items():
        arguments = security.get_connection_args("worker")
        protocol = scheme.split()[-1]
        address_of = {name: f"{protocol}://127.0.0.1:{port}" for name, port in asked["ports"].items()}
        for name in ("scheduler", "worker", "store"):
            address = address_of[name]
            done[f"connect to {name} over {scheme}"] = await tried(lambda a=address, c=arguments: identify(a, c))
        scheduler, worker, store = (address_of[name] for name in ("scheduler", "worker", "store"))
        done[f"submit over {scheme}"] = await tried(lambda a=scheduler, s=security: submit(a, s))
        done[f"end a worker over {scheme}"] = await tried(lambda a=worker, c=arguments: terminate(a, c))
        done[f"pull and push over {scheme}"] = await tried(lambda a=store, c=arguments: push(a, c, asked["run"]))
    return done


async def tried(attack: Callable[[], Awaitable[object]]) -> str:
    try:
        async with asyncio.timeout(2 * PATIENCE):
            return f"worked: {await attack()}"
    except Exception as error:
        return f"failed: {chain(error)}"


def chain(error: BaseException | None) -> str:
    """An error and those that led to it."""
    errors = []
    while error:
        errors.append(f"{type(error).__name__} {error}")
        error = error.__cause__ or error.__context__
    return " < ".join(errors)


async def identify(address: str, arguments: dict[str, Any]) -> object:
    async with rpc(address, connection_args=arguments, timeout=PATIENCE) as remote:
        return await remote.identity()


async def submit(address: str, security: Security) -> object:
    async with Client(address, security=security, asynchronous=True, timeout=PATIENCE, set_as_default=False) as client:
        return await client.submit(os.getuid)


async def terminate(address: str, arguments: dict[str, Any]) -> object:
    async with rpc(address, connection_args=arguments, timeout=PATIENCE) as remote:
        return await remote.terminate()


async def push(address: str, arguments: dict[str, Any], run: str) -> object:
    client = StoreClient(address, arguments)
    try:
        return str(await client.pull(LeaseId(run, 1, 0, 0, 1)))
    finally:
        await client.close()


def on_the_machine(asked: dict[str, Any]) -> dict[str, str]:
    done = {}
    for name, pid in asked["pids"].items():
        try:
            os.kill(pid, signal.SIGTERM)
            done[f"signal {name}"] = "worked"
        except OSError as error:
            done[f"signal {name}"] = f"failed: {type(error).__name__}"
    for name in (asked["run_dir"], *asked["files"]):
        try:
            content = list(Path(name).iterdir()) if name == asked["run_dir"] else Path(name).read_bytes()
            done[f"read {name}"] = f"worked: {len(content)}"
        except OSError as error:
            done[f"read {name}"] = f"failed: {type(error).__name__}"
    return done


def on_the_page(asked: dict[str, Any]) -> dict[str, str]:
    base, done = f"http://127.0.0.1:{asked['ports']['page']}", {}
    for page in PAGES:
        done[f"see {page}"] = answer(urllib.request.Request(base + page))
        done[f"see {page} by another name"] = answer(urllib.request.Request(base + page, headers={"Host": "x.example"}))
    done["guess the token"] = answer(urllib.request.Request(f"{base}/idletrain?token={'0' * 64}"))
    for what in ("drain", "kill"):
        headers = {"X-Idletrain": what, "Origin": base, "Cookie": f"idletrain-{asked['ports']['page']}=x"}
        body = json.dumps({"worker": asked["worker"]}).encode()
        done[f"press {what}"] = answer(urllib.request.Request(f"{base}/idletrain/{what}", body, headers))
    return done


def answer(request: urllib.request.Request) -> str:
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return f"worked: {reply.status}"
    except OSError as error:  # HTTPError, too
        return f"failed: {getattr(error, 'code', type(error).__name__)}"


if __name__ == "__main__":
    main()
