"""Make the trials of a sweep: a job for each combination of the settings that it varies. Pure."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from idletrain import job_yaml
from idletrain.errors import JobError, shortened
from idletrain.job import Job
from idletrain.job_file import parse_job

MOST_TRIALS = 1000
DIGEST_LETTERS = 6  # of a trial's name
# Where the settings are that a trial's values follow from.
DECISIVE = ("model.", "data.", "training.", "stop.", "memory.compile.", "preemption.policy.")


@dataclass(frozen=True)
class Varied:
    """A setting of a job, and the values that it takes.

    Attributes:
        path: Where it is in the job, such as `training.optimizer.lr`.
        values: Its values, as YAML has them.
    """

    path: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class SweepTrial:
    """One combination.

    Attributes:
        values: The values by the setting's path.
        job: The job that has them, under a name of its own, which is the same whenever the values are.
    """

    values: Mapping[str, Any]
    job: Job

    @property
    def text(self) -> str:
        """The values, for a person."""
        return " ".join(f"{path.rpartition('.')[2]}={as_written(value)}" for path, value in self.values.items())


def as_written(value: Any) -> str:
    """Return a value as a user writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def parse_varied(text: str) -> Varied:
    """Parse `PATH=VALUE,VALUE`; a value is written as in a job file.

    Raises:
        JobError: it is written in another way.
    """
    path, equals, values = text.partition("=")
    try:
        given = job_yaml.parse_yaml(f"[{values}]") if equals and path and values else []
    except (yaml.YAMLError, RecursionError):
        given = []
    if not given or not isinstance(given, list):
        raise JobError(
            f"--set: {shortened(repr(text))} should be a setting and its values, such as training.optimizer.lr=0.05,0.1"
        )
    return Varied(path, tuple(given))


def trials(tree: Mapping[str, Any], varied: Sequence[Varied]) -> list[SweepTrial]:
    """Return a trial for each combination of values, in the order in which they are written.

    Args:
        tree: The job as plain values; without the varied settings it need not be one.
        varied: What differs.

    Raises:
        JobError: a combination is no job, a setting is named twice, or there are too many.
    """
    paths = [one.path for one in varied]
    if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        raise JobError(f"--set: {', '.join(twice)} is varied twice; name all of its values at once")
    combinations = list(itertools.islice(itertools.product(*(one.values for one in varied)), MOST_TRIALS + 1))
    if len(combinations) > MOST_TRIALS:
        raise JobError(f"--set: these are more than {MOST_TRIALS} trials; vary less")
    faults: dict[str, None] = {}
    found: list[SweepTrial] = []
    for values in combinations:
        chosen = dict(zip(paths, values, strict=True))
        try:
            found.append(SweepTrial(chosen, parse_job(_with(tree, chosen))))
        except JobError as error:
            faults |= dict.fromkeys(error.faults)
    if faults:
        raise JobError(list(faults))
    return list({trial.job.name: trial for trial in found}.values())


def as_plain(found: Sequence[SweepTrial]) -> list[dict[str, dict[str, Any]]]:
    """Return trials as plain values, for `from_plain`."""
    return [{"values": dict(trial.values), "job": trial.job.as_tree()} for trial in found]


def from_plain(plain: Sequence[Mapping[str, dict[str, Any]]]) -> list[SweepTrial]:
    """Return the trials that `as_plain` wrote."""
    return [SweepTrial(trial["values"], Job.model_validate(trial["job"])) for trial in plain]


def decisive_settings(job: Job) -> dict[str, Any]:
    """Return the settings of a job that a trial's values follow from, by their paths."""
    settings = _by_path(job.as_tree())
    return {path: value for path, value in settings.items() if f"{path}.".startswith(DECISIVE)}


def changed_paths(job: Job, settings: Mapping[str, Any], but: Sequence[str]) -> list[str]:
    """Return the paths of those settings that differ in a job, without some that may."""
    own, left_out = decisive_settings(job), object()
    paths = [path for path in {**own, **settings} if path not in but]
    return [path for path in paths if own.get(path, left_out) != settings.get(path, left_out)]


def _by_path(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        found |= _by_path(value, f"{above}{name}.") if is_section else {f"{above}{name}": value}
    return found


def _with(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(tree))
    for path, value in values.items():
        *above, last = path.split(".")
        place: Any = changed
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise JobError(f"--set: {path} is no setting of this job; name one as training.optimizer.lr")
        place[last] = value
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    if "name" in changed:
        changed["name"] = f"{changed['name']}-{digest[:DIGEST_LETTERS]}"
    return changed
