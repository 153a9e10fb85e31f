"""scikit-learn's estimators: `fit(X, y)` trains in this process, or on workers like `idletrain.fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from idletrain.api import fit
from idletrain.epochs import with_rounds
from idletrain.errors import JobError
from idletrain.export import finished_module
from idletrain.job_file import parse_job
from idletrain.nn.alone import train_alone
from idletrain.nn.checks import outputs_of
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.data.batches import call, described, prediction
from idletrain.nn.data.seeding import seeded
from idletrain.nn.ist.modules import copied
from idletrain.nn.models import mlp
from idletrain.nn.optim import from_torch
from idletrain.nn.prepare import prepare
from idletrain.nn.threads import one_thread

PREDICTED_AT_ONCE = 4096  # samples: of 1,000 features 16 MB


@dataclass(frozen=True)
class _Arrays:
    """Inputs `[N, F]` and labels, as a source of this process."""

    x: NDArray[Any]
    y: NDArray[Any]

    def open(self) -> ArraySource:
        return ArraySource(self.x, self.y)


@contextlib.contextmanager
def _modes_of_training() -> Iterator[None]:
    """Record gradients and create float32 within the context, whatever modes of torch the caller has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)


class _Estimator(BaseEstimator):
    """Base of classifier and regressor, with the settings and the training from `[N, F]` to `[N, C]`."""

    def __init__(  # noqa: PLR0913 (scikit-learn's estimators have all of their settings here)
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        hidden: Sequence[int] = (128,),
        method: str = "ist",
        subnets: int = 2,
        local_steps: int = 10,
        epochs: float = 50,
        batch_size: int = 32,
        optimizer: str | Mapping[str, Any] | None = None,
        random_state: Any = None,
        workers: int = 0,
        fit_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.hidden = hidden
        self.method = method
        self.subnets = subnets
        self.local_steps = local_steps
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.random_state = random_state
        self.workers = workers
        self.fit_options = fit_options

    @_modes_of_training()
    def _train(self, x_NF: NDArray[Any], y: NDArray[Any], outputs: int, loss: str) -> nn.Module:
        """Return the trained module.

        Raises:
            JobError: the settings, the module and the data do not fit together.
        """
        if len(x_NF) < 2:
            raise ValueError(f"n_samples={len(x_NF)}: a network learns from two samples or more")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        module, data = self._module(x_NF.shape[1], outputs, seed), (x_NF.astype(np.float32), y)
        if loss == "cross_entropy":
            _check_outputs(module, data, outputs)
        training = {
            "method": self.method,
            "subnets": self.subnets,
            "local_steps": self.local_steps,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "seed": seed,
            "optimizer": from_torch.settings_of(self.optimizer or {"name": "adamw", "lr": 0.01}, module),
        }
        if self.workers:
            options = {**training, "loss": loss, "workers": self.workers, **(self.fit_options or {})}
            return fit(module, data, **options).module
        job = parse_job({"name": "alone", "model": {"factory": "estimator"}, "data": {}, "training": training})
        with one_thread(), torch.random.fork_rng(devices=[]):  # preparing draws numbers, too
            _, prepared = with_rounds(job, prepare(module, _Arrays(*data), None, loss, job.training))
            return finished_module(prepared, train_alone(prepared))

    def _module(self, features: int, outputs: int, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.module is None:
                return mlp([features, *self.hidden, outputs])
            return copied(self.module) if isinstance(self.module, nn.Module) else self.module(features, outputs)

    def _outputs(self, x: Any) -> NDArray[np.float64]:
        """Return the module's outputs `[N, C]`; the built-in network's in float64: a batch changes no sample."""
        check_is_fitted(self)
        x_NF = validate_data(self, x, reset=False)
        kind = torch.float64 if self.module is None else torch.float32
        module = copied(self.module_).to(kind)
        blocks = (x_NF[at : at + PREDICTED_AT_ONCE] for at in range(0, len(x_NF), PREDICTED_AT_ONCE))
        with torch.no_grad():
            parts = [prediction(call(module, torch.from_numpy(block.astype(np.float64)).to(kind))) for block in blocks]
        return torch.cat(parts).double().numpy()


def _check_outputs(module: nn.Module, data: tuple[NDArray[Any], NDArray[Any]], classes: int) -> None:
    """Check that a classifier's module has one output for each class, which its loss need not.

    Raises:
        JobError: it has another number.
    """
    two = _Arrays(*data).open().batch(np.arange(2))
    with seeded(0):  # a trial draws no number of the training
        outputs = prediction(outputs_of(module, two, "data.train"))
    if getattr(outputs, "shape", ())[1:] != (classes,):
        raise JobError(
            f"module: its outputs are {described(outputs)} for 2 samples of {classes} classes; they should be "
            f"[2, {classes}]: give it an output for each class"
        )


class IdletrainClassifier(ClassifierMixin, _Estimator):
    """Classify by a network that independent subnets train.

    Args:
        module: A module that takes `[N, F]` and returns `[N, C]`, or a function `(features, outputs)` that returns
            one; a network with BatchNorm and the hidden layers of `hidden` if None.
        hidden: Neurons in each hidden layer of that network.
        method: `ist` or `local-sgd`.
        subnets: Independent subnets in a round.
        local_steps: Steps of each between two exchanges.
        epochs: Passes over the data, by all subnets together.
        batch_size: Samples a step and subnet.
        optimizer: A name, or as in a job file, such as `{"name": "sgd", "lr": 0.1}`; AdamW with lr 0.01 if None.
        random_state: Seed, or generator of it, of every random number.
        workers: Worker processes to train on; 0 trains in this process, which is quicker for small data.
        fit_options: Further arguments of `idletrain.fit`, with workers.

    Attributes:
        classes_: The classes `[C]`, in the order of probabilities.
        module_: The trained module, in evaluation mode.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on samples `[N, F]` and their classes `[N]`.

        Raises:
            ValueError: the data are no numbers, or hold NaN.
            JobError: the settings, the module and the data do not fit together.
        """
        x_NF, labels_N = validate_data(self, X, y)
        check_classification_targets(labels_N)
        self.classes_, numbers_N = np.unique(labels_N, return_inverse=True)
        self.module_ = self._train(x_NF, numbers_N.astype(np.int64), len(self.classes_), "cross_entropy")
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each class, `[N, C]`."""
        return torch.from_numpy(self._outputs(X)).softmax(-1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most likely class of each sample, `[N]`."""
        best_N = self._outputs(X).argmax(axis=1)
        return np.asarray(self.classes_[best_N])


class IdletrainRegressor(RegressorMixin, _Estimator):
    """Predict numbers by a network that independent subnets train.

    Args:
        module: A module that takes `[N, F]` and returns `[N, C]`, or a function `(features, outputs)` that returns
            one; a network with BatchNorm and the hidden layers of `hidden` if None.
        hidden: Neurons in each hidden layer of that network.
        method: `ist` or `local-sgd`.
        subnets: Independent subnets in a round.
        local_steps: Steps of each between two exchanges.
        epochs: Passes over the data, by all subnets together.
        batch_size: Samples a step and subnet.
        optimizer: A name, or as in a job file, such as `{"name": "sgd", "lr": 0.1}`; AdamW with lr 0.01 if None.
        random_state: Seed, or generator of it, of every random number.
        workers: Worker processes to train on; 0 trains in this process, which is quicker for small data.
        fit_options: Further arguments of `idletrain.fit`, with workers.

    Attributes:
        mean_: The targets' mean `[C]`, which the network does not have to learn.
        scale_: Their standard deviation `[C]`.
        module_: The trained module, in evaluation mode; it predicts `(target - mean_) / scale_`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on samples `[N, F]` and their targets `[N]` or `[N, C]`.

        Raises:
            ValueError: the data are no numbers, or hold NaN.
            JobError: the settings, the module and the data do not fit together.
        """
        x_NF, targets = validate_data(self, X, y, multi_output=True, y_numeric=True)
        y_NC = np.asarray(targets, np.float64).reshape(len(x_NF), -1)
        self._is_flat = targets.ndim == 1
        self.mean_, deviation = y_NC.mean(axis=0), y_NC.std(axis=0)
        self.scale_ = np.where(deviation > 0, deviation, 1.0)
        scaled = ((y_NC - self.mean_) / self.scale_).astype(np.float32)
        self.module_ = self._train(x_NF, scaled, y_NC.shape[1], "mse")
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the targets, in the shape in which `fit` got them."""
        y_NC = self._outputs(X) * self.scale_ + self.mean_
        return np.asarray(y_NC[:, 0] if self._is_flat else y_NC)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
