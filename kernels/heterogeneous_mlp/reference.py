"""The specification of `heterogeneous_mlp`: one expert after another in plain torch.

Shape suffixes: T tokens, K choices a token, E experts, D model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.to(precise), None if bias is None else bias.to(precise))

    x = x_TD.to(precise)
    out_TD = torch.zeros_like(x)
    for expert, part in enumerate(experts.parts()):
        gate = None if part.gate is None else product(x, part.gate, part.gate_bias)
        hidden = activation(gate, product(x, part.up, part.up_bias))
        y_TD = product(hidden, part.down.T, part.down_bias)
        weight_T = torch.where(ids_TK == expert, weights_TK.to(precise), 0).sum(1)
        out_TD = out_TD + weight_T[:, None] * y_TD
    return out_TD.to(x_TD.dtype)
