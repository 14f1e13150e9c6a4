"""The specification of `grouped_gemm`: one expert after another in plain torch, differentiable."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from moe_runtime.kernels.quantized import QuantizedStack


def grouped_gemm_by_expert(
    x: Tensor,
    weight_SNK: Tensor | QuantizedStack,
    offsets: list[int],
    slots: list[int],
    *,
    bias_SN: Tensor | None,
    reads_R: Tensor | None,
    writes_R: Tensor | None,
    out: Tensor | None,
    num_rows: int,
    precise: torch.dtype,
) -> Tensor:
    """`out[writes[r]] = x[reads[r]] @ weight[slot].T + bias[slot]`, computed in `precise`.

    Args:
        x: `[*, K]`.
        weight_SNK: `[S, N, K]`, any strides; or quantised, and then its values.
        offsets: E + 1 row numbers.
        slots: One an expert; below 0 where the expert takes no part.
        bias_SN: `[S, N]` or None.
        reads_R: Row of `x` that each sorted row reads; None for the same row.
        writes_R: Row of the result that each sorted row writes; None for the same row.
        out: Where to write, or None for a new tensor, zero where nothing is written.
        num_rows: Rows of a new tensor.
        precise: fp32 or fp64 in the specification; the dtype of `x` makes it a CPU implementation.
    """
    pieces: list[Tensor] = []
    destinations: list[Tensor] = []
    rows_R = torch.arange(num_rows, device=x.device)
    # Divided once: the gradient of each `tensor[expert]` would be as large as the whole tensor.
    matrix_of = _reader(weight_SNK)
    biases = None if bias_SN is None else bias_SN.unbind()
    sizes = [last - first for first, last in itertools.pairwise([0, *offsets, num_rows])]
    x_of_experts = (x if reads_R is None else x[reads_R]).split(sizes)[1:-1]
    for expert, slot in enumerate(slots):
        first, last = offsets[expert], offsets[expert + 1]
        if slot < 0 or first == last:
            continue
        rows = rows_R[first:last]
        product = x_of_experts[expert].to(precise) @ matrix_of(slot, precise).T
        if biases is not None:
            product = product + biases[slot].to(precise)
        pieces.append(product.to(x.dtype))
        destinations.append(rows if writes_R is None else writes_R[first:last])
    if out is None:
        # A product with no rows keeps the result connected to both operands.
        start = x[:0] @ matrix_of(0, x.dtype).T
        result = start.new_zeros(num_rows, weight_SNK.shape[1])
        values = torch.cat([start, *pieces])
        return result.index_copy(0, torch.cat([rows_R[:0], *destinations]), values)
    for piece, rows in zip(pieces, destinations, strict=True):
        out[rows] = piece
    return out


def _reader(weight: Tensor | QuantizedStack) -> Callable[[int, torch.dtype], Tensor]:
    """Gives the matrix of a slot in a type."""
    if isinstance(weight, QuantizedStack):
        return lambda slot, dtype: weight.matrix(slot).dequantize(dtype)
    matrices = weight.unbind()
    return lambda slot, dtype: matrices[slot].to(dtype)
