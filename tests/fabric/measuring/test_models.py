"""Networks have the sizes of their papers."""

from __future__ import annotations

import pytest
import torch

from idletrain.fabric.measuring import models

# Of torchvision's models of the same names (documentation of their weights); the MLP's and the transformer's by hand.
PARAMETERS = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mlp": 784 * 512 + 512 * 512 + 2 * 2 * 512 + 512 * 10 + 10,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_as_many_as_they_should_be(name: str, count: int) -> None:
    assert sum(p.numel() for p in models.on_meta(name).parameters()) == count


@pytest.mark.parametrize("name", ["mlp", "resnet50", "transformer"])
def test_a_batch_goes_through(name: str) -> None:
    module = models.materialized(models.on_meta(name), torch.device("cpu"))
    x, y = models.batch(name, 2, 32)
    outputs = module(x)
    assert outputs.shape[:-1] == y.shape
    assert torch.isfinite(outputs).all()
