"""LoRA adapters of experts in inference, without merging.

Their products are in fp32, or in fp64 for fp64 rows.

Shape suffixes: I inputs, O outputs, L rank, N rows, F hidden, P pre-activations: gate, then up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moe_runtime.kernels.decode_step.prepared import KernelActivation, call_kernel
from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights
from moe_runtime.kernels.linear import ROWS_PER_CALL
from moe_runtime.kernels.native import NativeLibrary, native_library, needs_torch
from moe_runtime.kernels.operands import precise_dtype

_NO_ACTIVATION = KernelActivation(-1, None)


class LowRankFactors:
    """`scale * (x @ first.T) @ second.T`: an adapter of one matrix of one expert.

    Both factors have one dtype: fp32, bf16 or fp16.
    """

    def __init__(self, first_LI: Tensor, second_OL: Tensor, scale: float) -> None:
        self.weights = ExpertWeights(None, first_LI, second_OL)  # an expert without activation
        self.scale = scale

    def product(self, x_NI: Tensor) -> Tensor:
        """`[N, O]` in the dtype of `x`, differentiable."""
        first_LI, second_OL = cast(Tensor, self.weights.up), cast(Tensor, self.weights.down)
        return (x_NI @ first_LI.to(x_NI.dtype).T) @ second_OL.to(x_NI.dtype).T * self.scale


class LowRankExpert(NamedTuple):
    """Adapters of one expert's matrices."""

    gate: LowRankFactors | None
    up: LowRankFactors | None
    down: LowRankFactors | None


AdaptersOfRows = Sequence[LowRankExpert | None]


def added_before(
    x_NI: Tensor, adapters_N: AdaptersOfRows, dim_hidden: int, *, has_gate: bool
) -> Tensor | None:
    """The adapters' part `[N, P]` of pre-activations, zero for rows without one; None if none
    has any.
    """
    gate_N, up_N = ([one and one[place] for one in adapters_N] for place in range(2))
    if not any((*gate_N, *up_N)):
        return None
    wide_NI = x_NI.to(precise_dtype(x_NI))
    parts = [_products(wide_NI, own_N, dim_hidden) for own_N in ([gate_N] * has_gate + [up_N])]
    return torch.cat(parts, 1)


def added_after(hidden_NF: Tensor, adapters_N: AdaptersOfRows, dim_out: int) -> Tensor:
    """The adapters' part `[N, O]` of outputs, zero for rows without one."""
    down_N = [one and one.down for one in adapters_N]
    return _products(hidden_NF.to(precise_dtype(hidden_NF)), down_N, dim_out)


def changes_outputs(adapters_N: AdaptersOfRows) -> bool:
    return any(one is not None and one.down is not None for one in adapters_N)


def _products(x_NI: Tensor, factors_N: Sequence[LowRankFactors | None], dim_out: int) -> Tensor:
    library = native_library()
    is_native = (
        library is not None and x_NI.is_cpu and x_NI.dtype == torch.float32
        and not needs_torch(x_NI) and x_NI.is_contiguous() and x_NI.shape[1] > 0
    )  # fmt: skip
    parts: list[Tensor] = []
    first = 0
    for kind, runs in groupby(_runs(factors_N), _kind_of):
        if kind is None or not is_native:
            for factors, count in runs:
                rows = x_NI[first : first + count]
                first += count
                parts.append(
                    x_NI.new_zeros(count, dim_out) if factors is None else factors.product(rows)
                )
            continue
        assert library is not None
        alike = cast("list[tuple[LowRankFactors, int]]", [*runs])
        num_rows = sum(count for _, count in alike)
        parts.append(_native(library, x_NI[first : first + num_rows], alike))
        first += num_rows
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(
    factors_N: Sequence[LowRankFactors | None],
) -> Iterator[tuple[LowRankFactors | None, int]]:
    """Neighbouring rows of the same adapter, in pieces that one call of the kernel takes."""
    for factors, rows in groupby(factors_N):
        count = len([*rows])
        for start in range(0, count, ROWS_PER_CALL):
            yield factors, min(ROWS_PER_CALL, count - start)


def _kind_of(run: tuple[LowRankFactors | None, int]) -> object:
    """The properties that runs of one kernel call share; None if the kernel cannot take the run."""
    factors = run[0]
    if factors is None or factors.weights.c_struct is None:
        return None
    return factors.weights.shape, factors.scale


def _native(
    library: NativeLibrary, x_NI: Tensor, runs: Sequence[tuple[LowRankFactors, int]]
) -> Tensor:
    shape, scale = runs[0][0].weights.shape, runs[0][0].scale
    out_NO = x_NI.new_empty(len(x_NI), shape.dim_out)
    first = 0
    while runs:
        size = num_rows = 0
        while size < len(runs) and num_rows + runs[size][1] <= ROWS_PER_CALL:
            num_rows += runs[size][1]
            size += 1
        some, runs = runs[:size], runs[size:]
        rows = range(first, first + num_rows)
        call_kernel(
            library, x_NI, b"".join([factors.weights.c_struct or b"" for factors, _ in some]),
            [count for _, count in some], rows, rows, out_NO,
            shape=shape, activation=_NO_ACTIVATION,
        )  # fmt: skip
        first += num_rows
    return out_NO.mul_(scale)
