"""Find settings of a job that contradict each other, though each is sound by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from idletrain.job import Job, TrainingSettings
from idletrain.optimizer_settings import OptimizerSettings


def contradictions(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each contradiction between fields: the fields, and a sentence."""
    training, policy = job.training, job.preemption.policy
    if job.stop.accuracy is not None and training.loss == "mse":
        yield (
            ("stop.accuracy", "training.loss"),
            "stop.accuracy: a network trained with training.loss: mse has none; leave it out",
        )
    measured = {"stop.accuracy": job.stop.accuracy, "stop.patience": job.stop.patience, "stop.metric": job.stop.metric}
    for field in [
        field for field, value in {**measured, "training.metrics": training.metrics or None}.items() if value
    ]:
        if job.data.train is not None and job.data.test is None:
            section = "stop" if field.startswith("stop") else "it"
            yield (
                (field, "data.train", "data.test"),
                f"{field}: is measured on data.test, which is missing; name it, or leave {section} out",
            )
    yield from _finish_contradictions(training)
    if training.phases:
        yield from _phase_contradictions(training)
    elif training.epochs is not None and "rounds" in training.model_fields_set:
        yield (
            ("training.epochs", "training.rounds"),
            f"training.epochs: {training.epochs:g} beside training.rounds: {training.rounds}; give one of the two",
        )
    yield from _optimizer_contradictions(training.optimizer)
    yield from _memory_contradictions(job)
    if training.mode == "lockstep":
        yield from _lockstep_contradictions(job)
    copies = [training.copies, *(phase.copies or 1 for phase in training.phases)]
    if training.method == "local-sgd" and max(copies) > 1:
        yield (
            ("training.copies", "training.phases", "training.method"),
            "training.copies: local-sgd has one of the network for each subnet; leave it out, or use method: ist",
        )
    yield from _block_contradictions(job)
    yield from _exchange_contradictions(training, policy)
    if policy == "rolling":
        yield from _rolling_contradictions(training)


