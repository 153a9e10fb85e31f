"""Find a run by its name wherever it is: below runs/ here, in a rehearsal that is going on, or in a cloud.

Each launch into a cloud is noted in this user's state directory; from then on its name is enough.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from idletrain.cli.arguments import run_dir_of
from idletrain.errors import JobError, RunError, reading
from idletrain.providers.protocol import CloudProvider, LaunchRequest
from idletrain.providers.table import cloud_named
from idletrain.storage import has_head, owner_only, state_folder

LAUNCHES = "launches.jsonl"
LARGEST_PROCESS = 1 << 22  # Linux' largest process id
MOST_NAMES = 8  # that an error lists


@dataclass(frozen=True)
class Place:
    """Where a run is.

    Attributes:
        run: Its directory, its name in a cloud, or its s3:// prefix.
        cloud: The cloud's name; None for a directory of this machine.
        region: The cloud's region; None for the configured one.
        rehearsal: The process whose sandbox it is in; None for the newest one.
    """

    run: str
    cloud: str | None = None
    region: str | None = None
    rehearsal: int | None = None

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.rstrip("/").rsplit("/", 1)[-1]

    @property
    def text(self) -> str:
        """Where it is, for a person."""
        if self.cloud is None:
            return self.run
        return " ".join(filter(None, (self.cloud, self.region, self.run if self.run.startswith("s3://") else "")))

    def provider(self) -> CloudProvider:
        """Return its cloud."""
        return cloud_named(self.cloud or "", LaunchRequest(rehearsal=self.rehearsal))

    @contextlib.contextmanager
    def account(self) -> Iterator[Any]:
        """Yield its cloud's account."""
        with self.provider().account(self.region) as account:
            yield account


def note_launch(place: Place) -> None:
    """Note a launch into a cloud; where nothing can be written, later commands need --cloud."""
    with contextlib.suppress(OSError):
        state_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(state_folder() / LAUNCHES, "a", opener=owner_only) as file:
            file.write(json.dumps(asdict(place)) + "\n")


def noted() -> list[Place]:
    """Return where the noted launches are, the newest last, without rehearsals that have ended."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError):  # none yet
        lines = (state_folder() / LAUNCHES).read_bytes().splitlines()
    places = dict.fromkeys(filter(None, map(parse_note, lines)))
    rehearsals = {place.rehearsal: place for place in places if place.rehearsal is not None}
    is_open = {process for process, place in rehearsals.items() if _is_open(place)}
    return [place for place in places if place.rehearsal is None or place.rehearsal in is_open]


def parse_note(line: bytes) -> Place | None:
    """Return what a line notes; None if it is damaged."""
    try:
        record = json.loads(line)
        run, cloud, region, rehearsal = (record[key] for key in ("run", "cloud", "region", "rehearsal"))
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    is_place = isinstance(run, str) and isinstance(cloud, str) and isinstance(region, str | None)
    is_process = rehearsal is None or (type(rehearsal) is int and 0 < rehearsal <= LARGEST_PROCESS)
    return Place(run, cloud, region, rehearsal) if is_place and is_process else None


def _is_open(place: Place) -> bool:
    import psutil

    if not psutil.pid_exists(place.rehearsal or 0):  # before what takes long to import
        return False
    return _has_account(place)


def _has_account(place: Place) -> bool:
    with contextlib.suppress(RunError, JobError), place.account():
        return True
    return False


def find_run(
    run: str,
    cloud: str | None = None,
    region: str | None = None,
    *,
    here: Literal["too", "otherwise", "never"] = "too",
) -> Place:
    """Return where a run is: in the directory of that name, or where it was launched from this machine.

    Args:
        run: Its name, directory or s3:// prefix.
        cloud: The cloud that it is in, if the user says so.
        region: The region that it is in, if the user says so.
        here: Whether it may be in a directory of this machine: as well as in a cloud, where no cloud has it, or never.

    Raises:
        JobError: there is one of that name in several places.
        RunError: there is none, or it may not be here, and is.
    """
    is_url, in_cloud = run.startswith("s3://"), bool(cloud or region or here == "never")
    if "/" in run and not is_url and not in_cloud:
        return _here(Path(run))
    places = [
        place
        for place in noted()
        if run.rstrip("/") in (place.run.rstrip("/"), place.name)
        and cloud in (None, place.cloud)
        and region in (None, place.region)
    ]
    if not in_cloud and not is_url and run_dir_of(run).exists() and (here == "too" or not places):
        places.insert(0, Place(str(run_dir_of(run))))
    if len(places) > 1:
        where = " and in ".join(place.text for place in places)
        raise JobError(f"there is a run {run} in {where}; name its directory, or its --cloud and --region")
    if places:
        return places[0]
    if here == "never" and not cloud and not region and run_dir_of(run).exists():
        raise RunError(f"run {run} is in {run_dir_of(run)}, and no cloud's machine trains it; there is nothing to do")
    place = Place(run, cloud or "aws", region)
    return place if cloud or region or is_url or (here == "never" and _has_account(place)) else _here(run_dir_of(run))


def _here(run_dir: Path) -> Place:
    if run_dir.is_dir():
        return Place(str(run_dir))
    name, folder = run_dir.name, run_dir.parent
    if (folder / f"{name}.sweep.json").exists():
        raise RunError(f"{name} is a sweep; `idletrain compare {name}` shows its trials, which have names of their own")
    names = sorted({path.parent.name for kind in ("events.jsonl", "wal") for path in folder.glob(f"*/{kind}")})
    close = difflib.get_close_matches(name, names, n=1)
    first = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    known = f"did you mean {close[0]}?" if close else f"there are: {first}" if names else "there is none at all"
    raise RunError(f"there is no run {name} in {folder}; {known}; of one in a cloud, add --cloud")


def events_of(place: Place) -> list[dict[str, Any]]:
    """Return all events of a run so far.

    Raises:
        RunError: there are none, or they cannot be read.
    """
    from idletrain.cli.cloud_records import named_prefix, read_events
    from idletrain.observe.records import read_records

    if place.cloud:
        with place.account() as account:
            return read_events(named_prefix(account, place.run))
    file = Path(place.run, "events.jsonl")
    if file.exists():
        with reading(file, "fix that and try again"):
            events: list[dict[str, Any]] = list(read_records(file))
        if events:
            return events
    raise RunError(f"run {place.name} has no records in {file} yet; look again once it trains")


def is_over(place: Place) -> bool:
    """Return whether nothing of a run goes on, as far as this machine knows."""
    return place.cloud is None and not has_head(Path(place.run))


def seen_until(place: Place, events: list[dict[str, Any]]) -> float:
    """Return when a run was last looked at, in Unix seconds: now, or with its last event if nothing of it goes on."""
    return float(events[-1]["t"]) if events and is_over(place) else time.time()


@contextlib.contextmanager
def directory_of(place: Place) -> Iterator[Path]:
    """Yield a run's directory; that of a run in a cloud is a copy, which is gone after the context.

    Raises:
        RunError: there is no such run in the cloud, or nothing of it yet.
    """
    from idletrain.cli.cloud_records import named_prefix
    from idletrain.rounds.durable import s3_mirror

    if place.cloud is None:
        yield Path(place.run)
        return
    with tempfile.TemporaryDirectory(prefix="idletrain-") as folder:
        with place.account() as account:
            prefix = named_prefix(account, place.run)
            if not s3_mirror.restore(prefix, Path(folder, place.name)):
                raise RunError(f"{prefix.url} holds no network yet; look again after its first round")
        yield Path(folder, place.name)
