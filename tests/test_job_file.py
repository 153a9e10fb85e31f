"""Every fault in a job is a sentence that names its field."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from idletrain.errors import JobError
from idletrain.job import OPEN_SETTINGS, Job
from idletrain.job_file import load_job, parse_job, read_tree

WORKFLOWS = sorted((Path(__file__).parent.parent / "workflows").glob("*.yaml"))


def tree(**sections: Any) -> dict[str, Any]:
    return {"name": "t", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}, **sections}


def faults(job: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(JobError) as error:
        parse_job(job)
    return error.value.faults


def test_a_job_of_three_fields_has_the_documented_defaults() -> None:
    job = parse_job(tree())
    training = job.training
    assert (training.method, training.subnets, training.local_steps, training.rounds) == ("ist", 4, 50, 120)
    assert (training.batch_size, training.seed, training.loss) == (128, 0, None)
    assert (training.optimizer.name, training.optimizer.lr, training.optimizer.state) == ("adamw", 1e-3, "travel")
    assert (job.preemption.policy, job.preemption.progress_every, job.preemption.lease) == ("reissue", 5, 10)
    assert (job.checkpoint.every, job.checkpoint.keep, job.nodes.count, job.stop.accuracy) == (60, 2, 4, None)
    assert job.run_dir == Path("runs/t")


def test_an_optimizer_may_be_named_as_its_class() -> None:
    job = parse_job(tree(training={"optimizer": {"name": "AdamW", "lr": 1}}))
    assert job.training.optimizer.name == "adamw"


def test_units_are_read() -> None:
    job = parse_job(
        tree(preemption={"progress_every": "500ms", "lease": 7}, checkpoint={"every": "1h"}, nodes={"memory": "2GiB.."})
    )
    assert (job.preemption.progress_every, job.preemption.lease, job.checkpoint.every) == (0.5, 7, 3600)
    assert job.nodes.memory == 2 << 30


@pytest.mark.parametrize("value", ["1.2.3s", "..s"])
def test_a_number_with_two_points_is_a_fault_of_its_field(value: str) -> None:
    (reported,) = faults(tree(checkpoint={"every": value}))
    assert reported.startswith(f"checkpoint.every: {value!r} ")


@pytest.mark.parametrize(
    ("job", "reported"),
    [
        (tree(trainig={}), "trainig: is not a field of a job; did you mean training?"),
        (tree(lr=0.1), "lr: is not a field of a job; did you mean training.optimizer.lr?"),
        (tree(training={"factory": "a:b"}), "training.factory: is not a field of a job; did you mean model.factory?"),
        (
            tree(training={"method": "istt"}),
            "training.method: 'istt' should be 'ist' or 'local-sgd'; did you mean ist?",
        ),
        (tree(training={"round": 3}), "training.round: is not a field of a job; did you mean rounds?"),
        (
            tree(training={"optimizer": {"name": "sgd", "learning": 1, "lr": 1}}),
            "training.optimizer.learning: is not a field of a job",
        ),
        (tree(training={"optimizer": {"name": "adamw"}}), "training.optimizer.lr: is missing; for example lr: 0.1"),
        (tree(training={"optimizer": {"lr": 1}}), "training.optimizer.name: is missing; for example name: adamw"),
        (
            tree(training={"optimizer": {"name": "sgd", "lr": 1, "groups": [{"parameters": ["bias"]}, {"lr": 2}]}}),
            "training.optimizer.groups.1.parameters: is missing; for example parameters: [bias, norm]",
        ),
        (
            tree(
                training={
                    "optimizer": {"name": "sgd", "lr": 1, "groups": [{"parameters": ["bias"], "weigth_decay": 0}]}
                }
            ),
            "training.optimizer.groups.0.weigth_decay: is not a field of a job; did you mean weight_decay?",
        ),
        (tree(training={"micro_batch": "all"}), "training.micro_batch: 'all' should be a number of samples, or auto"),
        (tree(training={"micro_batch": 0}), "training.micro_batch: 0 should be a number of samples, or auto"),
        (
            tree(training={"micro_batch": "auto"}),
            "training.micro_batch: auto needs memory.budget, what a worker's training may take; set it, or a number",
        ),
        (
            tree(training={"micro_batch": 8}, memory={"out_of_core": "always"}),
            "training.micro_batch: a subnet out of core takes each batch as a whole; leave one of the two out",
        ),
        (
            tree(training={"optimizer": {"name": "sgd", "lr": 1, "clip_norm": 1}}, memory={"out_of_core": "always"}),
            "training.optimizer.clip_norm: not all gradients are there at once out of core; leave one of the two out",
        ),
        (
            tree(memory={"compile": "auto", "out_of_core": "never"}),
            "memory.compile: is for subnets out of core, which the job forbids; leave one out, or set training.compile",
        ),
        (
            tree(memory={"compile": "auto"}, preemption={"policy": "rolling"}),
            "memory.compile: a rolling run can be replayed, which compiled steps cannot; leave one of the two out",
        ),
        (
            tree(training={"compile": True}, memory={"compile": "auto"}),
            "memory.compile: training.compile compiles all subnets, and they train in core; leave one of the two out",
        ),
        (
            tree(training={"compile": True}, memory={"out_of_core": "always"}),
            "training.compile: compiled subnets train in core; leave one of the two out, or set memory.compile: auto",
        ),
        (tree(memory={"compile": "always"}), "memory.compile: 'always' should be 'auto' or 'never'"),
        (
            tree(training={"optimizer": {"name": "sgd", "lr": 1, "schedule": "cosin"}}),
            "training.optimizer.schedule: 'cosin' should be one of constant, linear, cosine, step, one-cycle, or pack",
        ),
        (
            tree(training={"optimizer": {"name": "sgd", "lr": 1, "schedule": "step"}}),
            "training.optimizer.step_every: goes with schedule: step, and that needs it; set both, or leave both out",
        ),
        (
            tree(training={"optimizer": {"name": "sgd", "lr": 1, "schedule": "one-cycle", "warmup_steps": 5}}),
            "training.optimizer.warmup_steps: a one-cycle schedule warms up by itself; leave it out",
        ),
        (
            tree(training={"outer_optimizer": {"name": "adam"}}),
            "training.outer_optimizer.name: 'adam' should be 'nesterov'",
        ),
        (
            tree(
                training={"outer_optimizer": {}, "exchange": {"loss": 0.1, "push": "int8"}},
                preemption={"policy": "salvage"},
            ),
            "training.exchange.loss: late values are in no mean that training.outer_optimizer moves by; leave one out",
        ),
        (tree(stop={"xyz": 1}), "stop.xyz: is not a field of a job; known here: accuracy"),
        (tree(name="My Run"), "name: 'My Run' should be lower-case letters, digits and hyphens, at most 63"),
        (tree(training={"rounds": 0}), "training.rounds: 0 should be greater than or equal to 1"),
        (tree(training={"epochs": 0}), "training.epochs: 0 should be greater than 0"),
        (
            tree(training={"epochs": 2, "rounds": 120}),
            "training.epochs: 2 beside training.rounds: 120; give one of the two",
        ),
        (tree(training={"rounds": "many"}), "training.rounds: 'many' should be a valid integer"),
        (tree(training={"method": "sgd"}), "training.method: 'sgd' should be 'ist' or 'local-sgd'"),
        (tree(stop={"accuracy": 1.5}), "stop.accuracy: 1.5 should be less than or equal to 1"),
        (tree(checkpoint={"every": "soon"}), "checkpoint.every: 'soon' should be a duration such as 15s, 10m or 4h"),
        (tree(nodes={"memory": "lots"}), "nodes.memory: 'lots' should be a size such as 512MiB or 2GB"),
        (tree(checkpoint={"every": 0}), "checkpoint.every: 0 should be greater than 0"),
        (
            tree(training={"exchange": {"push": "int3"}}),
            "training.exchange.push: 'int3' should be 'fp32', 'bf16', 'int8' or 'int4'",
        ),
        (
            tree(training={"exchange": {"pull": "int2"}}),
            "training.exchange.pull: 'int2' should be 'fp32', 'bf16', 'int8' or 'int4'",
        ),
        (
            tree(training={"exchange": {"loss": 0.4}}),
            "training.exchange.loss: 0.4 should be less than or equal to 0.3",
        ),
        (
            tree(training={"exchange": {"transport": "quic"}}),
            "training.exchange.transport: 'quic' should be 'tcp' or 'udp'",
        ),
        (
            tree(training={"exchange": {"push": "int8", "loss": 0.1}}),
            (
                "training.exchange.loss: which rows are late depends on the link, and reissue promises the same bits; "
                "set preemption.policy: salvage, or leave it out"
            ),
        ),
        (
            tree(training={"exchange": {"loss": 0.1}}, preemption={"policy": "salvage"}),
            "training.exchange.loss: applies to int8 and int4 updates only; set training.exchange.push to int8",
        ),
    ],
)
def test_one_fault_is_one_sentence(job: dict[str, Any], reported: str) -> None:
    (only,) = faults(job)
    assert only.startswith(reported)


def test_all_faults_are_reported_at_once() -> None:
    reported = faults({"name": "UPPER", "data": {"nam": "digits"}, "training": {"rounds": -1, "seed": "x"}})
    assert {fault.split(":")[0] for fault in reported} == {
        "name",
        "model",
        "data.nam",
        "training.rounds",
        "training.seed",
    }


def test_a_job_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_job(tree()).training.rounds = 3  # type: ignore[misc]


def test_a_job_comes_back_from_its_json() -> None:
    job = parse_job(tree(preemption={"progress_every": "500ms"}, nodes={"memory": "2GiB.."}))
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_what_a_job_leaves_open_it_leaves_open_as_plain_values() -> None:
    job = parse_job(tree(training={"subnets": 2, "exchange": {"push": "int8"}}))
    again = Job.model_validate(json.loads(json.dumps(job.as_tree())))
    assert again == job
    assert again.training.model_fields_set & set(OPEN_SETTINGS) == {"subnets", "exchange"}


@pytest.mark.parametrize("given", [{"rounds": 7}, {"epochs": 0.5}])
def test_a_job_as_plain_values_has_its_rounds_or_its_epochs(given: dict[str, Any]) -> None:
    job = parse_job(tree(training=given))
    counted = job.model_copy(update={"training": job.training.model_copy(update={"rounds": 7})})
    assert parse_job(counted.as_tree()).training.model_dump(include={"rounds", "epochs"}) == {
        "rounds": 120,
        "epochs": None,
        **given,
    }


def test_a_name_that_is_given_beside_replaces_the_file_s_own(tmp_path: Path) -> None:
    for own in ({}, {"name": "own"}):
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in tree().items() if key != "name"} | own))
        assert load_job(path, "given").name == "given"


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_the_workflows_parse_and_are_named_after_their_files(path: Path) -> None:
    assert load_job(path).name == path.stem


def test_there_are_workflows() -> None:
    assert {"digits", "fashion-mnist"} <= {path.stem for path in WORKFLOWS}


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (None, "cannot be read (No such file or directory); name an existing job file"),
        ("a: [", "is not YAML: while parsing"),
        ("- a\n- b\n", "should hold fields such as name, model and data"),
        ("", "should hold fields such as name, model and data"),
    ],
)
def test_a_file_that_is_no_job(tmp_path: Path, content: str | None, reported: str) -> None:
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(JobError) as error:
        load_job(path)
    assert str(error.value).startswith(f"{path}: {reported}")


def test_a_job_file_is_the_tree_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(tree(stop={"accuracy": 0.5})))
    assert load_job(path) == parse_job(tree(stop={"accuracy": 0.5}))


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        (
            {"training": {"loss": "mse"}},
            "stop.accuracy: a network trained with training.loss: mse has none; leave it out",
        ),
        (
            {"data": {"train": "a.npz"}},
            "stop.accuracy: is measured on data.test, which is missing; name it, or leave stop out",
        ),
    ],
)
def test_an_accuracy_that_is_never_measured_ends_no_run(sections: dict[str, Any], fault: str) -> None:
    assert faults(tree(stop={"accuracy": 0.9}, **sections)) == (fault,)


def test_row_adagrad_has_no_momentum() -> None:
    optimizer = {"name": "row-adagrad", "lr": 0.1, "momentum": 0.9}
    (reported,) = faults(tree(training={"optimizer": optimizer}))
    assert reported == "training.optimizer: row-adagrad has neither momentum nor weight_decay; leave them out"


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"name": "lion", "momentum": 0.9}, "momentum: is of sgd and rmsprop, not of lion; leave it out"),
        ({"name": "adam", "nesterov": True}, "nesterov: needs sgd with momentum; set both, or leave it out"),
        ({"name": "sgd", "nesterov": True}, "nesterov: needs sgd with momentum; set both, or leave it out"),
    ],
)
def test_an_optimizer_has_its_own_settings_alone(optimizer: dict[str, Any], said: str) -> None:
    (reported,) = faults(tree(training={"optimizer": {"name": "sgd", "lr": 0.1, **optimizer}}))
    assert reported == f"training.optimizer.{said}"


def test_a_split_by_depth_has_no_settings_of_neurons() -> None:
    model = {"factory": "a:b", "split": "blocks"}
    assert parse_job(tree(model=model)).model.split == "blocks"
    by_hand = {**model, "groups": {"0.weight": ["hidden", None]}, "fixed": ["hidden"]}
    assert faults(tree(model=by_hand, training={"method": "local-sgd"}, memory={"out_of_core": "always"})) == (
        "training.method: does not go with model.split: blocks; leave one of the two out",
        "model.groups: does not go with model.split: blocks; leave one of the two out",
        "model.fixed: does not go with model.split: blocks; leave one of the two out",
        "memory.out_of_core: does not go with model.split: blocks; leave one of the two out",
    )


def test_a_split_by_depth_and_width_may_have_groups_by_hand() -> None:
    model = {"factory": "a:b", "split": "both", "groups": {"0.weight": ["hidden", None]}, "fixed": ["hidden"]}
    assert parse_job(tree(model=model)).model.split == "both"
    assert faults(tree(model=model, training={"method": "local-sgd"})) == (
        "training.method: does not go with model.split: both; leave one of the two out",
    )


def test_rolling_has_no_rounds_and_no_neuron_in_two_subnets() -> None:
    rolling = {"policy": "rolling"}
    training = {"subnets": 6, "slack": 0.25}
    assert parse_job(tree(training=training, preemption=rolling)).training.slack == 0.25
    rest = "does not go with preemption.policy: rolling, as"
    for field, value, why in (
        ("method", "local-sgd", "no two subnets hold the same neuron"),
        ("copies", 2, "no two subnets hold the same neuron"),
        ("finish_whole", 0.2, "there are no rounds to divide otherwise"),
    ):
        (reported,) = faults(tree(training={field: value}, preemption=rolling))
        assert reported == f"training.{field}: {rest} {why}; leave one of the two out"
    phases = {"phases": [{"rounds": 3}, {"rounds": 3, "subnets": 1}]}
    (reported,) = faults(tree(training=phases, preemption=rolling))
    assert reported.startswith(f"training.phases: {rest}")
    (reported,) = faults(tree(training={"mode": "lockstep"}, preemption=rolling))
    assert reported == "preemption.policy: rolling would go on without some shards; set reissue for lockstep"
    assert "greater than 0" in faults(tree(training={"slack": 0}, preemption=rolling))[0]


def test_lockstep_wants_a_node_for_every_subnet_and_reissue() -> None:
    training = {"mode": "lockstep", "subnets": 5}
    assert parse_job(tree(training=training, nodes={"count": 5})).training.mode == "lockstep"
    reported = faults(tree(training=training, preemption={"policy": "salvage"}))
    assert reported == (
        "preemption.policy: salvage would go on without some shards; set reissue for lockstep",
        "training.subnets: 5 in lockstep need a node each, and nodes.count is 4; make them equal",
    )


def test_adamw_s_betas_are_below_one() -> None:
    (fault,) = faults(tree(training={"optimizer": {"name": "adamw", "lr": 0.1, "betas": [1.0, 0.999]}}))
    assert fault.startswith("training.optimizer.betas")


@pytest.mark.parametrize("paths", [["a", "b", "c"], ["a"], 3, {"x": "a"}])
def test_data_that_are_neither_a_path_nor_a_pair_are_one_fault(paths: Any) -> None:
    assert faults(tree(data={"train": paths})) == (
        f"data.train: {paths!r} should be an .npz file, or a pair [inputs, labels] of .npy or IDX files",
    )


def test_what_a_faulty_job_s_names_do_not_lead_to_is_reported_with_its_other_faults(tmp_path: Path) -> None:
    here = tmp_path / "x.npy"
    here.touch()
    job = tree(
        model={"factory": "nowhere.at_all:net"},
        data={"train": [str(here), str(tmp_path / "y.npy")], "test": "none.npz"},
        trainig={},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(JobError) as error:
        load_job(tmp_path / "job.yaml")
    assert error.value.faults == (
        "trainig: is not a field of a job; did you mean training?",
        (
            "model.factory: 'nowhere.at_all:net' cannot be imported (No module named 'nowhere'); "
            "write it as package.module:name, and run idletrain in the module's folder"
        ),
        f"data.train: {tmp_path}/y.npy cannot be read (No such file or directory); name an existing file",
        "data.test: none.npz cannot be read (No such file or directory); name an existing file",
    )


def test_files_at_home_and_in_s3_are_not_reported_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.txt").touch()
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(
            tree(
                model={"factory": "idletrain.nn.models:mlp"},
                data={"train": "~/train.txt", "test": "s3://bucket/x.txt"},
                trainig={},
            )
        )
    )
    with pytest.raises(JobError) as error:
        load_job(tmp_path / "job.yaml")
    assert error.value.faults == ("trainig: is not a field of a job; did you mean training?",)


def test_a_file_that_yaml_cannot_make_sense_of(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(JobError, match=r"job.yaml: is not YAML in UTF-8: ") as error:
        load_job(tmp_path / "job.yaml")
    assert len(error.value.faults) == 1


def test_memory_is_read_in_bytes_and_its_ways_are_named() -> None:
    tree = {"name": "a", "model": {"factory": "m:f"}, "data": {"name": "digits"}}
    memory = {"budget": "1GiB", "out_of_core": "always", "scratch": "/scratch", "units": ["0"]}
    job = parse_job({**tree, "memory": memory})
    assert (job.memory.budget, job.memory.out_of_core, job.memory.scratch) == (1 << 30, "always", "/scratch")
    assert job.memory.units == ("0",)
    assert parse_job(tree).memory.out_of_core == "auto"
    assert parse_job(tree).memory.compile == "never"
    with pytest.raises(JobError, match=r"memory.out_of_core: 'sometimes' should be 'auto', 'never' or 'always'"):
        parse_job({**tree, "memory": {"out_of_core": "sometimes"}})
    with pytest.raises(JobError, match=r"memory.budget: 'much' should be a size such as 512MiB or 2GB"):
        parse_job({**tree, "memory": {"budget": "much"}})


HUGE = 1_000_000


def short(value: Any) -> str:
    """A test's name, of a value that is too long for one."""
    return ascii(value)[:20] if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(
    "value", ["x" * HUGE, "9" * HUGE, 10**5000, "1" * 5000 + "GB", ["x" * HUGE], {"x" * HUGE: 1}], ids=short
)
@pytest.mark.parametrize("section", ["name", "training", "nodes", "checkpoint"])
def test_an_error_shows_no_more_of_a_value_than_fits_a_line(section: str, value: Any) -> None:
    assert max(map(len, faults(tree(**{section: value})))) < 600


