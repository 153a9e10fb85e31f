"""Layouts: by hand, whole, and what the meta device keeps of a module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from idletrain.errors import JobError
from idletrain.nn.ist.groups import by_hand, reasons_text, to_meta, whole, without_statistics
from idletrain.nn.ist.partition import draw
from idletrain.nn.ist.subnets import cut, gather
from idletrain.nn.local_steps import assemble


class FusedAttention(nn.Module):
    """Attention whose query, key and value are one projection, heads beside each other in each of the three."""

    def __init__(self) -> None:
        super().__init__()
        self.head_width = 4
        self.qkv = nn.Linear(8, 3 * 12)
        self.out = nn.Linear(12, 8)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


TABLE = {"qkv.weight": ("heads*3", None), "qkv.bias": ("heads*3",), "out.weight": (None, "heads")}


def test_a_fused_projection_by_hand_is_cut_by_whole_heads_in_all_three_parts() -> None:
    module = FusedAttention()
    layout = by_hand(module, TABLE)
    assert [(g.name, g.size) for g in layout.groups] == [("heads", 12)]
    (rows, columns), _, (_, inputs), bias = (t.neurons for t in layout.tensors)
    assert columns is None
    assert rows is not None
    assert rows.tolist() == list(range(12)) * 3
    assert inputs is not None
    assert inputs.tolist() == list(range(12))
    assert bias == (None,)


def test_a_group_s_size_is_that_of_its_smallest_dimension_and_wider_ones_hold_blocks() -> None:
    """Two heads named by a tensor with an entry a head: each then owns six neighbours of the projections."""
    module = FusedAttention()
    module.scale = nn.Parameter(torch.ones(3))
    layout = by_hand(module, {**TABLE, "scale": ("heads",)})
    assert layout.sizes == (3,)
    rows = next(t for t in layout.tensors if t.name == "qkv.weight").neurons[0]
    assert rows is not None
    assert rows.tolist() == np.arange(3).repeat(4).tolist() * 3


def test_a_subnet_by_hand_computes_the_module_without_the_other_heads() -> None:
    """The whole attention is the sum of its heads' subnets (but for the shared output bias)."""
    module = FusedAttention()
    module.scale = nn.Parameter(torch.ones(3))
    layout = by_hand(module, {**TABLE, "scale": ("heads",)})
    x = torch.randn(2, 5, 8)
    parts = []
    for mask in draw(0, 0, layout.sizes, [1 / 3] * 3):
        subnet = cut(layout, mask)
        flat = torch.empty(subnet.parameters)
        gather([p.detach() for p in module.parameters()], subnet, flat)
        parts.append(assemble(to_meta(module), subnet, flat)(x) - module.out.bias)
    torch.testing.assert_close(sum(parts) + module.out.bias, module(x))


def test_faults_of_a_table_are_all_reported_and_name_what_is_known() -> None:
    with pytest.raises(JobError) as caught:
        by_hand(FusedAttention(), {"qkv.wieght": (None,), "out.bias": (None, None)})
    assert caught.value.faults == (
        "model.groups: qkv.wieght is not a parameter or buffer; known are qkv.weight, qkv.bias, out.weight, out.bias",
        "model.groups.out.bias: 2 entries, but the parameter has 1 dimensions",
    )


def test_a_dimension_that_does_not_hold_the_group_evenly_is_refused() -> None:
    with pytest.raises(JobError, match=r"model.groups.out.weight: dimension 1 of 12 does not hold 8 neurons of g"):
        by_hand(FusedAttention(), {"out.weight": ("g", "g")})


@pytest.mark.parametrize("entry", ["heads*0", "heads*x", "heads*-1"])
def test_an_entry_that_is_not_name_times_number_is_refused(entry: str) -> None:
    with pytest.raises(JobError, match=r"should be a group's name, or name\*3"):
        by_hand(FusedAttention(), {"qkv.bias": (entry,)})


def test_in_the_whole_layout_every_tensor_is_shared() -> None:
    layout = whole(FusedAttention())
    assert layout.groups == ()
    assert all(tensor.shared for tensor in layout.tensors)


def test_a_module_on_meta_has_no_memory_and_leaves_the_original_alone() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module[0].bias.requires_grad_(False)
    meta = to_meta(module)
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert [p.requires_grad for p in meta.parameters()] == [p.requires_grad for p in module.parameters()]
    assert {b.device.type for b in meta.buffers()} == {"cpu"}
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_tied_parameters_stay_tied_on_meta() -> None:
    module = nn.ModuleList([nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)])
    module[1].weight = module[0].weight
    meta = to_meta(module)
    assert meta[0].weight is meta[1].weight


def test_batch_norm_keeps_no_running_statistics_where_subnets_train() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    trained = without_statistics(module)
    assert list(trained.buffers()) == []
    assert trained.eval()(torch.randn(8, 3)).mean().abs() < 1e-6
    assert len(list(module.buffers())) == 3


def test_an_error_has_every_reason_once_behind_the_first_layers_of_it() -> None:
    reasons = [(f"layer{i}", "it is narrow") for i in range(10)]
    assert reasons_text(reasons[:1]) == "layer0: it is narrow"
    first = ", ".join(f"layer{i}" for i in range(8))
    assert reasons_text(reasons) == f"{first}, 2 more: it is narrow"
    assert reasons_text([*reasons[:2], ("head", "it is wide")]) == "layer0, layer1: it is narrow; head: it is wide"
    assert reasons_text([]) == ""
