"""Experts one after another, in torch operations and `linear`: the specification of `expert_ffn`.

Shape suffixes: T tokens, D model in, F hidden, O model out, R routed rows.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from moe_runtime.kernels import linear as products
from moe_runtime.kernels.expert_mlp.expert_runs import (
    ActivationFn,
    ExpertActivation,
    ExpertImpl,
    ExpertRuns,
    LinearFn,
)
from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights, Matrix
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.linear.quantized import write_values
from moe_runtime.kernels.native import needs_torch
from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.operands.activation import ActivationName, ActivationSpec
from moe_runtime.kernels.quantized import QuantizedMatrix


def frozen_expert(
    x_RD: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
) -> Tensor:
    """One expert's outputs, with a gradient of `x` and of what the activation holds.

    Between the products, values have the dtype of `x`.

    Args:
        x_RD: `[R, D]`.
        weights: Of the expert, which has no gradient; they must stay as they are until the
            gradient is computed.
        activation: As in `expert_ffn`.

    Returns:
        `[R, O]` in the dtype of `x`.
    """
    return one_expert(x_RD, weights, activation_function(activation), products.frozen_linear)


def run_by_expert(
    x_TD: Tensor,
    runs: ExpertRuns,
    out_RO: Tensor,
    *,
    activation: ExpertActivation | str,
    impl: ExpertImpl,
) -> None:
    """One expert after another, in torch operations and `linear`.

    `reference` is the specification: in fp32 (fp64 for fp64), nothing is rounded before the output.
    """
    function = activation_function(activation)
    are_quantized = any(weights.shape.formats for weights in runs.experts)
    is_reused = are_quantized and impl == "auto" and not needs_torch(x_TD)
    values = ReusedValues() if is_reused else None

    def product(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        if isinstance(matrix, Tensor):
            return linear(x, matrix, bias, impl=impl)
        return products.quantized_linear(x, matrix, bias, impl=impl, values=values)

    dtype = precise_dtype(x_TD) if impl == "reference" else x_TD.dtype
    token_ids = torch.as_tensor(runs.token_ids_R, dtype=torch.int64, device=x_TD.device)
    destinations = torch.as_tensor(runs.destinations_R, dtype=torch.int64, device=x_TD.device)
    first = 0
    for weights, count in zip(runs.experts, runs.counts, strict=True):
        if count:
            rows = slice(first, first + count)
            x_RD = x_TD.index_select(0, token_ids[rows]).to(dtype)
            y_RO = one_expert(x_RD, weights, function, product)
            out_RO[destinations[rows]] = y_RO.to(out_RO.dtype)
        first += count


class ReusedValues:
    """`values_of` in one place: what a call gives is valid until the next one."""

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._memory: Tensor | None = None

    def __call__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
        """The values of one matrix."""
        num_rows, num_cols = matrix.shape
        size = num_rows * num_cols
        if self._memory is None or self._memory.dtype != dtype or self._memory.numel() < size:
            self._memory = matrix.codes.new_empty(size, dtype=dtype)
        return write_values(matrix, dtype, self._memory[:size].view(num_rows, num_cols))


def activation_function(activation: ExpertActivation | str) -> ActivationFn:
    """The function `(gate_RF | None, up_RF) -> hidden_RF` of an activation.

    With a gate it is `act(gate) * up`, without one `act(up)`.

    Raises:
        ValueError: The name is unknown.
    """
    if not isinstance(activation, str):
        return activation
    plain = ActivationSpec(cast(ActivationName, activation))
    return lambda gate, up: plain(None, up) if gate is None else plain(None, gate) * up


def one_expert(
    x_RD: Tensor, weights: ExpertWeights, activation: ActivationFn, linear: LinearFn
) -> Tensor:
    """An expert's outputs `[R, O]` in the dtype that `linear(x, weight, bias)` gives."""
    gate = None
    if weights.gate is not None:
        gate = linear(x_RD, weights.gate, weights.gate_bias)
    up = linear(x_RD, weights.up, weights.up_bias)
    return linear(activation(gate, up), weights.down, weights.down_bias)
