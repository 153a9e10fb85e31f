"""Read a job file, and tell every fault in it at once, each as a sentence."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from idletrain import job_yaml
from idletrain.contradictions import contradictions
from idletrain.errors import LONGEST_SHOWN, JobError, shortened
from idletrain.job import Job
from idletrain.strict_settings import absolute_place

LARGEST_TREE = 100_000  # values of a job, an alias' counted wherever it stands
LARGEST_FILE_BYTES = 1 << 20
# What other libraries call our fields.
OTHER_NAMES = {
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
}
EXAMPLES = {  # of settings, for one who writes something else in their place
    "MetricSettings": '{metric: "package.module:function", better: lower}',
    "OptimizerSettings": "{name: adamw, lr: 0.001}",
    "NodeSettings": "{count: 4}",
}


def load_job(path: Path, name: str | None = None) -> Job:
    """Read a job file.

    Args:
        path: The file.
        name: The run's name, instead of the job's; None leaves it.

    Raises:
        JobError: the file is missing, is not YAML, or has faults; it holds all of them, one sentence each, with missing
            files and packages that the job names.
    """
    tree = read_tree(path) | ({} if name is None else {"name": name})
    try:
        return parse_job(tree)
    except JobError as error:
        raise JobError([*error.faults, *_missing_targets(tree)]) from None


def read_tree(path: Path) -> dict[str, Any]:
    """Read a job file as plain values, which may be no job yet.

    Raises:
        JobError: the file is missing, is not YAML, or does not hold fields.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise JobError(f"{path}: has more than {LARGEST_FILE_BYTES >> 20} MiB; name a job file")
        tree = job_yaml.parse_yaml(content.decode())
    except OSError as error:
        near = next((str(p) for p in (path.with_suffix(".yaml"), path.with_suffix(".yml")) if p.is_file()), None)
        remedy = f"did you mean {near}?" if near and near != str(path) else "name an existing job file"
        raise JobError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except RecursionError:
        raise JobError(f"{path}: is nested too deeply to be a job") from None
    except yaml.YAMLError as error:
        raise JobError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    except (ValueError, TypeError, AttributeError) as error:  # bytes that are no text, dates such as 2024-13-01
        raise JobError(f"{path}: is not YAML in UTF-8: {error}") from None
    if not isinstance(tree, dict):
        raise JobError(f"{path}: should hold fields such as name, model and data; `idletrain init` writes one")
    return tree


def parse_job(tree: dict[str, Any]) -> Job:
    """Check a job given as plain Python values, and return it.

    Raises:
        JobError: it has faults; holds all of them.
    """
    if fault := _unreadable(tree):
        raise JobError(fault)
    try:
        job = Job.model_validate(tree)
    except ValidationError as error:
        raise JobError([*map(_sentence, error.errors()), *_contradictions_beside(tree, error)]) from None
    if faults := [sentence for _, sentence in contradictions(job)]:
        raise JobError(faults)
    return job


def _unreadable(tree: dict[str, Any]) -> str:
    """Return why a tree cannot be a job whatever its fields: aliases that multiply, or text that no file can have."""
    values: list[Any] = [tree]
    for count, value in enumerate(values):  # grows while it is walked
        if count > LARGEST_TREE:
            return f"the job: has more than {LARGEST_TREE} values; is an alias (*name) within itself?"
        if isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            return f"the job: {_shown(value)} has characters that no name or path can have; leave them out"
    return ""


def _contradictions_beside(tree: dict[str, Any], error: ValidationError) -> list[str]:
    """Return the contradictions between the fields that are sound, of a job in which others are not."""
    wrong = [fault["loc"] for fault in error.errors()]
    sound: dict[str, Any] = {"name": "t", "model": {"factory": "a:b"}, "data": {}}
    sound |= {name: _without(value, [loc[1:] for loc in wrong if loc[:1] == (name,)]) for name, value in tree.items()}
    for name in [str(loc[0]) for loc in wrong if len(loc) == 1 or loc[0] in ("name", "model", "data")]:
        sound.pop(name, None)
    try:
        job = Job.model_validate({"name": "t", "model": {"factory": "a:b"}, "data": {}} | sound)
    except ValidationError:
        return []
    paths = {".".join(map(str, loc)) for loc in wrong}
    return [
        sentence
        for fields, sentence in contradictions(job)
        if not any(field == path or field.startswith(f"{path}.") for field in fields for path in paths)
    ]


def _without(value: Any, locations: list[tuple[Any, ...]]) -> Any:
    """Return a tree without some of its fields, and without an item of a list in which a field is missing."""
    if isinstance(value, list | tuple):
        wrong = {loc[0] for loc in locations if loc}
        return [item for number, item in enumerate(value) if number not in wrong]
    if not isinstance(value, dict):
        return value
    below = {key: [loc[1:] for loc in locations if loc[:1] == (key,)] for key in value}
    return {key: _without(item, below[key]) for key, item in value.items() if () not in below[key]}


