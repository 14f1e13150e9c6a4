"""Single products of `kernels.py` beside what they could be.

MegaBlocks (Gale et al., 2022) holds its products to one batched product of equal groups, and its
layer to one that pads every expert to the rows of the busiest; Tutel (Hwang et al., 2023) holds its
combine to a copy of the same bytes. So are ours here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse import ExpertColumns, dsd, expert_topology, sdd
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.linear.gpu import linears_of_a_row
from moe_runtime.kernels.token_sort import token_sort

BYTES = 2  # of a bf16 number
# E, rows of an expert, D, F, and the exponent of the skewed loads.
SIZES, TINY_SIZES = (64, 512, 2048, 1024), (4, 16, 32, 16)
ZIPF = 1.0
PROJECTIONS, _LAYERS = "a token's queries, keys, values", 8


@torch.no_grad()
def measure_products(
    device: str,
    median_s: Callable[[Callable[[], Any]], float],
    graph_s: Callable[[Callable[[], Any]], float | None],
    *,
    tiny: bool,
) -> dict[str, dict[str, float]]:
    """Seconds of each product and of what it is held to; `ratio` is theirs over ours.

    Args:
        device: `cuda` or `cpu`.
        median_s: Times a call.
        graph_s: Times a call within a graph; None where there are none.
        tiny: Whether for a rehearsal.
    """
    E, rows, D, F = TINY_SIZES if tiny else SIZES
    num_rows = E * rows
    x = torch.randn(num_rows, D, device=device).bfloat16()
    weight = torch.randn(E, F, D, device=device).bfloat16() * D**-0.5
    offsets = torch.arange(0, num_rows + 1, rows, device=device)
    equal = x.view(E, rows, D)
    batched_s = median_s(lambda: torch.bmm(equal, weight.mT))
    found = {"grouped product": (median_s(lambda: grouped_gemm(x, weight, offsets)), batched_s)}

    columns = ExpertColumns.of([F] * E, block_columns=128 if not tiny else 16, device=device)
    topology = expert_topology(
        offsets, columns, num_rows=num_rows, block_rows=128 if not tiny else 16
    ).trimmed()
    flat = weight.flatten(0, 1)
    found["sampled dense-dense"] = (median_s(lambda: sdd(x, flat.T, topology)), batched_s)
    values = sdd(x, flat.T, topology)
    hidden = torch.bmm(equal, weight.mT)
    back_s = median_s(lambda: torch.bmm(hidden, weight))
    found["dense-sparse"] = (median_s(lambda: dsd(values, flat, topology)), back_s)

    counts = _zipf_counts(E, num_rows)
    skewed = torch.tensor([0, *counts], device=device).cumsum(0)
    padded = torch.zeros(E, max(counts), D, device=device, dtype=x.dtype)
    padded_s = median_s(lambda: torch.bmm(padded, weight.mT))
    found["skewed loads, beside padding"] = (
        median_s(lambda: grouped_gemm(x, weight, skewed)),
        padded_s,
    )
    found["combine, beside a copy"] = _combine_beside_copy(x, median_s)
    layers = [torch.randn(3, D, D, device=device).bfloat16() for _ in range(_LAYERS)]
    ours_s, theirs_s = (
        graph_s(call) or median_s(call)
        for call in (partial(_projections, x[:1], layers, one) for one in (_together, _each))
    )
    found[PROJECTIONS] = ours_s / _LAYERS, theirs_s / _LAYERS
    return {
        name: {"seconds": ours, "peer_seconds": theirs, "ratio": theirs / ours}
        for name, (ours, theirs) in found.items()
    }


def _projections(x_1D: Tensor, layers: list[Tensor], project: Callable[..., Any]) -> None:
    """Queries, keys and values of one token in layer after layer, whose weights are no cache's."""
    for weights_3DD in layers:
        project(x_1D, *weights_3DD)


def _together(x_1D: Tensor, *weights: Tensor) -> None:
    if not x_1D.is_cuda or linears_of_a_row(x_1D, *((one, None) for one in weights)) is None:
        _each(x_1D, *weights)


def _each(x_1D: Tensor, *weights: Tensor) -> None:
    for one in weights:
        torch.nn.functional.linear(x_1D, one)


def _zipf_counts(num_experts: int, num_rows: int) -> list[int]:
    """Rows of each expert, as Zipf's law has them; the first one gets what rounding left."""
    shares = [1 / rank**ZIPF for rank in range(1, num_experts + 1)]
    counts = [int(num_rows * share / sum(shares)) for share in shares]
    counts[0] += num_rows - sum(counts)
    return counts


def _combine_beside_copy(
    y_RD: Tensor, median_s: Callable[[Callable[[], Any]], float]
) -> tuple[float, float]:
    """Four rows to a token; the copy moves as many bytes, read and written together."""
    num_tokens, dim = len(y_RD) // 4, y_RD.shape[1]
    ids = torch.arange(4, device=y_RD.device).expand(num_tokens, 4).contiguous()
    order = token_sort(ids, 4)
    weights = torch.rand(num_tokens, 4, device=y_RD.device)
    num_copied = (y_RD.numel() + num_tokens * dim) // 2
    source = torch.zeros(num_copied, device=y_RD.device, dtype=y_RD.dtype)
    target = torch.empty_like(source)
    return median_s(lambda: combine(y_RD, weights, order)), median_s(lambda: target.copy_(source))
