"""Opens a run's epoch: its subnets, and the state that its rounds begin with."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from idletrain.rounds import rolling_rules, state, table
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.sizing import SubnetSizing
from idletrain.rounds.worker_table import WorkerState


async def open_epoch(run: RunContext, sizing: SubnetSizing, watch: table.Watch | None) -> table.RoundState:
    """Begin a new epoch durably; return its state, with the workers that are here.

    Args:
        run: The run.
        sizing: Chooses its subnets.
        watch: What tells the best network.

    Raises:
        RunError: No worker can do the work.
    """
    directory, training, preemption = run.directory, run.program.training, run.job.preemption
    phase = training.phase(directory.round)
    salvage, lockstep = preemption.policy == "salvage", training.mode == "lockstep"
    # The subnets that are left of a round in lockstep could not train alone.
    drop = lockstep and 0 < len(directory.staged) < phase.subnets
    keep = directory.specs and (not salvage or directory.staged)
    planned = directory.planned if not salvage else ()  # what the first head planned: the bits depend on it
    planned = planned or await asyncio.to_thread(sizing.plan)
    if keep:
        specs = directory.specs
    else:
        specs = planned[phase.number - 1] if planned else await asyncio.to_thread(sizing.specs, directory.round)
    await directory.begin(specs, planned=planned, drop=drop)
    rules = table.RoundRules(
        salvage=salvage,
        local_steps=phase.local_steps,
        rounds=training.rounds,
        lease_seconds=preemption.lease,
        evaluate_every=training.evaluate_every,
        target=run.job.stop.accuracy,
        watch=watch,
        lockstep=lockstep,
        lane_neurons=directory.rolling.neurons if directory.rolling else (),
        open_neurons=sum(directory.rolling.neurons) if directory.rolling else 0,
        neurons=sum(run.program.layout.sizes) if directory.rolling else 0,
    )
    staged = {k: update.steps for k, update in directory.staged.items()}
    now = time.monotonic()
    needs, exclusive = await asyncio.to_thread(sizing.needs, directory.specs)
    workers = {
        address: WorkerState(memory_bytes=capacity.memory_bytes, leases=capacity.leases, cohort=capacity.cohort)
        for address, capacity in sizing.capacities().items()
    }
    name, epoch, number = run.job.name, directory.epoch, directory.round
    opened = state.open_run(rules, name, epoch, number, needs, staged, now, workers, exclusive)
    if directory.rolling:
        numbers = [subnet.number for subnet in directory.rolling.opened]
        opened = rolling_rules.with_lanes(opened, numbers, directory.rolling.neuron_steps)
    return replace(opened, scores=directory.scores)  # an evaluation that is repeated takes its own place
