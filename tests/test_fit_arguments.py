"""What `fit` refuses before it reads anything, and how faults of its job are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import idletrain
from idletrain.errors import JobError
from idletrain.fit_arguments import as_arguments

DATA = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def faults(**arguments: Any) -> tuple[str, ...]:
    """The faults of a call, which has made nothing."""
    with pytest.raises(JobError) as caught:
        idletrain.fit(**{"module": nn.Linear(4, 2), "train": DATA, **arguments})
    assert not list(Path.cwd().iterdir())
    return caught.value.faults


@pytest.mark.parametrize(
    ("argument", "value", "sentence"),
    [
        ("on_event", 3, "on_event: 3 is no function; give one, or leave it out"),
        ("on_round", "f", "on_round: 'f' is no function; give one, or leave it out"),
        ("on_evaluate", [], "on_evaluate: [] is no function; give one, or leave it out"),
        ("collate_fn", 3, "collate_fn: 3 is no function; give one, or leave it out"),
        ("scheduler", 3, "scheduler: 3 should be an address such as tcp://127.0.0.1:8786"),
        ("scheduler", "foo", "scheduler: 'foo' should be tcp://HOST:PORT on this machine or tls://HOST:PORT"),
        ("run_dir", None, "run_dir: None should be a directory"),
        ("log_to", 3, "log_to: 3 should be mlflow, wandb, or a list of them"),
        ("log_to", "nope", "log_to: there is no nope; choose from mlflow, wandb"),
        ("workers", -1, "workers: -1 should be greater than or equal to 1"),
        ("workers", True, "workers: True should be a number"),
        ("subnets", 0, "subnets: 0 should be greater than or equal to 1"),
        ("resume", True, "resume: goes on with a run of a name; give name, too"),
        ("data", {"name": "digits"}, "data: is for job files; give the data as train and test"),
        ("model", {"args": {}}, "model.args: is for job files; the network is the module here"),
        ("module", nn.Linear, "module: Linear is a class; give an instance, such as Linear()"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named_and_nothing_is_made(argument: str, value: Any, sentence: str) -> None:
    assert sentence in faults(**{argument: value})


@pytest.mark.parametrize(
    ("arguments", "name", "section"),
    [
        ({"rounds": 1, "training": {"rounds": 3}}, "rounds", "training"),
        ({"workers": 2, "nodes": {"count": 3}}, "workers", "nodes"),
        ({"run_dir": "a", "checkpoint": {"to": "b"}}, "run_dir", "checkpoint"),
    ],
)
def test_what_is_said_twice_is_refused(arguments: dict[str, Any], name: str, section: str) -> None:
    assert faults(**arguments) == (f"{name}: is given twice, as an argument and in {section}; give it once",)


def test_all_faults_are_told_at_once() -> None:
    assert len(faults(on_event=3, run_dir=None, scheduler=3)) == 3


def test_a_fault_of_a_section_that_the_call_has_keeps_the_field_s_name() -> None:
    fault = "training.rounds: 0 should be greater than or equal to 1"
    assert as_arguments(fault, {}) == "rounds: 0 should be greater than or equal to 1"
    assert as_arguments(fault, {"training": {"rounds": 0}}) == fault
    assert as_arguments("stop.accuracy: 2 should be less", {}) == "stop.accuracy: 2 should be less"
    both = "training.copies: 3 is more than training.subnets: 2"
    assert as_arguments(both, {"training": {"copies": 3}}) == "training.copies: 3 is more than subnets: 2"


def test_faults_that_show_later_are_named_as_arguments_too() -> None:
    (fault,) = faults(loss="nil")
    assert fault.startswith("loss: 'nil' should be one of")
