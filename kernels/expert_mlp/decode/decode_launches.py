"""What the launches of a decode step need beside tensors, found once for each layer's shapes.

Such a step is as long as its launches take the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_runtime.kernels.expert_mlp.decode.decode_kernel import (
    decode_combine,
    decode_down,
    decode_up,
)
from moe_runtime.kernels.grouped_gemm.packed import depth_of
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, Tile
from moe_runtime.kernels.quantized import WeightFormat
from moe_runtime.kernels.triton_support import (
    PreparedLaunch,
    cdiv,
    is_interpreted,
    power_of_2,
)

if TYPE_CHECKING:
    from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout

# A tile holds every token; the smallest a matrix instruction takes.
MAX_TOKENS = 16
# Programs that each multiprocessor should have.
_PROGRAMS_EACH = 2
_MAX_PARTS = 8
_BLOCK_N = 32
_NUM_WARPS = 4
# Bytes of a row of the weights a step, or half of them of each of two; and most steps under way.
_ROW_BYTES = _CODED_ROW_BYTES = 512
_NUM_STAGES = 4
# Columns of the output that one program sums up.
_BLOCK_D = 64
# Summed elements a step with packed weights at most: decoded codes take registers.
_DEPTH = 128
# Layers times numbers of tokens.
MOST_PREPARED = 2048

Numbers = tuple[tuple[str, Any], ...]
Strides = tuple[int, ...]


class DecodeRows(NamedTuple):
    """Numbers of tokens, of experts and of choices, and whether experts have slots."""

    num_tokens: int
    num_experts: int
    num_choices: int
    has_slots: bool

    @property
    def num_slots(self) -> int:
        """Rows that are computed."""
        return self.num_tokens * self.num_choices

    def arguments(self) -> dict[str, Any]:
        """What every kernel is told."""
        return {
            "num_experts": self.num_experts,
            "NUM_CHOICES": self.num_choices,
            "HAS_SLOTS": self.has_slots,
            "BLOCK_C": power_of_2(self.num_choices),
        }


@lru_cache(maxsize=MOST_PREPARED)
def prepare_up(
    rows: DecodeRows,
    device: GpuLimits,
    precision: str,
    dtype: torch.dtype,
    stride_x: Strides,
    dims: tuple[int, int],
    stride_w: Strides,
    distances: tuple[int, int] | None,
    stride_b: Strides,
    *,
    has_bias: bool,
    spec: ActivationSpec,
    layout: GateLayout,
    packed: Numbers,
) -> PreparedLaunch:
    """The first product with the activation.

    Args:
        rows: Who chose whom.
        device: What it must fit in.
        precision: Of products.
        dtype: Of the rows.
        stride_x: Of `x`.
        dims: F and D.
        stride_w: Of the weights, or of their codes.
        distances: From the gate to up, in weights and biases, where both are tensors of their own.
        stride_b: Of the biases.
        has_bias: Whether there are any.
        spec: The activation.
        layout: Of the pre-activations.
        packed: How the weights are written.
    """
    dim_f, dim_d = dims
    step, to_up = rows_of_gate_and_up(layout, dim_f)
    to_up_w, to_up_b = distances or (stride_w[1] * to_up, stride_b[1] * to_up)
    numbers = dict(packed)
    block_k, num_stages = _depth(numbers["FORMAT"], dtype, dim_d, device, has_gate=layout.has_gate)
    return PreparedLaunch(
        decode_up, (rows.num_slots, cdiv(dim_f, _BLOCK_N)),
        num_tokens=rows.num_tokens, dim_n=dim_f, dim_k=dim_d,
        stride_xt=stride_x[0], stride_xk=stride_x[1],
        stride_ws=stride_w[0], stride_wn=stride_w[1] * step, stride_wk=stride_w[2],
        stride_w_up=to_up_w, stride_bs=stride_b[0], stride_bn=stride_b[1] * step,
        stride_b_up=to_up_b, stride_hr=dim_f,
        IS_GATED=layout.has_gate, HAS_BIAS=has_bias, ACTIVATION=spec, PRECISION=precision,
        BLOCK_T=MAX_TOKENS, BLOCK_N=_BLOCK_N, BLOCK_K=block_k,
        EVEN_N=dim_f % _BLOCK_N == 0, EVEN_K=dim_d % block_k == 0,
        num_warps=_NUM_WARPS, num_stages=num_stages,
        **chain(device), **rows.arguments(), **numbers,
    )  # fmt: skip


@lru_cache(maxsize=MOST_PREPARED)
def prepare_down(
    rows: DecodeRows,
    device: GpuLimits,
    precision: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    stride_w: Strides,
    stride_b: Strides,
    *,
    has_bias: bool,
    packed: Numbers,
    given_parts: int | None = None,
) -> tuple[PreparedLaunch, int]:
    """The second product, and in how many parts it is summed: as many as are given, where other
    experts' sums are there. Other arguments as in `prepare_up`."""
    dim_f, dim_d = dims
    numbers = dict(packed)
    block_k, num_stages = _depth(numbers["FORMAT"], dtype, dim_f, device, has_gate=False)
    programs = min(rows.num_slots, rows.num_experts) * cdiv(dim_d, _BLOCK_N)
    num_parts, split_k = _parts(programs, dim_f, block_k, device, given_parts)
    prepared = PreparedLaunch(
        decode_down, (rows.num_slots, cdiv(dim_d, _BLOCK_N), num_parts),
        num_tokens=rows.num_tokens, dim_n=dim_d, dim_k=dim_f, split_k=split_k,
        stride_hr=dim_f, stride_ws=stride_w[0], stride_wn=stride_w[1], stride_wk=stride_w[2],
        stride_bs=stride_b[0], stride_bn=stride_b[1],
        stride_ps=rows.num_slots * dim_d, stride_pr=dim_d,
        HAS_BIAS=has_bias, PRECISION=precision,
        BLOCK_T=MAX_TOKENS, BLOCK_N=_BLOCK_N, BLOCK_K=block_k,
        EVEN_N=dim_d % _BLOCK_N == 0, EVEN_K=dim_f % block_k == 0,
        num_warps=_NUM_WARPS, num_stages=num_stages,
        **chain(device), **rows.arguments(), **numbers,
    )  # fmt: skip
    return prepared, num_parts


