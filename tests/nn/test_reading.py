"""How samples are read follows from the module and from a DataLoader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from idletrain.job import TrainingSettings
from idletrain.nn.data.csr import Rows
from idletrain.nn.data.given import as_samples
from idletrain.nn.prepare import prepare
from idletrain.nn.reading import fit_reading
from idletrain.nn.wide.layers import SparseEmbeddingBag

BYTES = np.random.default_rng(0).integers(0, 256, (12, 5)).astype(np.uint8)
LABELS = np.arange(12) % 3


class At:
    """Data at hand, as a source."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def open(self) -> Any:
        return as_samples(self.data)


class ByteNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(256, 4), nn.Linear(20, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.last(self.table(text.long()).flatten(1))


@pytest.mark.parametrize(
    "data",
    [
        (BYTES, LABELS),
        TensorDataset(torch.tensor(BYTES), torch.tensor(LABELS)),
        [{"text": x, "labels": y} for x, y in zip(BYTES, LABELS, strict=True)],
        {"text": BYTES, "labels": LABELS},
    ],
)
def test_bytes_stay_integers_where_an_embedding_looks_them_up(data: Any) -> None:
    source = fit_reading(ByteNet(), At(data), TrainingSettings()).of(At(data), ordered=True)
    assert source
    inputs, _ = source.open().batch(np.array([2, 0]))
    text = inputs["text"] if isinstance(inputs, dict) else inputs
    assert text.tolist() == BYTES[[2, 0]].tolist()


def test_bytes_become_floats_where_they_are_images() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.first = nn.Embedding(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x.float()) + self.place(torch.arange(5)).mean(0)

    source = fit_reading(Image(), At((BYTES, LABELS)), TrainingSettings()).of(At((BYTES, LABELS)), ordered=True)
    assert source
    assert float(source.open().batch(np.array([0]))[0].max()) <= 1


def test_a_sparse_matrix_stays_sparse_for_a_layer_that_takes_it_so() -> None:
    data = (scipy.sparse.csr_array(np.eye(4)), np.arange(4))
    for module, kind in ((nn.Linear(4, 4), Tensor), (SparseEmbeddingBag(4, 4), Rows)):
        source = fit_reading(module, At(data), TrainingSettings()).of(At(data), ordered=True)
        assert source
        assert isinstance(source.open().batch(np.array([0, 1]))[0], kind)


def test_the_batch_size_is_the_dataloader_s_unless_the_job_says_one() -> None:
    loader = DataLoader(TensorDataset(torch.rand(12, 5), torch.tensor(LABELS)), batch_size=4, shuffle=True)
    prepared = prepare(nn.Linear(5, 3), At(loader), None, None, TrainingSettings(subnets=2))
    assert prepared.program.training.batch_size == 4
    assert prepared.notes == ()
    prepared = prepare(nn.Linear(5, 3), At(loader), None, None, TrainingSettings(subnets=2, batch_size=6))
    assert prepared.program.training.batch_size == 6


def test_an_order_that_cannot_be_kept_is_left_out_and_told() -> None:
    dice = random.Random(0)

    class Other:
        def __iter__(self) -> Any:
            return iter(dice.sample(range(12), 12))

        def __len__(self) -> int:
            return 12

    loader: Any = DataLoader(TensorDataset(torch.rand(12, 5), torch.tensor(LABELS)), batch_size=4, sampler=Other())
    prepared = prepare(nn.Linear(5, 3), At(loader), None, None, TrainingSettings(subnets=2))
    assert "Other yields another order each time" in prepared.notes[0]
    samples: Any = prepared.program.source.open()
    assert samples.loading.sampler is None


class Placed(IterableDataset):  # type: ignore[type-arg]
    """A stream that keeps its state, as a value or as a tensor."""

    def __init__(self, kind: type) -> None:
        self.kind, self.place = kind, 0

    def state_dict(self) -> Any:
        return {"place": self.kind(self.place)}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]

    def __iter__(self) -> Any:
        while self.place < 90:
            self.place += 1
            yield torch.ones(5) * self.place, self.place % 3
        self.place = 0


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_a_stream_goes_on_from_a_state_that_is_plain_and_of_another_it_is_told(kind: Any) -> None:
    prepared = prepare(nn.Linear(5, 3), At(Placed(kind)), None, None, TrainingSettings(subnets=2, batch_size=32))
    samples: Any = prepared.program.source.open()
    assert samples.resumes is (kind is int)
    told = "data: the Placed is read anew by a worker that goes on with a subnet, since its state is not made of plain"
    assert [note.startswith(told) for note in prepared.notes] == ([] if kind is int else [True])


class TextRows:
    """The part of `datasets.Dataset` that is used."""

    column_names = ["text", "x", "label"]  # noqa: RUF012

    def with_format(self, _kind: str) -> TextRows:
        return self

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return {"text": "a" * i, "x": [float(i)] * 5, "label": i % 3}


def test_columns_that_only_the_kwargs_of_a_forward_would_take_are_left_out() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            assert kwargs.keys() <= {"label"}
            return self.last(x)

    prepared = prepare(Net(), At(TextRows()), At(TextRows()), None, TrainingSettings(subnets=2))
    assert prepared.program.source.open().batch(np.array([0]))[0].keys() == {"x", "label"}


def test_columns_of_rows_that_the_module_does_not_take_are_left_out() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a"] * 12, "x": [[1.0] * 5] * 12, "label": LABELS.tolist()})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x)

    prepared = prepare(Net(), At(rows), At(rows), None, TrainingSettings(subnets=2))
    assert prepared.test
    for source in (prepared.program.source, prepared.test):
        assert source.open().batch(np.array([0]))[0].keys() == {"x", "label"}
