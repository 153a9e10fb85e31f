"""The comparison's parts: networks and data (cases), training methods, and one run of one method (entry)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FASHION = {"name": "fashion-mnist"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, its data and its target.

    Attributes:
        target: The accuracy to reach.
    """

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    target: float
    batch_size: int = 128
    seed: int = 0


CASES = {
    "a": Case(
        name="a",
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, 1024, 1024, 10]}},
        data=FASHION,
        target=0.88,
    ),
    "b": Case(
        name="b",
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, 4096, 4096, 10]}},
        data=FASHION,
        target=0.88,
    ),
    "c": Case(
        name="c",
        model={"factory": "idletrain.nn.models:residual_cnn", "args": {"channels": 16, "hidden": 64, "blocks": 2}},
        data=FASHION,
        target=0.86,
        batch_size=64,
    ),
    "d": Case(
        name="d",
        model={
            "factory": "idletrain.nn.models:transformer",
            "args": {"vocabulary": 128, "context": 64, "width": 128, "heads": 8},
        },
        data={"factory": "benchmarks.text:gcide", "args": {"windows": 60_000, "test_windows": 1000, "context": 64}},
        target=0.45,
        batch_size=16,
    ),
    "tiny": Case(
        name="tiny",
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
        data={"name": "digits"},
        target=0.85,
        batch_size=32,
    ),
}


@dataclass(frozen=True)
class Method:
    """A way to train: the script of a node, the script on the head if there is one, and fixed settings."""

    node: str
    head: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.node == "idletrain"


METHODS = {
    "ist": Method("idletrain", "idletrain_head"),
    "local-sgd": Method("idletrain", "idletrain_head"),
    "ddp": Method("ddp"),
    "ddp-fp16": Method("ddp", settings={"hook": "fp16"}),
    "ddp-powersgd": Method("ddp", settings={"hook": "powersgd"}),
    "post-local-sgd": Method("post_local_sgd"),
    "torchft-local-sgd": Method("torchft_node", "lighthouse", {"algorithm": "local-sgd"}),
    "torchft-diloco": Method("torchft_node", "lighthouse", {"algorithm": "diloco"}),
    "hivemind": Method("hivemind_node", "dht"),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method's settings for one run, and how far it goes.

    Attributes:
        steps: Local steps of every node after which it ends.
        snapshot_every: Steps between two points of the curve; 0 for a timing alone.
        budget_seconds: When it is ended whatever it has done.
    """

    method: str
    settings: dict[str, Any]
    steps: int
    snapshot_every: int = 0
    budget_seconds: float = 600.0
