"""Records what a run starts with and which workers are of no use, and says why it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from idletrain.cluster.local import last_lines
from idletrain.errors import placed
from idletrain.nn.data.streams import known_length
from idletrain.phases import TrainingPhase
from idletrain.rounds import protocol
from idletrain.rounds.membership import Membership
from idletrain.rounds.run_context import RunContext
from idletrain.worker.lease_spec import version


def record_start(run: RunContext, about: Mapping[str, Any]) -> None:
    """Record a run's start.

    Args:
        run: The run.
        about: Further fields: its dashboard, and how to reproduce it.
    """
    training = run.program.training
    phase = training.phase(run.directory.round)
    run.record(
        "run_started",
        run=run.job.name,
        version=version(),
        subnets=phase.subnets,
        rounds=training.rounds,
        phases=len(training.every_phase),
        policy=run.job.preemption.policy,
        target=run.job.stop.accuracy,
        method=training.method,
        local_steps=phase.local_steps,
        exchange=training.exchange.model_dump(),
        samples=known_length(run.program.source.open()),
        samples_a_step=training.batch_size / (phase.subnets if training.mode == "lockstep" else 1),
        parameters=sum(tensor.numel() for tensor in run.directory.network.values),
        groups={group.name: group.size for group in run.program.layout.groups},
        resumed_at=run.directory.round,
        run_dir=str(run.directory.run_dir),
        **about,
    )


def record_phase(run: RunContext, phase: TrainingPhase) -> None:
    """Record that a phase begins."""
    run.record(
        "phase_started",
        round=phase.first_round,
        phase=phase.number,
        subnets=phase.subnets,
        copies=phase.copies,
        local_steps=phase.local_steps,
    )


def record_sick(run: RunContext, membership: Membership, command: protocol.WorkerSick) -> None:
    """Record that a worker is of no use, and what becomes of it."""
    address = command.worker
    name = membership.name_of(address)
    if command.cause == "faults":
        reason = f"{name} failed twice: it gets only what no other worker can hold"
    else:
        ends = "it is ended, to be started again" if membership.is_restarting(address) else "end it by hand"
        reason = f"{name} has made no step for {command.seconds:.0f} s though it is alive: {ends}"
    run.record("worker_sick", worker=address, name=name, cause=command.cause, reason=reason)


def failure_reason(
    run: RunContext, membership: Membership, blame: protocol.Finish, failure: BaseException | None
) -> str:
    """Say why a subnet ends the run.

    Args:
        run: The run.
        membership: Knows its workers' names.
        blame: The command that ends it, with the subnet and its workers.
        failure: The last error of the job's own code on a worker.
    """
    where = f"subnet {blame.subnet} of round {run.directory.round}"
    names = [membership.name_of(worker) for worker in blame.workers]
    if blame.status == "failed":
        reason = placed(failure) if failure else "for an unknown reason"
        return f"{where} fails on {' and '.join(names)}: {reason}; fix that and add --resume"
    return (
        f"{where} ended the process of every worker that trained it ({', '.join(names)}) before it stored a step: "
        "fix the model, the loss or nodes.memory, and add --resume; "
        + last_words(run.directory.run_dir / "logs", names, membership.last_words)
    )


def last_words(logs: Path, names: Sequence[str], sent: Mapping[str, str]) -> str:
    """Return the last lines of the last worker's log that is on this machine, or that its own machine sent.

    Args:
        logs: The folder of logs on this machine.
        names: Workers, in the order of their ends.
        sent: The last lines that machines sent, by worker.
    """
    for name in reversed(names):
        with contextlib.suppress(OSError):
            return f"the last lines of {logs / f'{name}.log'}:\n{last_lines(logs / f'{name}.log')}"
        if name in sent:
            return f"the last lines of the log of {name}:\n{sent[name]}"
    return "the workers' logs are on their own machines"