def test_a_field_of_a_million_characters_is_one_short_line() -> None:
    (reported,) = faults(tree(**{"x" * HUGE: 1}))
    assert len(reported) < 600


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(12)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "name: &a [*a]",
        "name: t\nmodel: &m {factory: x, args: *m}\ndata: {name: digits}",
        "[" * 100_000,
        "{" * 5000,
        "- " * 50_000,
        "name: " + "x" * (2 << 20),
        "? [a]\n: b",
        "name: !!python/object/apply:os.system [true]",
        "name: !!binary x",
        "name: !!int x",
        "name: !!timestamp x",
        "name: 0x",
        "name: 9" + "9" * 5000,
        "name: 2024-13-45",
        "%YAML 9.9\n---\nname: t",
        "\ufeffname: t",
        'name: "\\ud800"',
        "name: t\n--- \nname: u",
        "<<: [1]",
        "<<: *a",
    ],
    ids=short,
)
def test_a_file_of_any_kind_is_refused_in_a_sentence_and_at_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(text.encode())
    began = time.monotonic()
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert time.monotonic() - began < 20
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("training", "rounds", 10**400),
        ("training", "subnets", 2**31),
        ("training", "seed", 10**30),
        ("training", "optimizer", {"name": "sgd", "lr": float("inf")}),
        ("training", "optimizer", {"name": "sgd", "lr": float("nan")}),
        ("nodes", "memory", "1e400GB"),
        ("nodes", "memory", "9" * 39 + "GB"),
        ("nodes", "budget_usd", float("inf")),
        ("nodes", "gpu", 10**9),
        ("checkpoint", "every", "9" * 39 + "d"),
        ("stop", "accuracy", float("nan")),
    ],
    ids=short,
)
def test_a_number_that_nothing_could_count_is_a_fault_of_its_field(section: str, field: str, value: Any) -> None:
    (reported,) = faults(tree(**{section: {field: value}}))
    assert reported.startswith(f"{section}.{field}")


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=ascii)
def test_text_that_no_path_can_have_is_refused(text: str) -> None:
    for job in (tree(checkpoint={"to": text}), tree(data={"train": text}), tree(workdir=text)):
        (reported,) = faults(job)
        assert "characters that no name or path can have" in reported


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody-of-this-name/x", "/dev/null/x"], ids=short)
def test_a_path_that_cannot_be_is_named_beside_other_faults(tmp_path: Path, path: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"name": "UPPER", "model": {"factory": "os:x"}, "data": {"train": path}}))
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["name", "data.train"]


