"""List the rule that carries neurons through each of torch's operators; without one, they go element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from idletrain.nn.ist.couplings import Couplings, Families, Labelled
from idletrain.nn.ist.elementwise import added, gated, group_normalized, normalized
from idletrain.nn.ist.moves import concatenated, looked_up, put_beside, rearranged, turned, viewed
from idletrain.nn.ist.sums import convolved, product, reduced

aten = torch.ops.aten
# (couplings, operator, its inputs, its arguments, its outputs) -> the families of each output
Rule = Callable[[Couplings, Any, list[Labelled], tuple[Any, ...], Sequence[Tensor]], list[Families]]

_MOVES = (
    "permute transpose t unsqueeze squeeze slice select split split_with_sizes unsafe_split unsafe_split_with_sizes "
    "unbind chunk expand repeat flip roll "
    "index index_select gather narrow diagonal unfold alias detach constant_pad_nd repeat_interleave pixel_shuffle "
    "pixel_unshuffle channel_shuffle as_strided swapaxes movedim reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d"
)
_REDUCTIONS = (
    "sum mean var std var_mean std_mean amax amin prod logsumexp linalg_vector_norm norm any all argmax argmin max min"
)


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))


def _named(rule: Rule, names: str) -> dict[Any, Rule]:
    return {getattr(aten, name): rule for name in names.split() if hasattr(aten, name)}


RULES: Mapping[Any, Rule] = {
    **_named(viewed, "view _unsafe_view reshape _reshape_alias _reshape_copy"),
    **_named(rearranged, _MOVES),
    **_named(turned, "transpose_ t_ unsqueeze_ squeeze_ swapaxes_"),
    **_named(concatenated, "cat"),
    **_named(put_beside, "stack"),
    **_named(looked_up, "embedding"),
    **_named(reduced, _REDUCTIONS),
    **_named(product, "mm bmm addmm baddbmm mv addmv dot"),
    **_named(added, "add add_ sub sub_"),
    **_named(convolved, "convolution"),
    **_named(
        normalized, "native_batch_norm _native_batch_norm_legit cudnn_batch_norm _native_batch_norm_legit_no_training"
    ),
    **_named(group_normalized, "native_group_norm"),
    **_named(gated, "glu"),
}
SUMS = _packets("mm bmm addmm baddbmm mv addmv convolution")
NORMALIZATIONS = _packets(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm native_group_norm native_layer_norm _fused_rms_norm"
)
# What leaves a sum a sum: moves, and a bias.
PASSING = _packets("view _unsafe_view reshape permute transpose t unsqueeze squeeze alias detach clone add add_ expand")
