"""A sweep's trials are all combinations of its values, each with a name that is the same the next time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.errors import JobError
from idletrain.job import Job
from idletrain.sweeps.grid import Varied, as_plain, changed_paths, decisive_settings, from_plain, parse_varied, trials

TREE: dict[str, Any] = {
    "name": "digits",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 10]}},
    "data": {"name": "digits"},
    "training": {"optimizer": {"name": "sgd", "lr": 0.1}},
}


@pytest.mark.parametrize(
    ("text", "path", "values"),
    [
        ("training.optimizer.lr=0.05,0.1", "training.optimizer.lr", (0.05, 0.1)),
        ("training.optimizer.lr=1e-3", "training.optimizer.lr", (0.001,)),
        ("training.method=ist,local-sgd", "training.method", ("ist", "local-sgd")),
        ("model.args.widths=[64, 10],[64, 32, 10]", "model.args.widths", ([64, 10], [64, 32, 10])),
        ("training.compile=true", "training.compile", (True,)),
    ],
)
def test_values_are_written_as_in_a_job_file(text: str, path: str, values: tuple[Any, ...]) -> None:
    assert parse_varied(text) == Varied(path, values)


@pytest.mark.parametrize("text", ["", "training.seed", "training.seed=", "=1", "training.seed=[", "a={"])
def test_what_is_no_setting_with_values_is_refused(text: str) -> None:
    with pytest.raises(
        JobError, match=r"should be a setting and its values, such as training\.optimizer\.lr=0\.05,0\.1"
    ):
        parse_varied(text)


def test_there_is_a_trial_for_each_combination() -> None:
    lr, subnets = Varied("training.optimizer.lr", (0.1, 0.2)), Varied("training.subnets", (4, 8))
    found = trials(TREE, [lr, subnets])
    settings = [(trial.job.training.optimizer.lr, trial.job.training.subnets) for trial in found]
    assert settings == [(0.1, 4), (0.1, 8), (0.2, 4), (0.2, 8)]
    names = [trial.job.name for trial in found]
    assert len(set(names)) == 4
    assert all(name.startswith("digits-") for name in names)
    assert found[0].text == "lr=0.1 subnets=4"
    assert TREE["training"] == {"optimizer": {"name": "sgd", "lr": 0.1}}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_a_trial_s_name_follows_from_its_values_alone(seeds: list[int]) -> None:
    names = {t.job.training.seed: t.job.name for t in trials(TREE, [Varied("training.seed", tuple(seeds))])}
    assert names.keys() == set(seeds)
    for seed, name in names.items():
        (alone,) = trials(TREE, [Varied("training.seed", (seed,))])
        assert alone.job.name == name


def test_settings_that_a_trial_s_values_follow_from_are_compared_by_their_paths() -> None:
    def job(**sections: Any) -> Job:
        return trials({**TREE, **sections}, [Varied("training.seed", (1,))])[0].job

    kept = json.loads(json.dumps(decisive_settings(job())))
    (sent,) = from_plain(as_plain(trials(TREE, [Varied("training.seed", (1,))])))
    assert changed_paths(sent.job, kept, ()) == []
    assert changed_paths(job(nodes={"count": 3}, checkpoint={"to": "else/"}, memory={"scratch": "/x"}), kept, ()) == []
    wider = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 99, 10]}}
    assert changed_paths(job(model=wider, stop={"metric": "accuracy"}), kept, ()) == [
        "model.args.widths",
        "stop.metric",
    ]
    longer = job(training={**TREE["training"], "rounds": 7})
    assert changed_paths(longer, kept, ()) == ["training.rounds"]
    assert changed_paths(longer, kept, ("training.rounds",)) == []
    named = {**TREE["training"], "method": "ist"}  # which would be chosen else
    assert changed_paths(job(training=named), kept, ()) == ["training.method"]


def test_faults_of_all_combinations_are_told_and_each_once() -> None:
    with pytest.raises(JobError) as raised:
        trials(TREE, [Varied("training.subnets", (0, 4)), Varied("training.optimizr.lr", (1, 2))])
    assert len(raised.value.faults) == len(set(raised.value.faults)) == 2
    assert any("did you mean optimizer?" in fault for fault in raised.value.faults)


def test_what_is_varied_may_be_missing_in_the_job() -> None:
    tree = {key: value for key, value in TREE.items() if key != "data"}
    assert [trial.job.data.name for trial in trials(tree, [Varied("data.name", ("digits",))])] == ["digits"]
    nameless = {key: value for key, value in TREE.items() if key != "name"}
    with pytest.raises(JobError, match="name: is missing"):
        trials(nameless, [Varied("training.seed", (1,))])


@pytest.mark.parametrize(
    ("varied", "sentence"),
    [
        ([Varied("training.seed", (1,)), Varied("training.seed", (2,))], "training.seed is varied twice"),
        ([Varied("name.x", (1,))], "name.x is no setting of this job"),
        ([Varied("training.seed", tuple(range(40))), Varied("training.subnets", tuple(range(40)))], "more than 1000"),
    ],
)
def test_what_cannot_be_varied_is_a_sentence(varied: list[Varied], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        trials(TREE, varied)
