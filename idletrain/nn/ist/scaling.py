"""Find by trial which sums over cut neurons a subnet has to scale, and which groups cannot be cut.

The trial is a network of random weights in which every neuron occurs twice, in random places. One of each pair is a
subnet. Each of the subnet's sums over its neurons is then exactly half of the network's, so with the right sums doubled
both give the same outputs, whatever is between. A sum without a weight cannot be doubled: its group has to stay whole.
A sum that gives the same outputs doubled or not has a normalization right after it: it is not scaled, since there a
factor would only change the length of the weights, and with it the speed of learning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from idletrain.nn.ist.contractions import KNOWN, contracting_layers, contracts, guessed_for_computed, owners_of
from idletrain.nn.ist.groups import (
    INPUT_POWERS,
    WEIGHT_POWERS,
    Contraction,
    Layout,
    Scaling,
    check_split_share,
    split_share,
    without_groups,
)
from idletrain.nn.ist.scaling_trial import FLOAT32_ROUNDING, Choice, Place, Subject, Trial, UnknownError

# Relative difference that the small constant in a normalization's denominator explains, with loud weights. What one of
# fifty residual blocks adds changes outputs by 0.07 and more.
NORMALIZED = 1e-2
UNDECIDED = 5e-2  # below it the trial is repeated with larger weights
# Of trials of one sum each; beyond them, a run of the module says which sums are normalized.
MOST_SCALING_RUNS = 5_000
MAX_CHOICES = 64  # ways to scale one group that are tried
MOST_ALONE = 4  # contractions of repeated blocks that are all tried; of more, the first and the last
UNSCALED = "its neurons are added up, multiplied or compared with each other without a layer's weights"


def with_scaling(subject: Subject, layout: Layout, least: float = 0.0) -> Layout:
    """Return the layout with its contractions, without the groups for which no scaling is right.

    Args:
        subject: The network.
        layout: Its groups.
        least: Share of the parameters that groups have to hold.

    Raises:
        UnsplitError: those for which a scaling is right hold less.
    """
    try:
        found = _first_that_fits(subject, layout, [_guess(subject.module, layout)])
        if found is None:
            layout, found = _group_by_group(subject, layout, least)
        return _with_contractions(subject, layout, _without_normalized(subject, layout, *found))
    except UnknownError:
        places = [place for place, scaling in _guess(subject.module, layout).items() if scaling == "weights"]
        return _with_contractions(subject, layout, dict.fromkeys(places, "unknown"))


def _group_by_group(subject: Subject, layout: Layout, least: float) -> tuple[Layout, tuple[Trial, Choice]]:
    """Find a scaling for each group alone, of the largest first; groups that have none stay whole."""
    alone = {g.name: without_groups(layout, {o.name: "" for o in layout.groups if o is not g}) for g in layout.groups}
    choices: dict[Place, Scaling] = {}
    reasons: dict[str, str] = {}
    for name in sorted(alone.keys() - subject.outputs, key=lambda name: (-split_share(alone[name]), name)):
        found = _first_that_fits(subject, alone[name], _guesses(subject.module, alone[name]))
        if found is None:
            reasons[name] = UNSCALED
            check_split_share(without_groups(layout, reasons), least)
        else:
            choices.update(found[1])
    layout = without_groups(layout, reasons)
    choices = {place: scaling for place, scaling in choices.items() if place in set(_places(layout))}
    if (found := _first_that_fits(subject, layout, [choices])) is None:
        raise UnknownError("each group alone can be cut, but all of them together cannot")
    return layout, found


def _first_that_fits(
    subject: Subject, layout: Layout, choices: Iterator[Choice] | Sequence[Choice]
) -> tuple[Trial, Choice] | None:
    """Return the first choice with which network and subnet give the same outputs, in training or in evaluation mode,
    and the trial of that mode.

    Noise in training mode differs between the two; in evaluation mode there should be none.
    """
    tried, outputs = list(itertools.islice(choices, MAX_CHOICES)), None
    for training in (True, False):
        trial = Trial.of(subject, layout, training=training)
        if outputs is not None and torch.equal(trial.expected, outputs):
            return None  # the modes do not differ
        outputs = trial.expected
        for choice in tried:
            if trial.difference(choice) < FLOAT32_ROUNDING:
                return trial, choice
    return None


def _without_normalized(subject: Subject, layout: Layout, trial: Trial, choice: Choice) -> Choice:
    """Mark the contractions that need no scaling, each tried beside all others."""
    result: dict[Place, Scaling] = dict(choice)
    open_places = [place for place, scaling in choice.items() if scaling not in ("normalized", "unused")]
    likely = [place for place in open_places if place in layout.normalized]
    together: Choice = {**choice, **dict.fromkeys(likely, "normalized")}
    if likely and trial.louder(*likely).difference(together) < NORMALIZED:
        choice = result = dict(together)
        open_places = [place for place in open_places if place not in likely]
    runs = MOST_SCALING_RUNS // sum(1 for _ in subject.module.modules())
    for twins in _twins(layout, choice, open_places[:runs]):
        if len(twins) > MOST_ALONE and (common := _common(trial, choice, twins)):
            result |= dict.fromkeys(twins, common)
        else:
            result |= {place: _tried(trial, choice, place) for place in twins}
    return result if trial.difference(result) < NORMALIZED else choice


def _tried(trial: Trial, choice: Choice, place: Place) -> Scaling:
    """Return a contraction's scaling, tried without it beside all others."""
    without: Choice = {**choice, place: "normalized"}
    difference = trial.difference(without)
    if difference < UNDECIDED:
        difference = trial.louder(place).difference(without)
    if difference >= NORMALIZED:
        return choice[place]
    return "normalized" if trial.depends_on(place, choice) else "unused"


