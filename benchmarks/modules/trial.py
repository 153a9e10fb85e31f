"""Give one module of the catalogue to idletrain, in a process of its own; the result goes to stdout as JSON.

python -m benchmarks.modules.trial PACKAGE NAME accept|train|longer [ROUNDS]
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks import in_process
from benchmarks.modules.case import Case
from benchmarks.modules.catalogue import CASES
from benchmarks.modules.data import Generated
from benchmarks.modules.settings import BATCH, HELD_OUT, ROUNDS, SAMPLES, STEPS, SUBNETS
from benchmarks.modules.torchvision_operators import declare_missing
from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn import travel
from idletrain.nn.data.batches import call
from idletrain.nn.evaluate import score
from idletrain.nn.ist.groups import split_share
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.prepare import Prepared, prepare
from idletrain.optimizer_settings import OptimizerSettings


def settings(case: Case, method: Literal["ist", "local-sgd"], rounds: int) -> TrainingSettings:
    """Return the settings of a training of `SUBNETS * STEPS` batches a round."""
    return TrainingSettings(
        method=method,
        subnets=SUBNETS,
        local_steps=STEPS,
        rounds=rounds,
        batch_size=BATCH,
        optimizer=OptimizerSettings(name="adamw", lr=case.lr),
        loss=case.loss,
    )


def prepared(case: Case, method: Literal["ist", "local-sgd"], module: nn.Module, rounds: int = ROUNDS) -> Prepared:
    """Prepare the module as `fit` does."""
    sources = Generated(case.data, SAMPLES), Generated(case.data, HELD_OUT, SAMPLES)
    return prepare(module, *sources, case.loss, settings(case, method, rounds))


def accept(case: Case) -> dict[str, Any]:
    """Return whether and how the module is taken as it is, and do two rounds of a step."""
    module = case.build()
    started = time.process_time()  # other work on the machine does not count
    try:
        made = prepared(case, "ist", module)
        travel.dumps(made.program, made.program.parts)
    except JobError as error:
        return {"accepted": False, "refused": " ".join(str(error).split())[:300]}
    seconds = time.process_time() - started
    loss = score(in_process.train(made, 2, 1), Generated(case.data, HELD_OUT, SAMPLES).open(), made.program.loss).loss
    return {
        "accepted": True,
        "seconds": seconds,
        "method": made.program.training.method,
        "split": split_share(made.program.layout),
        "why": made.fallback,
        "parameters": sum(p.numel() for p in module.parameters()),
        "finite": bool(np.isfinite(loss)),
    }


def train_plainly(case: Case, made: Prepared) -> nn.Module:
    """Train the module by a loop of plain torch, with as many batches of the same size."""
    module, samples = seeded(case).train(), made.program.source.open()
    optimizer = torch.optim.AdamW(module.parameters(), lr=case.lr, weight_decay=0.0)
    order = BatchOrder(0, len(samples), BATCH, 1)
    for step in range(SUBNETS * STEPS * ROUNDS):
        inputs, target = samples.batch(order.batch(0, step))
        optimizer.zero_grad()
        made.program.loss(call(module, inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module


def train(case: Case) -> dict[str, Any]:
    """Train the module by plain torch, by local SGD and by ist where it suits; return held-out losses and seconds."""
    ist = prepared(case, "ist", seeded(case))
    whole = ist if ist.fallback else prepared(case, "local-sgd", seeded(case))
    methods: dict[str, Callable[[], nn.Module]] = {
        "torch": lambda: train_plainly(case, whole),
        "local-sgd": lambda: in_process.train(whole, ROUNDS, STEPS),
    }
    if not ist.fallback:
        methods["ist"] = lambda: in_process.train(ist, ROUNDS, STEPS)
    losses, seconds = {}, {}
    for name, run in methods.items():
        started = time.process_time()
        module = run()
        seconds[name] = time.process_time() - started
        losses[name] = score(module, Generated(case.data, HELD_OUT, SAMPLES).open(), whole.program.loss).loss
    return {"losses": losses, "seconds": seconds}


def longer(case: Case, rounds: int) -> dict[str, Any]:
    """Train the module by ist for so many rounds; return the same as `train`."""
    made, started = prepared(case, "ist", seeded(case), rounds), time.process_time()
    module = in_process.train(made, rounds, STEPS)
    seconds = time.process_time() - started
    loss = score(module, Generated(case.data, HELD_OUT, SAMPLES).open(), made.program.loss).loss
    return {"losses": {"ist": loss}, "seconds": {"ist": seconds}, "rounds": rounds}


def seeded(case: Case) -> nn.Module:
    """Build the module with the same first values every time."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module: nn.Module = case.build()
    return module


def main(package: str, name: str, stage: str, *rounds: str) -> None:
    """Print the result of one module, whatever happens."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    declare_missing()
    case = next(case for case in CASES if (case.package, case.name) == (package, name))
    try:
        seeded(case)
    except Exception as error:  # noqa: BLE001 (the package's own; the module is left out with this reason)
        result: dict[str, Any] = {"left_out": f"{type(error).__name__}: {error}"[:300]}
    else:
        try:
            result = longer(case, *map(int, rounds)) if rounds else {"accept": accept, "train": train}[stage](case)
        except Exception:  # noqa: BLE001 (a fault of ours, and counted as such)
            result = {"traceback": traceback.format_exc()}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
