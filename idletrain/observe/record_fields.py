"""Check that a line of a run's records holds the fields of its kind; readers skip one that does not.

Records only tell what happened: a damaged line must neither stop a run from going on nor break a display.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MOST_COUNT, MOST_SUBNETS = 1 << 53, 1 << 20


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_optional_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_optional_number(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_job(value: Any) -> bool:
    """Return whether it is a table, as are those of its sections that are read."""
    if not _is_table(value):
        return False
    training = value.get("training", {})
    return _is_table(value.get("nodes", {})) and _is_table(training) and _is_table(training.get("optimizer", {}))


def _are_round_parts(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and value.keys() >= {*ROUND_PARTS} and all(map(_is_number, value.values()))
    )


ROUND_PARTS = ("pull", "compute", "push", "commit")  # consecutive parts of a round, forecast and measured
COUNTS = (
    "round rounds subnet attempt steps step kept_steps lost_steps bytes bytes_down bytes_up memory_bytes pid "
    "parameters resumed_at local_steps phase phases copies"
)
NUMBERS = (
    "t s seconds train_seconds kept_seconds commit_seconds pull_seconds push_seconds norm_fraction least_trained lr "
    "samples_a_step"
)
OPTIONAL_NUMBERS = "target usd_per_hour on_demand_usd_per_hour samples"  # of a job, machine or stream without one
SCORES = "accuracy loss calibration_error temperature constant_loss value"
TEXTS = (
    "metric text run name cause reason status reply ended instance role type zone market run_dir device cohort version"
)
KINDS_OF_VALUE: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(COUNTS.split(), _is_count),
    **dict.fromkeys(NUMBERS.split(), _is_number),
    **dict.fromkeys(SCORES.split(), _is_score),
    **dict.fromkeys(TEXTS.split(), _is_text),
    **dict.fromkeys(OPTIONAL_NUMBERS.split(), _is_optional_number),
    "worker": _is_optional_text,  # null of an update whose worker is gone
    **dict.fromkeys(("measured", "expected"), _are_round_parts),
    "groups": _is_table,
    "job": _is_job,
    "metrics": lambda value: isinstance(value, dict) and all(map(_is_score, value.values())),
    "better": lambda value: isinstance(value, dict) and set(value.values()) <= {"higher", "lower"},
    "best_round": lambda value: value is None or _is_count(value),
    **dict.fromkeys(("dashboard", "dashboard_note", "params_sha256", "command"), _is_optional_text),
    "subnet": lambda value: value == -1 or _is_count(value),  # a push that names none is refused with -1
    "subnets": lambda value: _is_count(value) and value <= MOST_SUBNETS,
}
LEASE = "round subnet attempt"
FIELDS_OF_KIND: Mapping[str, str] = {
    "run_started": "run subnets rounds target parameters resumed_at run_dir dashboard",
    "phase_started": "round phase subnets copies local_steps",
    "worker_joining": "worker",
    "joining_failed": "worker",
    "worker_joined": "worker name memory_bytes device pid",
    "worker_refused": "worker reason",
    "worker_at_risk": "worker",
    "worker_notice": "worker",
    "worker_left": "worker name cause",
    "worker_sick": "worker name cause reason",
    "leased": f"{LEASE} worker step",
    "progress_saved": f"{LEASE} steps",
    "lost": f"{LEASE} worker cause kept_steps lost_steps kept_seconds",
    "staged": f"{LEASE} worker steps train_seconds",
    "refused": f"{LEASE} reply",
    "attempt_ended": f"{LEASE} worker ended",
    "round_committed": "round steps seconds commit_seconds bytes_down bytes_up",
    "evaluated": "round accuracy loss",
    "best": "round metric value",
    "warning": "reason",
    "paused": "reason",
    "resumed": "reason",
    "stopping": "reason",
    "waiting": "reason",
    "trial": "text",
    "instance_launched": "t instance role type zone market usd_per_hour on_demand_usd_per_hour",
    "instance_ended": "t instance reason",
    "spot_price": "t type zone usd_per_hour",
    "run_ended": "status rounds params_sha256 run_dir",
}


def is_sound(event: Any) -> bool:
    """Return whether a line's value is a record whose known fields are there and have values of their kind."""
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return False
    if event["kind"] not in FIELDS_OF_KIND:
        return True
    needed = {"s", *FIELDS_OF_KIND[event["kind"]].split()}
    known = KINDS_OF_VALUE.keys() & event.keys()
    return needed <= event.keys() and all(KINDS_OF_VALUE[field](event[field]) for field in known)