@lru_cache(maxsize=MOST_PREPARED)
def prepare_sums(
    rows: DecodeRows, device: GpuLimits, num_parts: int, dim_d: int, stride_weights: Strides
) -> PreparedLaunch:
    """The sums of the parts and of the choices."""
    return PreparedLaunch(
        decode_combine, (rows.num_tokens, cdiv(dim_d, _BLOCK_D)),
        num_parts=num_parts, IS_ONE_PART=num_parts == 1, dim=dim_d,
        stride_ps=rows.num_slots * dim_d, stride_pr=dim_d,
        stride_wt=stride_weights[0], stride_wk=stride_weights[1], stride_ot=dim_d,
        BLOCK_D=_BLOCK_D, **chain(device), **rows.arguments(),
    )  # fmt: skip


def rows_of_gate_and_up(layout: GateLayout, dim_f: int) -> tuple[int, int]:
    """`(rows from one hidden column to the next, rows from a gate to its up)`."""
    if not layout.has_gate:
        return 1, 0
    return (1, dim_f) if layout.is_concatenated else (2, 1)


def chain(device: GpuLimits) -> dict[str, bool]:
    """As `dependent_launch`; every kernel of a step is launched so."""
    is_chained = device.has_wide_accumulators and not is_interpreted()
    return {"IS_CHAINED": is_chained} | ({"launch_pdl": True} if is_chained else {})


def _depth(
    kind: WeightFormat | None,
    dtype: torch.dtype,
    dim_k: int,
    device: GpuLimits,
    *,
    has_gate: bool,
) -> tuple[int, int]:
    """`(summed elements a step, steps under way)`: as many as the shared memory holds."""
    most = (_ROW_BYTES if kind is None else _CODED_ROW_BYTES) // dtype.itemsize
    tile = Tile(MAX_TOKENS, _BLOCK_N, most, _NUM_WARPS, _NUM_STAGES)
    tile = tile.fitted(dtype.itemsize, device)
    block_k = most // 2 if has_gate else most
    if kind is None:
        return block_k, tile.num_stages
    depth = depth_of(kind, dtype, min(block_k, _DEPTH), dim_k)
    return depth, tile.num_stages * (1 if depth >= _DEPTH else 2)


def _parts(
    programs: int, dim_k: int, block_k: int, device: GpuLimits, given: int | None
) -> tuple[int, int]:
    """`(parts, summed columns of each)` so that the GPU has enough programs at once."""
    wanted = given or cdiv(device.num_multiprocessors * _PROGRAMS_EACH, programs)
    num_steps = max(1, cdiv(dim_k, block_k))
    steps_each = cdiv(num_steps, min(wanted, num_steps, _MAX_PARTS))
    return given or cdiv(num_steps, steps_each), steps_each * block_k
