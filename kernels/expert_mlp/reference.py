"""The specification of `expert_mlp`: plain torch, differentiable, one expert after another.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, D model, F hidden, Z = 2F with
a gate and F without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import RoutedExperts, ids_in_slots
from moe_runtime.kernels.operands import (
    ActivationSpec,
    GateLayout,
    PreactivationFunction,
    precise_dtype,
)


def expert_mlp_reference(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: RoutedExperts,
    activation: ActivationSpec | PreactivationFunction,
    post_expert: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``out[t] = sum over k of weights[t, k] * expert[ids[t, k]](x[t])``, in fp32 (fp64 for fp64).

    Nothing is rounded before the output. Ids of no expert, or of one without a slot, add nothing,
    and their gate weight gets no gradient.
    """
    num_tokens, top_k = ids_TK.shape
    ids_R = ids_in_slots(ids_TK, experts.slot_of_expert).flatten()
    x_RD = x_TD.repeat_interleave(top_k, dim=0)
    order_R = torch.argsort(
        torch.where((ids_R < 0) | (ids_R >= experts.num_experts), experts.num_experts, ids_R),
        stable=True,
    )
    counts = [int((ids_R == expert).sum()) for expert in range(experts.num_experts)]
    num_rows = sum(counts)
    y_RD = grouped_expert_mlp_reference(x_RD[order_R[:num_rows]], counts, experts, activation)
    if post_expert is not None:
        y_RD = post_expert(y_RD)
    precise = precise_dtype(x_TD)
    rows = order_R[:num_rows]
    weighted_RD = y_RD.to(precise) * weights_TK.flatten()[rows].to(precise)[:, None]
    out_RD = weighted_RD.new_zeros(num_tokens * top_k, x_TD.shape[1])
    out_RD = out_RD.index_copy(0, rows, weighted_RD)
    return out_RD.view(num_tokens, top_k, x_TD.shape[1]).sum(1).to(x_TD.dtype)


def grouped_expert_mlp_reference(
    x_RD: Tensor,
    counts: list[int],
    experts: RoutedExperts,
    activation: ActivationSpec | PreactivationFunction,
) -> Tensor:
    """The outputs ``[R, D]`` of rows sorted by expert, in fp32 (fp64 for fp64).

    Zero after the last expert's rows, and for an expert without a slot.
    """
    precise = precise_dtype(x_RD)
    x_RD = x_RD.to(precise)
    pieces: list[Tensor] = []
    first = 0
    for slot, count in zip(experts.slots(), counts, strict=True):
        if slot < 0:
            pieces.append(x_RD.new_zeros(count, experts.dim_model))
        elif count:
            one = experts.one(slot)
            rows_RD = x_RD[first : first + count]
            parts = zip(one.inputs, one.input_biases, strict=True)
            z_RZ = torch.cat([_product(rows_RD, matrix, bias) for matrix, bias in parts], dim=1)
            hidden_RF = apply_activation(z_RZ, one.layout, activation)
            pieces.append(_product(hidden_RF, one.down_DF, one.down_bias))
        first += count
    pieces.append(x_RD.new_zeros(len(x_RD) - first, experts.dim_model))
    return torch.cat(pieces)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.to(x.dtype).T
    return y if bias is None else y + bias.to(x.dtype)


def apply_activation(
    z_RZ: Tensor, layout: GateLayout, activation: ActivationSpec | PreactivationFunction
) -> Tensor:
    """Hidden values ``[R, F]`` of pre-activations ``[R, Z]``."""
    if not isinstance(activation, ActivationSpec):
        return activation(z_RZ)
    # by name: torch 2.11 cannot compile calls of objects that are made in the compiled code
    return activation.__call__(*layout.split(z_RZ))
