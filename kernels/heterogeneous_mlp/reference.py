"""The specification of `heterogeneous_mlp`: one expert after another in plain torch.

Shape suffixes: T tokens, K choices a token, E experts, D model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.heterogeneous_mlp.experts import PackedExperts


def heterogeneous_mlp_reference(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: PackedExperts,
    activation: ActivationSpec,
) -> Tensor:
    """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])` in fp32 (fp64 for fp64).

    Every expert computes every token; those that did not choose it weigh nothing.
    """
    precise = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    x = x_TD.to(precise)
    out_TD = torch.zeros_like(x)
    first = 0
    for expert, width in enumerate(experts.columns.widths):
        rows = slice(first, first + width)
        first += width
        gate = None if experts.gate is None else x @ experts.gate[rows].to(precise).T
        up = x @ experts.up[rows].to(precise).T
        y_TD = activation(gate, up) @ experts.down[rows].to(precise)
        weight_T = torch.where(ids_TK == expert, weights_TK.to(precise), 0).sum(1)
        out_TD = out_TD + weight_T[:, None] * y_TD
    return out_TD.to(x_TD.dtype)
