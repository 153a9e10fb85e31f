"""Bad input is refused with a sentence that names the field, the value and the way out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import joined
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.job_file import parse_job
from idletrain.nn import models
from idletrain.nn.alone import train_alone
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.data.streams import StreamSource
from idletrain.nn.evaluate import assembled, score
from idletrain.nn.faults import resolve
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.prepare import Prepared, from_settings, named_loss, prepare
from idletrain.nn.program import model_loss

MLP = "idletrain.nn.models:mlp"


def prepared(**sections: Any) -> Prepared:
    """A job on digits, with sections changed."""
    tree: dict[str, Any] = {
        "name": "t",
        "model": {"factory": MLP, "args": {"widths": [64, 16, 10]}},
        "data": {"name": "digits"},
        "training": {"optimizer": {"name": "sgd", "lr": 0.1}},
    }
    job = parse_job(tree | sections)
    return from_settings(job.model, job.data, job.training)


def faults(**sections: Any) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        prepared(**sections)
    return caught.value.faults


def fault(**sections: Any) -> str:
    (only,) = faults(**sections)
    return only


def save(folder: Path, **arrays: Any) -> dict[str, str]:
    np.savez(folder / "d.npz", **arrays)
    return {"train": str(folder / "d.npz")}


def mlp(*widths: int, norm: str | None = None) -> dict[str, Any]:
    return {"factory": MLP, "args": {"widths": list(widths), "norm": norm}}


def test_a_sound_job_becomes_a_program_with_its_groups_and_first_values() -> None:
    got = prepared()
    assert got.program.layout.sizes == (16,)
    assert [tuple(t.shape) for t in got.network] == [t.shape for t in got.program.layout.tensors]
    assert got.test is not None
    assert len(got.test.open()) == 360
    assert {p.device.type for p in got.program.module.parameters()} == {"meta"}


def test_first_values_are_a_function_of_the_seed() -> None:
    first, same, other = (
        prepared(training={"seed": s, "optimizer": {"name": "sgd", "lr": 0.1}}).network for s in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])


def test_local_sgd_cuts_nothing() -> None:
    got = prepared(training={"method": "local-sgd", "subnets": 99})
    assert got.program.layout.groups == ()


@pytest.mark.parametrize("factory", ["no.such:thing", "nothing", "", ":x"])
def test_a_factory_that_cannot_be_imported(factory: str) -> None:
    assert fault(model={"factory": factory}).startswith(f"model.factory: {factory!r} cannot be imported (")
    assert "write it as package.module:name" in fault(model={"factory": factory})


@pytest.mark.parametrize(
    ("content", "factory", "reason"),
    [
        ("import nothing_of_this_name", "faulty_module:net", "No module named 'nothing_of_this_name'"),
        ("def net(:", "faulty_module:net", "invalid syntax"),
        ("raise SystemError('own')", "faulty_package.inner:net", "own"),
        ("import nothing_of_this_name", "faulty_package.inner:net", "No module named 'nothing_of_this_name'"),
    ],
)
def test_a_module_that_is_there_and_fails_is_to_be_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, factory: str, reason: str
) -> None:
    (tmp_path / "faulty_package").mkdir()
    (tmp_path / "faulty_package" / "__init__.py").write_text(content)
    (tmp_path / "faulty_module.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    told = fault(model={"factory": factory})
    assert reason in told
    assert told.endswith("; correct it, or install what it imports")


def test_a_name_that_a_module_does_not_have() -> None:
    told = "model.factory: idletrain.nn.models has no "
    assert fault(model={"factory": "idletrain.nn.models:mpl"}) == f"{told}mpl; did you mean mlp?"
    assert fault(model={"factory": "idletrain.nn.models:zebra"}) == f"{told}zebra; define it"


def test_a_factory_is_blamed_for_what_it_raises_and_its_arguments_only_where_it_does_not_take_them() -> None:
    args = {"widths": [64, 10], "depth": 3}
    told = fault(model={"factory": MLP, "args": args})
    assert told == f"model.args: {MLP} does not take {args}: got an unexpected keyword argument 'depth'"
    told = fault(data={"factory": "builtins:open", "args": {"file": "none.csv"}})
    assert told.startswith("data.args: open fails with {'file': 'none.csv'}: ")
    assert "none.csv" in told


def test_a_factory_that_returns_no_module() -> None:
    assert fault(model={"factory": "builtins:dict"}) == (
        "model.factory: 'builtins:dict' returned a dict, not a torch.nn.Module"
    )


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"width": [1, 2]}, "unexpected keyword argument 'width'"),
        ({"widths": [64]}, "widths [64] should be at least two positive numbers"),
        ({"widths": [64, 0, 10]}, "should be at least two positive numbers"),
        ({"widths": [64, 8, 10], "norm": "layer"}, "norm 'layer' should be batch or null"),
    ],
)
def test_arguments_that_the_factory_does_not_take(args: dict[str, Any], reason: str) -> None:
    told = fault(model={"factory": MLP, "args": args})
    how = "does not take" if "width" in args else "fails with"
    assert told.startswith(f"model.args: {MLP} {how} {args}: ")
    assert reason in told


def test_a_model_whose_width_does_not_chain_with_the_data() -> None:
    told = fault(model=mlp(63, 16, 10))
    assert told.startswith("model: does not take inputs of shape [64]: mat1 and mat2 shapes cannot be multiplied")


def test_more_subnets_than_neurons() -> None:
    """A group that is found stays whole; one that is asked for is a fault."""
    assert prepared(model=mlp(64, 32, 6, 10), training={"subnets": 8}).program.layout.sizes == (32,)
    table = {"1.weight": ["h", None], "1.bias": ["h"], "3.weight": [None, "h"]}
    by_hand = {**mlp(64, 6, 10), "groups": table}
    assert fault(model=by_hand, training={"subnets": 8}).endswith("use at most 6 or exclude the group")


def with_schedule(schedule: str) -> dict[str, Any]:
    return {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": schedule}, "rounds": 4, "local_steps": 10}


def test_a_schedule_by_its_path_is_called_with_the_step_and_all_steps() -> None:
    program = prepared(training=with_schedule("operator:truediv")).program
    assert [program.lr_factor(step) for step in (0, 10, 39)] == [0, 0.25, 39 / 40]


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("no.such:fn", "training.optimizer.schedule: 'no.such:fn' cannot be imported ("),
        ("math:pi", "training.optimizer.schedule: math:pi fails at step 0 ("),
        ("operator:sub", "training.optimizer.schedule: operator:sub returns -40.0 at step 0; it should be a factor of"),
    ],
)
def test_a_schedule_that_is_no_function_of_steps(schedule: str, told: str) -> None:
    assert fault(training=with_schedule(schedule)).startswith(told)
    assert len(faults(training=with_schedule(schedule), model={"factory": "no.such:thing"})) == 2


def test_parameter_groups_that_fit_nothing_are_told_with_other_faults() -> None:
    training = {
        "loss": "mpse",
        "optimizer": {"name": "sgd", "lr": 0.1, "groups": [{"parameters": ["head.*"], "lr": 1}]},
    }
    sentences = faults(training=training)
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "training.loss",
        "training.optimizer.groups.0.parameters",
    ]


def test_a_loss_that_is_not_known() -> None:
    assert fault(training={"loss": "cross-entropy"}) == (
        "training.loss: 'cross-entropy' should be one of cross_entropy, bce_with_logits, mse, sampled_softmax, "
        "model or package.module:function, such as torch.nn.functional:l1_loss"
    )
    assert "training.loss: 'no.such:loss' cannot be imported" in fault(training={"loss": "no.such:loss"})
    assert named_loss("torch.nn.functional:l1_loss") is functional.l1_loss


@pytest.mark.parametrize("loss", ["mse", "bce_with_logits"])
def test_a_loss_that_does_not_fit_the_labels(loss: str) -> None:
    told = fault(training={"loss": loss})
    assert told.startswith(f"training.loss: {loss} does not fit outputs [2, 10] and labels [2] of torch.int64: ")


def test_a_loss_that_does_not_return_one_number(tmp_path: Path) -> None:
    data = save(tmp_path, x=np.zeros((8, 4)), y=np.zeros((8, 3)))
    told = fault(model=mlp(4, 8, 3), data=data, training={"loss": "torch:sub"})
    assert told.startswith("training.loss: torch:sub returns [2, 3] for outputs [2, 3]")


@pytest.mark.parametrize("out_of_core", ["train", "test"])
def test_labels_beyond_the_outputs(tmp_path: Path, out_of_core: str) -> None:
    np.savez(tmp_path / "good.npz", x=np.zeros((8, 4)), y=np.arange(8) % 3)
    np.savez(tmp_path / "bad.npz", x=np.zeros((8, 4)), y=np.array([0, 1, 2, 0, 1, 2, 0, 7]))
    data = {part: str(tmp_path / ("bad.npz" if part == out_of_core else "good.npz")) for part in ("train", "test")}
    told = fault(model=mlp(4, 8, 3), data=data)
    assert "label 7 is beyond the model's 3 outputs" in told


def test_negative_labels(tmp_path: Path) -> None:
    data = save(tmp_path, x=np.zeros((8, 4)), y=np.array([0, 1, 2, 0, 1, 2, -1, 0]))
    assert "label -1 " in fault(model=mlp(4, 8, 3), data=data)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_in_the_data(tmp_path: Path, value: float) -> None:
    x = np.zeros((5000, 4), np.float32)
    x[4999, 3] = value
    told = fault(model=mlp(4, 8, 3), data=save(tmp_path, x=x, y=np.zeros(5000, int)))
    assert told == "data.train: its inputs hold NaN or infinity in row 4999; clean the data"


def test_data_that_are_not_numbers(tmp_path: Path) -> None:
    told = fault(model=mlp(4, 8, 3), data=save(tmp_path, x=np.full((8, 4), "a"), y=np.zeros(8, int)))
    assert told.startswith("data.train: the array x of ")
    assert told.endswith(
        "d.npz holds str32; write it as floats, integers or booleans; "
        "numpy.unique(texts, return_inverse=True)[1] makes codes of texts"
    )


def test_a_missing_file(tmp_path: Path) -> None:
    told = fault(data={"train": str(tmp_path / "none.npz")})
    assert told == f"data.train: {tmp_path}/none.npz cannot be read (No such file or directory); name an existing file"


def test_a_file_of_unknown_kind() -> None:
    assert fault(data={"train": "data.csv"}) == (
        "data.train: 'data.csv' should be an .npz file, a pair [inputs, labels] of .npy or IDX files, a folder of "
        "images, or sparse rows: an extreme-classification .txt, or a pair of CSR .npz; read other files, such as CSV, "
        "by a function that data.factory names"
    )


@pytest.mark.parametrize(("data", "has"), [({}, "neither"), ({"name": "digits", "factory": "a:b"}, "name and factory")])
def test_data_must_be_named_in_one_way(data: dict[str, str], has: str) -> None:
    assert fault(data=data) == f"data: has {has}; give one of name, train (with test) or factory"


def test_a_data_factory_that_cannot_be_imported() -> None:
    assert "data.factory: 'a.b:c' cannot be imported" in fault(data={"factory": "a.b:c"})


def test_all_faults_are_told_at_once() -> None:
    told = faults(model={"factory": "no:model"}, data={"train": "data.csv"}, training={"loss": "nil"})
    assert [f.split(":")[0] for f in told] == ["model.factory", "data.train", "training.loss"]


def test_both_data_files_are_told_at_once(tmp_path: Path) -> None:
    told = faults(data={"train": str(tmp_path / "a.npz"), "test": str(tmp_path / "b.npz")})
    assert [f.split(":")[0] for f in told] == ["data.train", "data.test"]


def test_parameters_of_64_bits() -> None:
    module = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 10).double())
    job = parse_job({"name": "t", "model": {"factory": MLP}, "data": {"name": "digits"}})
    source = prepared().program.source
    with pytest.raises(JobError) as caught:
        prepare(module, source, None, functional.cross_entropy, job.training)
    assert str(caught.value) == (
        "model: parameters should be float32, bfloat16 or float16, but 1.weight is torch.float64, "
        "1.bias is torch.float64; give it .float()"
    )


def test_a_module_with_nothing_to_train() -> None:
    module = nn.Linear(64, 10).requires_grad_(False)
    job = parse_job({"name": "t", "model": {"factory": MLP}, "data": {"name": "digits"}})
    with pytest.raises(JobError, match="no parameter that requires a gradient"):
        prepare(module, prepared().program.source, None, functional.cross_entropy, job.training)


def test_batch_norm_with_batches_of_one() -> None:
    """torch refuses it at the first step: on every worker, after the run has started."""
    told = fault(model=mlp(64, 16, 10, norm="batch"), training={"batch_size": 1})
    assert "Expected more than 1 value per channel" in told
    assert prepared(model=mlp(64, 16, 10), training={"batch_size": 1}).program.layout.sizes == (16,)


def test_the_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    job = parse_job({"name": "t", "model": {"factory": MLP}, "data": {"name": "digits"}})
    prepare(module, prepared().program.source, None, functional.cross_entropy, job.training)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_dotted_path_resolves_with_colon_or_dot() -> None:
    assert resolve("torch.nn:Linear", "f") is resolve("torch.nn.Linear", "f") is nn.Linear


BROKEN = {
    "syntax": "def net(:\n",
    "name": "net = nothing\n",
    "key": "net = {}['net']\n",
    "exit": "import sys\nsys.exit('usage: train.py')\n",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_factory_whose_module_fails_while_it_is_imported(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"broken_{how}.py").write_text(BROKEN[how])
    monkeypatch.syspath_prepend(tmp_path)
    assert fault(model={"factory": f"broken_{how}:net"}).startswith(
        f"model.factory: 'broken_{how}:net' cannot be impor"
    )


@pytest.mark.parametrize("raised", [AttributeError, AssertionError, KeyError])
def test_whatever_a_factory_raises_is_a_fault_of_the_job(
    raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def net(**_args: Any) -> None:
        raise raised("widths")

    monkeypatch.setattr(models, "net", net, raising=False)
    place = f"net at {__file__}:{net.__code__.co_firstlineno + 1}"
    told = fault(model={"factory": "idletrain.nn.models:net"})
    assert told.startswith(f"model.factory: idletrain.nn.models:net fails: {place} raised {raised.__name__}: ")
    told = fault(data={"factory": "idletrain.nn.models:net"})
    assert told.startswith(f"data.factory: net fails: {place} raised {raised.__name__}: ")


def test_a_factory_and_a_file_that_are_missing_are_told_at_once(tmp_path: Path) -> None:
    told = faults(
        model={"factory": "no:model"},
        data={"train": str(tmp_path / "a.npz"), "test": "b.csv"},
        training={"loss": "nil"},
    )
    assert sorted(f.split(":")[0] for f in told) == ["data.test", "data.train", "model.factory", "training.loss"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"name": "digits", "test": "t.npz"}, ["data.test: 't.npz' goes with train alone; leave it out"]),
        (
            {"name": "digits", "path": "/x", "args": {"a": 1}},
            [
                "data.path: '/x' goes with name: fashion-mnist alone; leave it out",
                "data.args: {'a': 1} goes with factory alone; leave it out",
            ],
        ),
        ({"factory": "a:b", "test": "t.npz"}, ["data.test: 't.npz' goes with train alone; leave it out"]),
    ],
)
def test_what_would_be_left_unread_is_refused(data: dict[str, Any], told: list[str]) -> None:
    assert list(faults(data=data)) == told


def test_a_hugging_face_model_is_split_as_it_stands_with_an_attention_mask() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=16)
    mask = np.arange(12) < 9
    items = [{"input_ids": [i % 50] * 12, "attention_mask": mask.astype(int), "label": i % 2} for i in range(32)]
    module = transformers.AutoModelForSequenceClassification.from_config(config)
    training = TrainingSettings(subnets=2, batch_size=4)
    found = prepare(module, MapStyleSource(items), MapStyleSource(items), None, training)
    assert found.fallback == ""
    assert found.program.loss is model_loss
    assert {group.name.removeprefix("bert.encoder.layer.0."): group.size for group in found.program.layout.groups} == {
        "attention.self.query": 4,
        "intermediate.dense": 64,
        "bert.pooler.dense": 32,
    }


JOINED = pytest.mark.parametrize(
    ("module", "items", "collate"),
    [(joined.GraphNet, joined.graphs(60), joined.join), (joined.Recurrent, joined.sequences(60), joined.by_time)],
    ids=["graphs", "by time"],
)


def of_joined(module: Any, items: Any, collate: Any, **changes: Any) -> Prepared:
    training = TrainingSettings.model_validate(
        {
            "subnets": 2,
            "local_steps": 6,
            "rounds": 3,
            "batch_size": 10,
            "optimizer": {"name": "sgd", "lr": 0.1},
            **changes,
        }
    )
    torch.manual_seed(0)
    return prepare(module(), MapStyleSource(items, collate), MapStyleSource(items, collate), None, training)


@JOINED
def test_batches_whose_rows_are_not_samples_are_trained_and_scored_by_samples(
    module: Any, items: Any, collate: Any
) -> None:
    got = of_joined(module, items, collate)
    assert (got.program.joined, got.program.out_of_core) == (True, "never")
    assert got.program.training.method == "ist"
    assert got.program.layout.groups
    network = train_alone(got)
    trained = assembled(got.module, network.values)
    before, after = (score(net, MapStyleSource(items, collate), got.program.loss) for net in (got.module, trained))
    assert after.loss < before.loss
    outputs, labels = trained(collate(items)[0]).detach(), collate(items)[1]
    assert after.loss == pytest.approx(float(functional.cross_entropy(outputs, labels)), abs=1e-5)
    assert after.accuracy == pytest.approx(float((outputs.argmax(1) == labels).float().mean()))


@JOINED
def test_local_sgd_of_one_subnet_is_plain_torch_on_such_batches(module: Any, items: Any, collate: Any) -> None:
    got = of_joined(module, items, collate, method="local-sgd", subnets=1, rounds=1)
    network = train_alone(got)
    plain, order = got.module.train(), BatchOrder(0, len(items), 10, 1)
    step = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(6):
        inputs, labels = collate([items[i] for i in order.batch(0, number)])
        step.zero_grad()
        functional.cross_entropy(plain(inputs), labels).backward()
        step.step()
    assert all(torch.equal(a, b) for a, b in zip(network.values, plain.parameters(), strict=True))


@JOINED
def test_micro_batches_of_such_batches_are_joined_by_themselves(module: Any, items: Any, collate: Any) -> None:
    whole, parts = (of_joined(module, items, collate, micro_batch=size, rounds=1) for size in (None, 4))
    for a, b in zip(train_alone(whole).values, train_alone(parts).values, strict=True):
        torch.testing.assert_close(a, b)  # by samples, though micro-batches of as many have other numbers of rows


def test_a_stream_of_such_batches_has_no_micro_batches() -> None:
    class Rings(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(joined.graphs(30))

    class Source:
        def open(self) -> Any:
            return StreamSource(Rings(), joined.join)

    training = TrainingSettings.model_validate(
        {"subnets": 2, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.1}}
    )
    assert prepare(joined.GraphNet(), Source(), None, None, training).program.joined
    fault = "training.micro_batch: a stream's batches cannot be parted that collate_fn joins; leave it out"
    with pytest.raises(JobError, match=fault):
        prepare(joined.GraphNet(), Source(), None, None, training.model_copy(update={"micro_batch": 5}))


def dropped(items: list[Any], *, inputs: int, labels: int) -> Any:
    x, y = torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])
    return x[: len(x) - inputs], y[: len(y) - labels]


def test_rows_that_are_missing_of_more_samples_than_two_are_found_before_the_start() -> None:
    def rarely(items: list[Any]) -> Any:
        return dropped(items, inputs=int(len(items) > 2), labels=0)

    samples = MapStyleSource([(torch.zeros(4), n % 3) for n in range(8)], rarely)
    with pytest.raises(JobError, match=r"cross_entropy does not fit outputs \[7, 3\] and labels \[8\]"):
        prepare(nn.Linear(4, 3), samples, None, None, TrainingSettings(subnets=1))


@pytest.mark.parametrize(
    ("missing", "fault"),
    [
        ({"inputs": 0, "labels": 1}, "collate_fn returned 1 samples for 2 items"),
        ({"inputs": 1, "labels": 1}, "collate_fn returned 1 samples for 2 items"),
        ({"inputs": 1, "labels": 0}, r"cross_entropy does not fit outputs \[1, 3\] and labels \[2\]"),
    ],
)
def test_rows_that_are_missing_are_named_with_both_numbers(missing: Any, fault: str) -> None:
    items = [(torch.zeros(4), n % 3) for n in range(8)]
    samples = MapStyleSource(items, functools.partial(dropped, **missing))
    with pytest.raises(JobError, match=fault):
        prepare(nn.Linear(4, 3), samples, None, None, TrainingSettings(subnets=1))


@pytest.mark.parametrize(("batch_size", "notes"), [(8, 0), (9, 1)])
def test_a_batch_larger_than_the_data_is_told(batch_size: int, notes: int) -> None:
    source = MapStyleSource([(torch.zeros(4), number % 3) for number in range(8)])
    prepared = prepare(nn.Linear(4, 3), source, None, None, TrainingSettings(subnets=1, batch_size=batch_size))
    told = [note for note in prepared.notes if note.startswith("training.batch_size: 9 is more than the 8 samples")]
    assert len(told) == notes