def _block_contradictions(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the settings that a network cut by depth does not have."""
    given: dict[str, Any] = {"training.method": job.training.method == "local-sgd", "model.groups": job.model.groups}
    given |= {"model.fixed": job.model.fixed, "memory.out_of_core": job.memory.out_of_core == "always"}
    split = job.model.split
    of_neurons = {"model.groups", "model.fixed"} if split == "both" else set()
    for field in [field for field, value in given.items() if value and split != "neurons" and field not in of_neurons]:
        yield ("model.split", field), f"{field}: does not go with model.split: {split}; leave one of the two out"


def _finish_contradictions(training: TrainingSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what does not go with rounds of whole networks at the end."""
    if training.finish_whole and training.phases:
        yield (
            ("training.finish_whole", "training.phases"),
            "training.finish_whole: training.phases say how the last rounds divide the network; leave one out",
        )
    if training.finish_whole and training.method == "local-sgd":
        yield (
            ("training.finish_whole", "training.method"),
            "training.finish_whole: local-sgd trains the whole network in all rounds; leave it out, or use method: ist",
        )


def _phase_contradictions(training: TrainingSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what in the phases does not add up."""
    rounds = sum(phase.rounds for phase in training.phases)
    if training.epochs is not None:
        yield (
            ("training.epochs", "training.phases"),
            "training.epochs: phases, or a range of subnets, say how many rounds there are; leave one of the two out",
        )
    elif rounds != training.rounds:
        yield (
            ("training.phases", "training.rounds"),
            f"training.phases: have {rounds} rounds, and training.rounds is {training.rounds}; leave rounds out",
        )
    for phase in training.every_phase:
        if phase.copies > phase.subnets:
            yield (
                ("training.phases", "training.subnets", "training.copies"),
                f"training.phases: phase {phase.number} has {phase.copies} copies of {phase.subnets} subnets, too many",
            )


def _exchange_contradictions(training: TrainingSettings, policy: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what late rows of an update do not go with."""
    if training.exchange.loss and policy != "salvage":
        reason = "which rows are late depends on the link, and reissue promises the same bits"
        yield (
            ("training.exchange.loss", "preemption.policy"),
            f"training.exchange.loss: {reason}; set preemption.policy: salvage, or leave it out",
        )
    if training.exchange.loss and any(phase.copies > 1 for phase in training.every_phase):
        yield (
            ("training.copies", "training.phases", "training.exchange.loss"),
            "training.exchange.loss: late values cannot be averaged with those of copies; leave one of the two out",
        )
    if training.outer_optimizer and training.exchange.loss:
        yield (
            ("training.outer_optimizer", "training.exchange.loss"),
            "training.exchange.loss: late values are in no mean that training.outer_optimizer moves by; leave one out",
        )
    if training.exchange.loss and training.exchange.push not in ("int8", "int4"):
        yield (
            ("training.exchange.loss", "training.exchange.push"),
            "training.exchange.loss: applies to int8 and int4 updates only; set training.exchange.push to int8",
        )


def _optimizer_contradictions(optimizer: OptimizerSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the settings that the optimizer does not have."""
    name, at = optimizer.name, "training.optimizer"
    decays = optimizer.weight_decay or any(group.weight_decay for group in optimizer.groups)
    if name == "row-adagrad" and (optimizer.momentum or decays):
        yield (
            (f"{at}.name", f"{at}.momentum", f"{at}.weight_decay", f"{at}.groups"),
            f"{at}: row-adagrad has neither momentum nor weight_decay; leave them out",
        )
    elif optimizer.momentum and name not in ("sgd", "rmsprop"):
        yield (f"{at}.name", f"{at}.momentum"), f"{at}.momentum: is of sgd and rmsprop, not of {name}; leave it out"
    if optimizer.nesterov and (name != "sgd" or not optimizer.momentum):
        yield (
            (f"{at}.name", f"{at}.momentum", f"{at}.nesterov"),
            f"{at}.nesterov: needs sgd with momentum; set both, or leave it out",
        )
    if (optimizer.schedule == "step") != (optimizer.step_every is not None):
        yield (
            (f"{at}.schedule", f"{at}.step_every"),
            f"{at}.step_every: goes with schedule: step, and that needs it; set both, or leave both out",
        )
    if optimizer.schedule == "one-cycle" and optimizer.warmup_steps:
        yield (
            (f"{at}.schedule", f"{at}.warmup_steps"),
            f"{at}.warmup_steps: a one-cycle schedule warms up by itself; leave it out",
        )


def _memory_contradictions(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what a step cannot be both: in parts that fit the memory, and out of core."""
    training, memory = job.training, job.memory
    if training.micro_batch == "auto" and memory.budget is None:
        yield (
            ("training.micro_batch", "memory.budget"),
            "training.micro_batch: auto needs memory.budget, what a worker's training may take; set it, or a number",
        )
    if memory.out_of_core == "always" and training.micro_batch is not None:
        yield (
            ("training.micro_batch", "memory.out_of_core"),
            "training.micro_batch: a subnet out of core takes each batch as a whole; leave one of the two out",
        )
    if memory.out_of_core == "always" and training.optimizer.clip_norm is not None:
        yield (
            ("training.optimizer.clip_norm", "memory.out_of_core"),
            "training.optimizer.clip_norm: not all gradients are there at once out of core; leave one of the two out",
        )
    if memory.compile == "auto" and memory.out_of_core == "never":
        yield (
            ("memory.compile", "memory.out_of_core"),
            "memory.compile: is for subnets out of core, which the job forbids; leave one out, or set training.compile",
        )
    if memory.compile == "auto" and job.preemption.policy == "rolling":
        yield (
            ("memory.compile", "preemption.policy"),
            "memory.compile: a rolling run can be replayed, which compiled steps cannot; leave one of the two out",
        )
    if training.compile and memory.compile == "auto":
        yield (
            ("memory.compile", "training.compile"),
            "memory.compile: training.compile compiles all subnets, and they train in core; leave one of the two out",
        )
    if training.compile and memory.out_of_core == "always":
        yield (
            ("training.compile", "memory.out_of_core"),
            "training.compile: compiled subnets train in core; leave one of the two out, or set memory.compile: auto",
        )


def _rolling_contradictions(training: TrainingSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what needs rounds, or subnets that have neurons in common."""
    in_rounds = {"training.phases": training.phases, "training.finish_whole": training.finish_whole}
    whole = {"training.method": training.method == "local-sgd", "training.copies": training.copies > 1}
    for field in [field for field, value in {**in_rounds, **whole}.items() if value]:
        why = "there are no rounds to divide otherwise" if field in in_rounds else "no two subnets hold the same neuron"
        yield (
            (field, "preemption.policy"),
            f"{field}: does not go with preemption.policy: rolling, as {why}; leave one of the two out",
        )


def _lockstep_contradictions(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    if job.preemption.policy != "reissue":
        yield (
            ("training.mode", "preemption.policy"),
            f"preemption.policy: {job.preemption.policy} would go on without some shards; set reissue for lockstep",
        )
    subnets, count = max(phase.subnets for phase in job.training.every_phase), job.nodes.count
    if subnets > count:
        yield (
            ("training.mode", "training.subnets", "training.phases", "nodes.count"),
            f"training.subnets: {subnets} in lockstep need a node each, and nodes.count is {count}; make them equal",
        )
