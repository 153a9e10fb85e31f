"""Modules with computed weights can be copied, pickled and taken apart."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from idletrain.nn import travel
from idletrain.nn.ist.modules import call_with, computed_weights, copied, set_buffer, tensor_of

MAKERS: list[Callable[[nn.Module], nn.Module]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
]
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: f"{make.__module__}.{make.__name__}")
def test_a_copy_of_a_computed_weight_survives_a_copy_and_a_pickle_and_still_computes(make: object) -> None:
    module = nn.Sequential(make(nn.Linear(4, 4)), nn.ReLU()).eval()  # type: ignore[operator]
    expected, kind = module(X), type(module[0])
    for copy in (copied(copied(module)), pickle.loads(travel.dumps(copied(module)))):
        torch.testing.assert_close(copy(X), expected)
        assert [name for name, _ in copy.named_parameters()] == [name for name, _ in module.named_parameters()]
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.copy_(torch.rand_like(parameter))
        assert not torch.equal(copy(X), expected)
    assert torch.equal(module(X), expected)
    assert type(module[0]) is kind


def test_a_recurrent_layer_with_weight_norm_survives_a_pickle() -> None:
    module = parametrizations.weight_norm(nn.LSTM(4, 4, batch_first=True), "weight_hh_l0")
    copy = pickle.loads(travel.dumps(copied(module)))
    torch.testing.assert_close(copy(X[None])[0], module(X[None])[0])


def test_a_lazy_module_is_copied_with_its_uninitialized_buffers() -> None:
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    copied(module)(X)
    assert isinstance(module[0].weight, nn.UninitializedParameter)


def test_what_a_weight_is_computed_from_is_named() -> None:
    module = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.orthogonal(nn.Linear(4, 4)))
    normed, orthogonal = computed_weights(module)
    assert (normed.name, normed.has_fixed_length) == ("0.weight", True)
    assert normed.sources == ("0.parametrizations.weight.original0", "0.parametrizations.weight.original1")
    assert (orthogonal.kinds, orthogonal.has_fixed_length) == (("_Orthogonal",), False)


def test_a_buffer_is_replaced_wherever_the_module_has_it_in_its_own_format() -> None:
    module, shared = nn.Sequential(nn.Identity(), nn.Identity()), torch.tensor([1, 2])
    for layer in module:
        layer.register_buffer("count", shared)
    set_buffer(module, "0.count", torch.tensor([2.6, 3.4]))
    assert tensor_of(module, "1.count").tolist() == [3, 3]
    assert tensor_of(module, "1.count") is tensor_of(module, "0.count")


def test_a_module_is_called_with_other_values_wherever_it_has_a_parameter_and_has_its_own_again() -> None:
    layer = nn.Linear(4, 4, bias=False)
    module = nn.Sequential(layer, layer, nn.Linear(4, 4, bias=False))
    module[2].weight = layer.weight
    assert torch.equal(call_with(module, {"0.weight": 2 * torch.eye(4)}, (X,)), 8 * X)
    assert all(module[index].weight is layer.weight for index in range(3))
    assert isinstance(layer.weight, nn.Parameter)