def _common(trial: Trial, choice: Choice, twins: Sequence[Place]) -> Scaling | None:
    """Return the scaling of the first and the last of some places, if it is one and right for all of them together."""
    first, last = _tried(trial, choice, twins[0]), _tried(trial, choice, twins[-1])
    if first != last:
        return None
    together: Choice = {**choice, **dict.fromkeys(twins, first)}
    is_right = first == choice[twins[0]] or trial.louder(*twins).difference(together) < NORMALIZED
    return first if is_right else None


def _twins(layout: Layout, choice: Choice, places: Sequence[Place]) -> list[list[Place]]:
    """Return the places in sets of those that repeated blocks have in common."""
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    result: dict[Any, list[Place]] = {}
    for name, d in places:
        normalized = (name, d) in layout.normalized
        key = re.sub(r"\d+", "", name), d, shapes[name], choice[name, d], normalized
        result.setdefault(key, []).append((name, d))
    return list(result.values())


def _with_contractions(subject: Subject, layout: Layout, choice: Choice) -> Layout:
    contractions = tuple(
        Contraction(name, d, scaling, contracting_layers(subject.module, name, d) if scaling in INPUT_POWERS else ())
        for (name, d), scaling in choice.items()
    )
    dimensions: dict[str, list[tuple[int, float]]] = {}
    for c in contractions:
        if c.scaling in WEIGHT_POWERS:
            dimensions.setdefault(c.tensor, []).append((c.dimension, WEIGHT_POWERS[c.scaling]))
    tensors = tuple(replace(t, scaled=tuple(sorted(dimensions.get(t.name, ())))) for t in layout.tensors)
    return replace(layout, tensors=tensors, contractions=contractions)


# --- what to try ------------------------------------------------------------------------------------------------------


def _places(layout: Layout) -> list[Place]:
    """Return all cut dimensions of weights with two dimensions or more."""
    return [
        (tensor.name, d)
        for tensor in layout.tensors
        for d, neurons in enumerate(tensor.neurons)
        if neurons is not None and len(tensor.shape) > 1 and tensor.buffer is None
    ]


def _guess(module: nn.Module, layout: Layout) -> Choice:
    """Guess from the layers that own the parameters: scale a contraction's weights, or its inputs where the same
    parameter has another use, too.
    """
    choice: dict[Place, Scaling] = {}
    for name, d in _places(layout):
        owners = owners_of(module, name)
        uses = [contracts(owner, short, d) for owner, short in owners]
        if layout.summed is not None:
            summed = (name, d) in layout.summed
            uses = [u if isinstance(o, KNOWN) else summed for u, (o, _) in zip(uses, owners, strict=True)]
        if any(uses):
            choice[name, d] = guessed_for_computed(module, name) or ("weights" if all(uses) else "inputs")
    return choice


def _guesses(module: nn.Module, layout: Layout) -> Iterator[Choice]:
    """Yield the guess, then choices that differ from it in one place, then in two."""
    guess, places = _guess(module, layout), _places(layout)
    yield guess
    for count in (1, 2):
        for some in itertools.combinations(places, count):
            for scalings in itertools.product(*(_others(module, place, guess.get(place)) for place in some)):
                changed: dict[Place, Scaling | None] = {**guess, **dict(zip(some, scalings, strict=True))}
                yield {place: scaling for place, scaling in changed.items() if scaling}


def _others(module: nn.Module, place: Place, guessed: Scaling | None) -> list[Scaling | None]:
    """Return the other scalings to try at a place; none where torch's own layers do not sum over it."""
    name, d = place
    uses = [(owner, contracts(owner, short, d)) for owner, short in owners_of(module, name)]
    if all(isinstance(owner, KNOWN) and not contracts for owner, contracts in uses):
        return []
    possible: list[Scaling | None] = ["weights", "roots", None]
    possible += ["inputs", "input_roots"] if contracting_layers(module, name, d) else []
    return [scaling for scaling in possible if scaling != guessed]