CONTRADICTORY: dict[str, Any] = {
    "data": {"train": "x.npz"},
    "stop": {"accuracy": 0.9},
    "nodes": {"count": 2},
    "preemption": {"policy": "reissue"},
    "training": {
        "loss": "mse",
        "mode": "lockstep",
        "subnets": 4,
        "optimizer": {"name": "row-adagrad", "lr": 0.1, "momentum": 0.9},
        "exchange": {"loss": 0.1},
    },
}
CONTRADICTIONS = [
    "stop.accuracy",
    "stop.accuracy",
    "training.optimizer",
    "training.subnets",
    *["training.exchange.loss"] * 2,
]


def test_all_contradictions_are_told_at_once() -> None:
    assert [fault.split(":")[0] for fault in faults(tree(**CONTRADICTORY))] == CONTRADICTIONS


def test_contradictions_are_told_beside_faults_of_other_fields() -> None:
    reported = faults({**tree(**CONTRADICTORY), "name": "UPPER", "colour": "red"})
    assert [fault.split(":")[0] for fault in reported] == ["name", "colour", *CONTRADICTIONS]


def test_contradictions_are_told_beside_faults_of_an_item_of_a_list() -> None:
    optimizer = {"name": "lion", "lr": 1, "momentum": 0.9, "groups": [{"parameters": ["bias"], "lr": -1}]}
    reported = [fault.split(":")[0] for fault in faults(tree(training={"optimizer": optimizer}))]
    assert reported == ["training.optimizer.groups.0.lr", "training.optimizer.momentum"]