def _missing_targets(tree: dict[str, Any]) -> Iterator[str]:
    """Yield a fault for each missing package and file that a faulty job names; a sound job opens them later."""
    model, data = (tree[s] if isinstance(tree.get(s), dict) else {} for s in ("model", "data"))
    for field, name in (("model.factory", model.get("factory")), ("data.factory", data.get("factory"))):
        package = name.replace(":", ".").split(".")[0] if isinstance(name, str) else ""
        if package and package not in sys.modules and importlib.util.find_spec(package) is None:
            reason = f"No module named {_shown(package)}"
            remedy = "write it as package.module:name, and run idletrain in the module's folder"
            yield f"{field}: {_shown(name)} cannot be imported ({reason}); {remedy}"
    for field in ("train", "test"):
        paths = data.get(field)
        for path in [paths] if isinstance(paths, str) else paths if isinstance(paths, list | tuple) else []:
            if isinstance(path, str) and not path.startswith("s3://") and not _exists(path):
                shown = shortened(path)
                yield f"data.{field}: {shown} cannot be read (No such file or directory); name an existing file"


def _exists(path: str) -> bool:
    try:
        return Path(absolute_place(path)).exists()
    except OSError:  # too long a name
        return False
    except ValueError:  # a zero byte, or what is a fault of its field
        return True


def _sentence(fault: Any) -> str:
    """Return a fault as one sentence: `field: value should be ...`."""
    field = shortened(".".join(str(part) for part in fault["loc"]))
    if fault["type"] == "extra_forbidden":
        known = _fields_at(fault["loc"][:-1])
        given = str(fault["loc"][-1])[:LONGEST_SHOWN]
        ours = OTHER_NAMES.get(given, given)
        elsewhere = [path for path in _paths(Job) if path.rpartition(".")[2] == ours]
        close = [ours] if ours in known else elsewhere or difflib.get_close_matches(given, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{field}: is not a field of a job; {hint}"
    if fault["type"] == "missing":
        return f"{field}: is missing; {_purpose(fault['loc'])}"
    if fault["type"] == "string_pattern_mismatch":
        return f"{field}: {_shown(fault['input'])} should be lower-case letters, digits and hyphens, at most 63"
    if fault["type"] == "invalid_key":
        return f"{field}: is a number in place of a name; write decimals with a point (0.01), not with a comma"
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return _sentence_of_section(fault, field)
    if fault["type"] == "literal_error" and (names := re.findall(r"'([^']*)'", fault["ctx"]["expected"])):
        close = difflib.get_close_matches(str(fault["input"])[:LONGEST_SHOWN], names, n=1)
        fault = {**fault, "msg": fault["msg"] + (f"; did you mean {close[0]}?" if close else "")}
    if fault["type"] == "tuple_type":
        fault = {**fault, "msg": f"should be a list, such as [{_shown(fault['input'])}]"}
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{field}: {_shown(fault['input'])} {message[:1].lower()}{message[1:]}"


def _sentence_of_section(fault: Any, field: str) -> str:
    """Return a fault as one sentence, where something else stands in the place of fields."""
    name = fault.get("ctx", {}).get("class_name", "")
    purpose = _purpose(fault["loc"])
    example = f"as in {EXAMPLES[name]}" if name in EXAMPLES else purpose if purpose != "add it" else "below it"
    what = "is empty; it" if fault["input"] is None else _shown(fault["input"])
    optional = "" if field in ("model", "data") or fault["input"] is not None else ", or be left out"
    return f"{field}: {what} should be fields and their values, {example}{optional}"


def _shown(value: Any) -> str:
    """Return a value as an error shows it: as Python writes it, but not all of a long one."""
    try:
        return shortened(repr(value))
    except ValueError:  # an integer of more than 4300 digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "the value"


def _settings_at(location: tuple[Any, ...]) -> type[BaseModel]:
    """Return the settings at a place of the job, which may be an item of a list: `("training", "optimizer")`."""
    settings: type[BaseModel] = Job
    for part in location:
        if not isinstance(part, int):  # items of a list are what its annotation names: tuple[Settings, ...]
            annotation = settings.model_fields[part].annotation
            settings = next(kind for kind in (annotation, *get_args(annotation)) if _is_settings(kind))
    return settings


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and not get_args(kind) and issubclass(kind, BaseModel)


def _paths(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all settings below some, those of a section before the sections within it."""
    yield from (prefix + name for name in settings.model_fields)
    for name, field in settings.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if _is_settings(kind):
                yield from _paths(kind, f"{prefix}{name}.")


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    return list(_settings_at(location).model_fields)


def _purpose(location: tuple[Any, ...]) -> str:
    examples = {
        "name": "name the run, for example name: fashion-mnist",
        "model": 'for example model: {factory: "idletrain.nn.models:mlp", args: {widths: [64, 128, 10]}}',
        "data": "for example data: {name: digits}",
        "lr": "for example lr: 0.1",
        "factory": 'for example factory: "package.module:function"',
        "parameters": "for example parameters: [bias, norm]",
    }
    if location[-2:] == ("optimizer", "name"):
        return "for example name: adamw"
    return examples.get(str(location[-1]), "add it")
