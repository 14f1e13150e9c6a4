"""The specification of `expert_ffn`: plain torch, differentiable, one expert after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from moe_runtime.kernels.expert_ffn.weights import ExpertWeights
from moe_runtime.kernels.linear.reference import linear_reference
from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.operands.activation import ActivationName, ActivationSpec

ActivationFn = Callable[[Tensor | None, Tensor], Tensor]
LinearFn = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def activation_function(name: str) -> ActivationFn:
    """The function `(gate_RF | None, up_RF) -> hidden_RF` of a named activation.

    With a gate it is `act(gate) * up`, without one `act(up)`.

    Raises:
        ValueError: The name is unknown.
    """
    plain = ActivationSpec(cast(ActivationName, name))
    return lambda gate, up: plain(None, up) if gate is None else plain(None, gate) * up


def expert_ffn_reference(
    x_TD: Tensor,
    experts: Sequence[ExpertWeights],
    counts: Sequence[int],
    token_ids_R: Tensor,
    activation: ActivationFn,
) -> Tensor:
    """The output rows `[R, O]` in the order of `token_ids_R`, computed in fp32 (fp64 for fp64).

    Nothing is rounded between the input and the output.
    """
    precise = precise_dtype(x_TD)
    pieces: list[Tensor] = []
    first = 0
    for weights, count in zip(experts, counts, strict=True):
        x_RD = x_TD[token_ids_R[first : first + count]].to(precise)
        pieces.append(one_expert(x_RD, weights, activation, linear_reference))
        first += count
    return torch.cat(pieces).to(x_TD.dtype)


def one_expert(
    x_RD: Tensor, weights: ExpertWeights, activation: ActivationFn, linear: LinearFn
) -> Tensor:
    """An expert's outputs `[R, O]` in the dtype that `linear(x, weight, bias)` gives."""
    gate = None
    if weights.gate is not None:
        gate = linear(x_RD, weights.gate, weights.gate_bias)
    up = linear(x_RD, weights.up, weights.up_bias)
    return linear(activation(gate, up), weights.down, weights.down_bias)
