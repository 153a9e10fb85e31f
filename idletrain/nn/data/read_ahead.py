"""Read and decode samples in other processes, ahead of the steps that need them."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker

from idletrain.errors import JobError
from idletrain.nn import travel
from idletrain.nn.data.arrays import Samples, Source
from idletrain.nn.data.batches import map_leaves, map_parts
from idletrain.nn.data.seeding import seed_everything
from idletrain.nn.data.streams import StreamPlace, StreamSource

BATCHES_AHEAD = 2  # of each process, torch's own default

Index = NDArray[np.int64] | StreamPlace
Read = tuple[Index, int]  # what to read, and the seed to read it with


class ReadAhead:
    """Samples that processes of torch's DataLoader read, in an order that is known in advance.

    The bits are those of reading without them: each batch is read with its own seed. The processes start with the first
    batches and serve one lease after the other.

    Args:
        source: The samples' source.
        samples: The same samples, opened here.
        num_workers: How many processes.
    """

    _position = ""

    def __init__(self, source: Source, samples: Samples, num_workers: int) -> None:
        self._samples, self._reads = samples, _Reads()
        one = isinstance(samples, StreamSource)  # several would each have to skip what the others read
        self._loader: DataLoader[Any] = DataLoader(
            _Reader(travel.dumps(source)),
            batch_size=None,
            sampler=self._reads,
            num_workers=1 if one else num_workers,
            collate_fn=_itself,  # type: ignore[arg-type]  # of a batch, which the processes have made
            prefetch_factor=BATCHES_AHEAD,
            persistent_workers=True,
            multiprocessing_context="spawn",  # a fork of a process with threads may hang
        )
        self._results: Iterator[bytes] = iter(())

    def start(self, reads: Sequence[Read]) -> None:
        """Begin to read a lease's batches, in this order; what is left of the last lease's is dropped."""
        self._reads.now = reads
        self._results = iter(self._loader)

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, index: NDArray[np.int64]) -> tuple[Any, Any]:  # noqa: ARG002 (the next of `start`)
        """Return the next batch.

        Raises:
            JobError: the data have a fault.
            RuntimeError: reading it failed.
        """
        inputs, target, fault, self._position = pickle.loads(next(self._results))
        if fault:
            raise JobError(fault[1]) if fault[0] == JobError.__name__ else RuntimeError(fault[1])
        inputs = map_leaves(_as_tensor, inputs)
        return inputs, inputs if target is None else map_leaves(_as_tensor, target)

    def position(self) -> str:
        """Return the position of a stream behind the last batch, see `StreamSource.position`."""
        return self._position


def stream_position(samples: Any) -> str:
    """Return the position of a stream behind the batch that was read last; "" of all other samples."""
    return samples.position() if isinstance(samples, StreamSource | ReadAhead) else ""


def can_read_ahead() -> bool:
    """Return whether this process may start others: one of Dask's nanny, a daemon, may not."""
    return not multiprocessing.current_process().daemon


class _Reads:
    """The order of a lease's batches, as a sampler."""

    def __init__(self) -> None:
        self.now: Sequence[Read] = ()

    def __iter__(self) -> Iterator[Read]:
        return iter(self.now)


class _Reader(Dataset[bytes]):
    """What runs in the processes; its source is pickled by value, as a class of a script or notebook has to be."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._samples: Any = None

    def __getitem__(self, read: Read) -> bytes:
        """Return a batch, or why it cannot be read, as bytes: shared memory may be as little as 64 MiB."""
        index, seed = read
        try:
            if self._samples is None:
                worker._worker_info = None  # a stream must not deal itself out once more
                self._samples = cloudpickle.loads(self._pickled).open()
            seed_everything(seed)
            inputs, target = self._samples.batch(index)
        except Exception as error:  # noqa: BLE001 (raised by the step that needs the batch)
            name = JobError.__name__ if isinstance(error, JobError) else type(error).__name__
            return pickle.dumps((None, None, (name, str(error) or name), ""))
        labels = None if target is inputs else map_parts(_as_array, target)
        position = stream_position(self._samples)
        batch: bytes = cloudpickle.dumps((map_parts(_as_array, inputs), labels, None, position))
        return batch


def _as_array(tensor: Any) -> Any:
    return tensor.detach().numpy() if isinstance(tensor, Tensor) else tensor


def _as_tensor(_name: str, part: Any) -> Any:
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def _itself(batch: bytes) -> bytes:
    """Return a batch as it is read."""
    return batch