def test_a_field_that_is_wrong_itself_contradicts_none() -> None:
    wrong = {**CONTRADICTORY, "preemption": {"policy": "salvag"}, "nodes": {"count": 0}, "stop": {"accuracy": 2}}
    reported = [fault.split(":")[0] for fault in faults(tree(**wrong))]
    assert sorted(reported) == sorted(
        ["stop.accuracy", "nodes.count", "preemption.policy", "training.optimizer", "training.exchange.loss"]
    )


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "learning_rate": 0.1}},
            "training.optimizer.learning_rate: is not a field of a job; did you mean lr?",
        ),
        ({"max_epochs": 3}, "training.max_epochs: is not a field of a job; did you mean epochs?"),
        (
            {"metrics": {"mae": "network:mae"}},
            (
                "training.metrics.mae: 'network:mae' should be fields and their values, as in "
                '{metric: "package.module:function", better: lower}'
            ),
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 0.2, 1: None}},  # as YAML reads {lr: 0,2, ...}
            (
                "training.optimizer.1: is a number in place of a name; "
                "write decimals with a point (0.01), not with a comma"
            ),
        ),
    ],
    ids=["learning_rate", "max_epochs", "a metric's name", "a decimal comma"],
)
def test_what_people_write_in_place_of_a_field_is_told_with_the_right_way(training: Any, sentence: str) -> None:
    assert sentence in faults({**tree(), "training": {**tree().get("training", {}), **training}})


