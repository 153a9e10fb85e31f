"""Create instances whole or not at all, remove them whole, and remove those whose owner died."""

from __future__ import annotations

import contextlib
import secrets
from types import FrameType
from typing import NoReturn

from idletrain_testbed import cgroups, network, processes, rights
from idletrain_testbed.instance import Instance, Owner, alone, recorded
from idletrain_testbed.settings import Settings, TestbedError


def up(settings: Settings, name: str | None) -> Instance:
    """Create an instance that this process owns.

    Raises:
        TestbedError: something is missing on this machine, or the name is taken.
    """
    faults = rights.missing(
        cpus=settings.cpus is not None,
        memory=settings.memory is not None,
        delay=settings.delay > 0,
        loss=settings.loss > 0,
    )
    if faults:
        raise TestbedError("\n".join(faults))
    sweep()
    instance = Instance.of(name or f"t{secrets.token_hex(3)}", settings.nodes, Owner.this(), settings.queue)
    instance.record(first=True)
    try:
        mounted = cgroups.hierarchies(cgroups.MOUNTS.read_text())
        for node in instance.nodes:
            cgroups.limit(mounted, instance.name, node, settings.cpus, settings.memory)
        network.build(instance, settings)
    except BaseException:
        down(instance)
        raise
    return instance


def down(instance: Instance) -> None:
    """End the processes of an instance and remove it; do nothing for parts that are gone."""
    with alone():  # two processes may remove the same instance
        processes.end(instance)
        network.remove(instance)
        cgroups.remove(cgroups.hierarchies(cgroups.MOUNTS.read_text()), instance.name)
        instance.forget()


def sweep() -> None:
    """Remove the instances whose owner is dead."""
    for instance in recorded():
        if instance.owner and not instance.owner.alive():
            with contextlib.suppress(TestbedError):  # one that hangs must not block others; tried again later
                down(instance)


def leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Handle a signal by raising SystemExit, so that the testbed is removed."""
    raise SystemExit(128 + number)
