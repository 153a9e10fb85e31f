"""Check the arguments of `idletrain.fit` before anything is read, and let faults of its job name them."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from idletrain.errors import JobError
from idletrain.job import Job

_OPTIMIZER_HINT = 'give it as optimizer={"name": "adamw", "lr": 0.001}'
# Arguments that other libraries have, and what says the same here.
ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum"), _OPTIMIZER_HINT),
    **dict.fromkeys(("patience", "early_stopping"), 'give it as stop={"patience": 3}'),
    "criterion": "did you mean loss?",
}
CALLED = ("on_event", "on_round", "on_evaluate", "collate_fn")
_OF_TRAINING = (
    "loss", "method", "subnets", "copies", "local_steps", "rounds", "epochs", "batch_size", "optimizer", "seed",
    "evaluate_every", "metrics",
)  # fmt: skip
# The arguments that say what a job says in a section.
ARGUMENT_OF = {
    **{f"training.{name}": name for name in _OF_TRAINING},
    "nodes.count": "workers",
    "checkpoint.to": "run_dir",
}


def check_arguments(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a call with arguments that `fit` cannot take.

    Args:
        arguments: All arguments by name, those of the job's sections as `sections`.
        defaults: What each of them is where a call leaves it out.

    Raises:
        JobError: there are some; a sentence for each.
    """
    sections = arguments["sections"]
    faults = [
        *_module_faults(arguments["module"]),
        *_unknown(sections, defaults),
        *_kinds(arguments),
        *_twice(arguments, sections, defaults),
        *_unused(sections),
    ]
    if arguments["resume"] and arguments["name"] is None:
        faults.append("resume: goes on with a run of a name; give name, too")
    if faults:
        raise JobError(faults)


@contextlib.contextmanager
def named_as_arguments(sections: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, let faults of a job name the arguments of `fit` in place of the fields that these give."""
    try:
        yield
    except JobError as error:
        error.faults = tuple(as_arguments(fault, sections) for fault in error.faults)
        error.args = ("\n".join(error.faults),)
        raise


def as_arguments(fault: str, sections: Mapping[str, Any]) -> str:
    """Return a fault of a job with arguments in the place of the fields that they give."""
    for path, name in ARGUMENT_OF.items():
        section, _, field = path.partition(".")
        own = sections.get(section)
        if not (isinstance(own, Mapping) and field in own):
            fault = re.sub(rf"\b{re.escape(path)}\b", name, fault)
    return fault


def _module_faults(module: Any) -> Iterator[str]:
    if isinstance(module, type):
        yield f"module: {module.__name__} is a class; give an instance, such as {module.__name__}()"
    elif not isinstance(module, nn.Module):
        yield f"module: {type(module).__name__} is no torch.nn.Module; give one"


def _unknown(sections: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    known = [*defaults, *Job.model_fields]
    for name in sections:
        if name not in Job.model_fields:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its arguments are {', '.join(defaults)}"
            yield f"fit: {name} is no argument; {ELSEWHERE.get(name, hint)}"


def _kinds(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name in CALLED:
        if arguments[name] is not None and not callable(arguments[name]):
            yield f"{name}: {arguments[name]!r} is no function; give one, or leave it out"
    if not isinstance(arguments["scheduler"], str | None):
        yield f"scheduler: {arguments['scheduler']!r} should be an address such as tcp://127.0.0.1:8786"
    if not isinstance(arguments["run_dir"], str | os.PathLike):
        yield f"run_dir: {arguments['run_dir']!r} should be a directory"
    names = arguments["log_to"]
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        yield f"log_to: {names!r} should be mlflow, wandb, or a list of them"


def _twice(arguments: Mapping[str, Any], sections: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    for path, name in ARGUMENT_OF.items():
        section, _, field = path.partition(".")
        own = sections.get(section)
        if isinstance(own, Mapping) and field in own and arguments[name] is not defaults[name]:
            yield f"{name}: is given twice, as an argument and in {section}; give it once"


def _unused(sections: Mapping[str, Any]) -> Iterator[str]:
    if "data" in sections:
        yield "data: is for job files; give the data as train and test"
    model = sections.get("model")
    for field in ("factory", "args"):
        if isinstance(model, Mapping) and field in model:
            yield f"model.{field}: is for job files; the network is the module here"
