"""Instances come and go: made whole or not at all, taken down whole, swept up where their owner died."""

from __future__ import annotations

import contextlib
import secrets
from types import FrameType
from typing import NoReturn

from idletrain_testbed import cgroups, network, processes, rights
from idletrain_testbed.instance import Instance, Owner, alone, recorded
from idletrain_testbed.settings import Settings, TestbedError


def up(asked: Settings, name: str | None) -> Instance:
    """Make an instance that this process owns."""
    lacking = rights.missing(
        cpus=asked.cpus is not None, memory=asked.memory is not None, delay=asked.delay > 0, loss=asked.loss > 0
    )
    if lacking:
        raise TestbedError("\n".join(lacking))
    sweep()
    instance = Instance.of(name or f"t{secrets.token_hex(3)}", asked.nodes, Owner.this(), asked.queue)
    instance.record(first=True)
    try:
        found = cgroups.hierarchies(cgroups.MOUNTS.read_text())
        for node in instance.nodes:
            cgroups.limit(found, instance.name, node, asked.cpus, asked.memory)
        network.build(instance, asked)
    except BaseException:
        down(instance)
        raise
    return instance


def down(instance: Instance) -> None:
    """End what runs in an instance and remove all of it; harmless where parts of it are gone."""
    with alone():  # two that take the same one down do not trip over each other
        processes.end(instance)
        network.remove(instance)
        cgroups.remove(cgroups.hierarchies(cgroups.MOUNTS.read_text()), instance.name)
        instance.forget()


def sweep() -> None:
    """Take down the instances whose owner is dead."""
    for instance in recorded():
        if instance.owner and not instance.owner.alive():
            with contextlib.suppress(TestbedError):  # what hangs does not keep others from starting; swept again later
                down(instance)


def leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Handles a signal by unwinding, and so by cleaning up."""
    raise SystemExit(128 + number)
