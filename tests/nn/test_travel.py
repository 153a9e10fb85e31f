"""Programs travel with whatever a module holds, or say what in it cannot."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from idletrain.errors import JobError
from idletrain.nn import travel


class Holding(nn.Module):
    """A layer with attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


class Plain:
    """An object that is no module."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def sent(value: Any) -> Any:
    return pickle.loads(travel.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        SDPBackend.MATH,
        [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
        {SDPBackend.MATH: 1},
        SDPBackend,
        torch._C._SchemaArgType.input,  # an enum of pybind11 with the name that it was made with
    ],
    ids=["member", "list", "key", "class", "other enum"],
)
def test_enums_of_torch_travel(value: Any) -> None:
    assert sent(Holding(backend=value)).backend == value


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_function_travels_and_can_be_copied_and_sent_again() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice = copy.deepcopy(sent(sent(Holding(do=torch.jit.script(double)))))
    assert twice.do(torch.ones(2)).tolist() == [2, 2]


LOCK = threading.Lock()


def closing(value: Any) -> Any:
    def use() -> Any:
        return value

    return use


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Holding(lock=LOCK), "model.lock"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.ModuleList([Holding(attn=Holding(backend=LOCK))])),
            "model.1.0.attn.backend",
        ),
        (Holding(config={"size": 3, "lock": [1, LOCK]}), "model.config['lock'][1]"),
        (Holding(plain=Plain(name="a", lock=LOCK)), "model.plain.lock"),
        (Holding(do=functools.partial(closing, Plain(lock=LOCK))), "model.do.lock"),
        (Holding(do=closing(LOCK)), "model.do.value"),
    ],
    ids=["attribute", "nested", "containers", "object", "partial", "closure"],
)
def test_what_cannot_travel_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(JobError) as caught:
        travel.dumps({"anything": value}, {"data": 1, "model": value})
    (told,) = caught.value.faults
    assert told == (
        f"{path}: a lock cannot travel to workers (cannot pickle '_thread.lock' object); leave it out, or create it "
        "where it is used"
    )


def test_a_fault_in_none_of_the_named_parts_is_told_all_the_same() -> None:
    with pytest.raises(JobError, match=r"^model: cannot travel to workers \(cannot pickle '_thread.lock' object\)$"):
        travel.dumps([LOCK], {"model": 1})


def test_what_holds_itself_is_searched_once() -> None:
    value = Holding(lock=LOCK)
    value.lock = Plain(back=[value], own=LOCK)  # type: ignore[assignment]
    with pytest.raises(JobError, match=r"^model.lock.own: a lock cannot travel"):
        travel.dumps(value, {"model": value})