def test_a_key_that_is_there_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ntraining: {rounds: 3}\nmodel: {}\ntraining: {subnets: 2}\n")
    with pytest.raises(JobError, match="training: is there twice, in lines 2 and 4; join them"):
        read_tree(path)
    path.write_text("name: a\ntraining: {rounds: 3, rounds: 3}\n")
    with pytest.raises(JobError, match="rounds: is there twice, in lines 2 and 2; join them"):
        read_tree(path)


def test_what_a_mapping_takes_from_another_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, x: 4}\n")
    assert read_tree(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 4, "y": 3}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"training": None}, "training: is empty; it should be fields and their values, below it, or be left out"),
        ({"nodes": 5}, "nodes: 5 should be fields and their values, as in {count: 4}"),
        ({"data": None}, "data: is empty; it should be fields and their values, for example data: {name: digits}"),
        ({"model": {"factory": "math:pi", "exclude": "fc"}}, "model.exclude: 'fc' should be a list, such as ['fc']"),
        ({"model": {"factory": "math:pi", "args": 5}}, "model.args: 5 should be fields and their values, below it"),
        (
            {"model": {"factory": "math:pi", "args": {"drop": {0: 0.1}}}},
            "model.args: {'drop': {0: 0.1}} should have text as keys in drop, '0' instead of 0",
        ),
        (
            {"model": {"factory": "math:pi", "args": {"a": [1, {"b": float("inf")}]}}},
            "model.args: {'a': [1, {'b': inf}]} should have a finite number in a[1].b, or text that the function reads",
        ),
        (
            {"data": {"factory": "math:pi", "args": {"some": {1}}}},
            "data.args: {'some': {1}} should have text, a number, true, false, null, a list or fields in some",
        ),
        ({"nodes": {"count": True}}, "nodes.count: True should be a number"),
    ],
)
def test_what_stands_in_the_place_of_fields_is_told_as_that(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job({"name": "t", "model": {"factory": "math:pi"}, "data": {"name": "digits"}, **fields})
    assert sentence in caught.value.faults
