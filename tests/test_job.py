"""Every fault in a job is a sentence that names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from idletrain.errors import JobError
from idletrain.job import OPEN_SETTINGS, Job, load_job, parse_bytes, parse_job, parse_seconds

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
    assert (training.batch_size, training.seed, training.loss) == (128, 0, "cross_entropy")
    assert (training.optimizer.name, training.optimizer.lr, training.optimizer.state) == ("sgd", 0.1, "travel")
    assert (job.preemption.policy, job.preemption.progress_every, job.preemption.lease) == ("reissue", 5, 10)
    assert (job.checkpoint.every, job.checkpoint.keep, job.nodes.count, job.stop.accuracy) == (60, 2, 4, None)
    assert job.run_dir == Path("runs/t")


def test_units_are_read() -> None:
    job = parse_job(
        tree(preemption={"progress_every": "500ms", "lease": 7}, checkpoint={"every": "1h"}, nodes={"memory": "2GiB.."})
    )
    assert (job.preemption.progress_every, job.preemption.lease, job.checkpoint.every) == (0.5, 7, 3600)
    assert job.nodes.memory == 2 << 30


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15s", 15), ("10m", 600), ("4h", 14400), ("1d", 86400), ("250ms", 0.25), (3, 3), ("1.5", 1.5)],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 weeks", "-3s", True, None, "1e3"])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match="a duration such as 15s, 10m or 4h"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("7", 7), (9, 9), ("1kb", 1000)],
)
def test_sizes(text: Any, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "2 Gib/s", "-1GB", True, "2TiB"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="a size such as 512MiB or 2GB"):
        parse_bytes(text)


@pytest.mark.parametrize("value", ["1.2.3s", "..s"])
def test_a_number_with_two_points_is_a_fault_of_its_field(value: str) -> None:
    (reported,) = faults(tree(checkpoint={"every": value}))
    assert reported.startswith(f"checkpoint.every: {value!r} ")


@pytest.mark.parametrize(
    ("job", "reported"),
    [
        (tree(trainig={}), "trainig: is not a field of a job; did you mean training?"),
        (tree(training={"round": 3}), "training.round: is not a field of a job; did you mean rounds?"),
        (
            tree(training={"optimizer": {"learning": 1, "lr": 1}}),
            "training.optimizer.learning: is not a field of a job",
        ),
        (tree(training={"optimizer": {}}), "training.optimizer.lr: is missing; for example lr: 0.1"),
        (tree(stop={"xyz": 1}), "stop.xyz: is not a field of a job; known here: accuracy"),
        (tree(name="My Run"), "name: 'My Run' should be lower-case letters, digits and hyphens, at most 63"),
        (tree(training={"rounds": 0}), "training.rounds: 0 should be greater than or equal to 1"),
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


def test_adagrad_has_no_momentum() -> None:
    optimizer = {"name": "adagrad", "lr": 0.1, "momentum": 0.9}
    (reported,) = faults(tree(training={"optimizer": optimizer}))
    assert reported == "training.optimizer: adagrad has neither momentum nor weight_decay; leave them out"


def test_lockstep_wants_a_node_for_every_subnet_and_reissue() -> None:
    training = {"mode": "lockstep", "subnets": 5}
    assert parse_job(tree(training=training, nodes={"count": 5})).training.mode == "lockstep"
    reported = faults(tree(training=training, preemption={"policy": "salvage"}))
    assert reported == (
        "preemption.policy: salvage would close rounds without some shards; set it to reissue for lockstep",
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
            "write it as package.module:name"
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


@pytest.mark.parametrize("content", [b"name: \xff\xfe", b"name: 2024-13-01"])
def test_a_file_that_yaml_cannot_make_sense_of(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
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
    with pytest.raises(JobError, match=r"memory.out_of_core: 'sometimes' should be 'auto', 'never' or 'always'"):
        parse_job({**tree, "memory": {"out_of_core": "sometimes"}})
    with pytest.raises(JobError, match=r"memory.budget: 'much' should be a size such as 512MiB or 2GB"):
        parse_job({**tree, "memory": {"budget": "much"}})
