"""Let a user's own processes reach their run on this machine, and nobody else's: by files that only the user can read.

While a run trains, `RUN/access/` has its certificate and key, and its dashboard's token; `RUN/cluster.json` has the
addresses. A new head makes new ones, and they go with it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from idletrain.cluster import certificates
from idletrain.cluster.dask_scheduler import CLUSTER_FILE
from idletrain.cluster.identity import OPTIONS, Identity
from idletrain.errors import RunError, reading
from idletrain.observe.records import Record, Sink
from idletrain.storage import has_head, owner_only

ROLE = "local"  # one for head, scheduler and workers: they are one user's, on one machine
YEARS = datetime.timedelta(days=3650)  # before and after now: they go with the run, whatever its clock does
TOKEN_FILE = "token"  # noqa: S105 (a name)


@dataclass(frozen=True)
class Access:
    """The address and the certificates of a run that trains on this machine.

    Attributes:
        scheduler: The scheduler's address.
        ca_file: The run's authority.
        cert: A certificate for a worker.
        key: Its key.
    """

    scheduler: str
    ca_file: Path
    cert: Path
    key: Path


@contextlib.asynccontextmanager
async def issued(run_dir: Path, run: str) -> AsyncIterator[tuple[Identity, tuple[str, ...]]]:
    """Make certificates of a run's own; yield them, and the options of `idletrain worker` that name their files.

    Raises:
        RunError: the run directory cannot be written.
    """
    now, folder = datetime.datetime.now(datetime.UTC), folder_of(run_dir)
    identity = certificates.issue(run, (ROLE,), now + YEARS, now - YEARS)[ROLE]
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)  # must be new: one that another user made would be theirs to change
        options = identity.write(folder)
        with open(folder / TOKEN_FILE, "w", opener=owner_only) as file:
            file.write(identity.dashboard_token)
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror}); make room or set checkpoint.to") from None
    try:
        yield identity, options
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find(run_dir: Path) -> Access:
    """Return how to reach a run of this user's that trains on this machine now.

    Raises:
        RunError: there is none, or it is another user's.
        DamageError: its addresses are not what was written.
    """
    try:
        if run_dir.stat().st_uid != os.geteuid():
            raise RunError(f"run {run_dir} is another user's; lend this machine to your own, or give an address")
        if not (folder_of(run_dir).is_dir() and has_head(run_dir)):
            raise RunError(
                f"run {run_dir} does not train on this machine now; start it with `idletrain launch --resume`"
            )
        content = (run_dir / CLUSTER_FILE).read_bytes()
    except FileNotFoundError:
        raise RunError(f"there is no run in {run_dir} on this machine now; name one, or give an address") from None
    except OSError as error:
        raise RunError(f"{run_dir} cannot be read ({error.strerror}); is the run another user's?") from None
    with reading(run_dir / CLUSTER_FILE, "start the run again with --resume, which writes it anew"):
        scheduler = str(json.loads(content)["scheduler"])
    return Access(scheduler, *(folder_of(run_dir) / file for file in OPTIONS))


def link(run_dir: Path, dashboard: str) -> str:
    """Return a dashboard's address with the token of a run in this directory, if it has one now."""
    with contextlib.suppress(OSError):
        return f"{dashboard}?token={(folder_of(run_dir) / TOKEN_FILE).read_text()}"
    return dashboard


def with_link(run_dir: Path, sink: Sink) -> Sink:
    """Return a sink for the owner's eyes: it gets a run's events, with the token in the dashboard's address."""

    def take(event: Record) -> None:
        sink({**event, "dashboard": link(run_dir, event["dashboard"])} if event.get("dashboard") else event)

    return take


def folder_of(run_dir: Path) -> Path:
    """Return the directory of a run's certificates and token."""
    return run_dir / "access"
