"""Launchers of the forward kernels: the plain product, and the one with the activation in it.

Weights are logical `[S, N, K]`; a checkpoint's transposed matrices are a transposed view.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.kernel import grouped_gemm_fwd, grouped_gemm_persistent
from moe_runtime.kernels.grouped_gemm.packed import (
    Weights,
    codes_of,
    depth_of,
    distance,
    packed_arguments,
    stages_of,
)
from moe_runtime.kernels.grouped_gemm.tile import ProductKind, Tile, describe_device
from moe_runtime.kernels.operands import ActivationSpec, GateLayout
from moe_runtime.kernels.triton_support import cdiv, is_interpreted, launch

_ALIGNMENT = 16  # that TMA needs of addresses and row strides, in bytes


def takes_weight(weight_SNK: Tensor, block_k: int, *, is_gated: bool) -> bool:
    """Whether TMA reads these weights: rows of K, or of N if not gated."""
    in_rows = weight_SNK.stride(2) == 1
    rows = weight_SNK if in_rows else weight_SNK.transpose(1, 2)
    # past the end of K, rows of K read as zero; otherwise as whatever follows
    return _is_aligned(rows) and (
        in_rows
        if is_gated
        else rows.stride(0) % rows.stride(1) == 0 and (in_rows or rows.shape[1] % block_k == 0)
    )


def takes_rows(x: Tensor, *, gathers: bool) -> bool:
    return x.stride(1) == 1 if gathers else _is_aligned(x)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether TMA reads the rows of a 16-bit tensor."""
    *distances, step = tensor.stride()
    return (
        tensor.element_size() == 2
        and step == 1
        and tensor.data_ptr() % _ALIGNMENT == 0
        and all(distance and distance * 2 % _ALIGNMENT == 0 for distance in distances)
    )


def _persistent_product(
    x: Tensor,
    weight_SNK: Tensor,
    groups: Groups,
    tile: Tile,
    out: Tensor,
    spec: ActivationSpec | None,
    pre: Tensor | None,
    *,
    gathers: bool,
) -> None:
    """`plain_product`, or with `spec` `activated_product` of concatenated gate and up, on Hopper.

    Persistent programs load by TMA; for many rows, and weights that `takes_weight`.
    """
    dim_n = out.shape[1]
    dim_k = weight_SNK.shape[2]
    columns = tile.block_n // (2 if spec is not None else 1)
    in_rows = weight_SNK.stride(2) == 1
    rows, block = weight_SNK, [columns, tile.block_k]
    if not in_rows:
        rows, block = weight_SNK.transpose(1, 2), [tile.block_k, columns]
    to_slot, to_row, _ = rows.stride()
    rows_of_slot = to_slot // to_row
    shape, strides = [(len(rows) - 1) * rows_of_slot + rows.shape[1], rows.shape[2]], [to_row, 1]
    if spec is not None:
        shape, strides = [len(rows), 2, dim_n, dim_k], [to_slot, dim_n * to_row, to_row, 1]
        block = [1, 2, *block]
    weight = TensorDescriptor(rows, shape, strides, block)
    tiles = groups.tiles(tile.block_m)
    room = describe_device(x.device)
    at_once = max(1, room.shared_bytes // tile.shared_bytes(x.element_size()))
    most = len(tiles.expert) * cdiv(dim_n, columns)
    num_programs = min(most, room.num_multiprocessors * at_once)
    launch(
        grouped_gemm_persistent, (num_programs,),
        x=x if gathers else TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        weight=weight, out_ptr=out, pre_ptr=out if pre is None else pre,
        tile_expert_ptr=tiles.expert, tile_row_ptr=tiles.first_row, num_tiles_ptr=tiles.num_used,
        dim_n=dim_n, dim_k=dim_k,
        rows_of_slot=rows_of_slot, stride_xr=x.stride(0),
        stride_or=out.stride(0), stride_pr=0 if pre is None else pre.stride(0),
        EPILOGUE="none" if spec is None else "gated", ACTIVATION=spec,
        GATHER_DIVISOR=groups.num_choices if gathers else 0, STORES_PRE=pre is not None,
        IN_ROWS=in_rows, EVEN_K=dim_k % tile.block_k == 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        **tile.options(), **groups.arguments(),
    )  # fmt: skip


def precision_of(x: Tensor) -> str:
    """The precision of fp32 products, as torch is set for its own; no effect on 16-bit operands.

    Three TF32 products reach fp32's accuracy on tensor cores.
    """
    if x.dtype != torch.float32 or is_interpreted() or torch.version.hip:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def plain_product(
    x: Tensor,
    weight_SNK: Weights,
    groups: Groups,
    *,
    out: Tensor,
    bias_SN: Tensor | None = None,
    gathers: bool = False,
    scatters: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`out[r] = x[r] @ weight[slot].T + bias[slot]` for the rows of experts with a slot.

    Args:
        x: `[R, K]` sorted, or `[T, K]` if `gathers`: row r reads token `order[r] // K`. `[1, V]`,
            the hidden values of all rows, if experts differ in width.
        weight_SNK: Any strides, or packed; `[E, N, K]` with the columns of all experts of any
            width.
        out: `[R, N]`, unit stride along N; other rows stay as they are.
        scatters: Row r is written to row `order[r]`.
        tile: Overrides the rule.
    """
    _, dim_n, dim_k = weight_SNK.shape
    tile = tile or groups.choose_tile("plain", x, dim_n, dim_k, weight_SNK)
    return _run(
        x, weight_SNK, groups, tile, out, dim_n, bias_SN, None, None,
        gathers=gathers, scatters=scatters,
    )  # fmt: skip


def activated_product(
    x: Tensor,
    weight_SZK: Weights,
    groups: Groups,
    spec: ActivationSpec,
    layout: GateLayout,
    *,
    out: Tensor,
    pre: Tensor | None,
    bias_SZ: Tensor | None = None,
    up: tuple[Weights, Tensor | None] | None = None,
    gathers: bool = False,
    adds_pre: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`out[r] = activation(x[r] @ weight[slot].T + bias[slot])`, gate and up in one pass.

    Args:
        x: As in `plain_product`, like `gathers`.
        weight_SZK: Any strides; Z = 2F with a gate, F without. `[E, N, K]` of the gate (or of up
            without one) if experts differ in width, and for packed weights.
        layout: Of the pre-activations.
        out: `[R, F]`, unit stride along F; `[1, V]` if experts differ in width.
        pre: `[R, Z]` receives the pre-activations in the order of the weights' rows, or None; `[2,
            V]` or `[1, V]` if experts differ in width.
        up: Weights and bias of up, if they are separate from the gate's.
        adds_pre: The contents of `pre` are added to the pre-activations first.
        tile: Overrides the rule.
    """
    has_gate, dim_k = layout.has_gate, weight_SZK.shape[2]
    dim_f = groups.width_of(weight_SZK.shape[1] // (2 if has_gate and up is None else 1))
    dim_z = 2 * dim_f if has_gate else dim_f
    kind: ProductKind = "gated" if has_gate else "plain"
    tile = tile or groups.choose_tile(kind, x, dim_z, dim_k, weight_SZK)
    return _run(
        x, weight_SZK, groups, tile, out, dim_f, bias_SZ, spec, layout,
        gathers=gathers, pre=pre, adds_pre=adds_pre, up=up,
    )  # fmt: skip


def _run(
    x: Tensor,
    weight: Weights,
    groups: Groups,
    tile: Tile,
    out: Tensor,
    dim_n: int,
    bias: Tensor | None,
    spec: ActivationSpec | None,
    layout: GateLayout | None,
    *,
    gathers: bool,
    scatters: bool = False,
    pre: Tensor | None = None,
    adds_pre: bool = False,
    up: tuple[Weights, Tensor | None] | None = None,
) -> Tensor:
    if not groups.num_rows or not dim_n:
        return out
    is_plain, is_gated = layout is None, layout is not None and layout.has_gate
    is_interleaved = layout is not None and not layout.is_concatenated
    is_simple = bias is None and up is None and not scatters and not is_interleaved
    if (
        tile.is_persistent
        and is_simple
        and groups.columns is None
        and (is_plain or is_gated)
        and not adds_pre
        and isinstance(weight, Tensor)
        and takes_weight(weight, tile.block_k, is_gated=is_gated)
        and takes_rows(x, gathers=gathers)
    ):
        _persistent_product(x, weight, groups, tile, out, spec, pre, gathers=gathers)
        return out
    tiles = groups.tiles(tile.block_m)
    dim_k = groups.width_of(weight.shape[2]) if is_plain else weight.shape[2]
    columns = tile.block_n // 2 if is_gated else tile.block_n
    # distances from one hidden column's gate row to the next one's, and to its up row
    step, to_up = (2, 1) if is_gated and is_interleaved else (1, dim_n)
    packed = packed_arguments(weight, None if up is None else up[0], x)
    block_k, num_stages = tile.block_k, tile.num_stages
    if not isinstance(weight, Tensor):
        block_k = depth_of(weight.format, x.dtype, block_k, dim_k)
        num_stages = stages_of(weight, num_stages, tile.block_k, block_k)
        weight = weight.codes
    bias_or_weight = weight[:, :, 0] if bias is None else bias
    to_up_w, to_up_b = weight.stride(1) * to_up, bias_or_weight.stride(1) * to_up
    if up is not None:
        to_up_w = distance(weight, codes_of(up[0]))
        to_up_b = 0 if bias is None or up[1] is None else distance(bias, up[1])
    launch(
        grouped_gemm_fwd, (len(tiles.expert) * cdiv(dim_n, columns),),
        x_ptr=x, weight_ptr=weight, bias_ptr=bias_or_weight, out_ptr=out,
        pre_ptr=out if pre is None else pre,
        tile_expert_ptr=tiles.expert, tile_row_ptr=tiles.first_row,
        num_tiles_m=len(tiles.expert), dim_n=dim_n, dim_k=dim_k,
        stride_xr=x.stride(0), stride_xk=x.stride(1),
        stride_ws=weight.stride(0), stride_wn=weight.stride(1) * step,
        stride_wk=weight.stride(2), stride_w_up=to_up_w,
        stride_bs=bias_or_weight.stride(0), stride_bn=bias_or_weight.stride(1) * step,
        stride_b_up=to_up_b, stride_or=out.stride(0), stride_pr=0 if pre is None else pre.stride(0),
        stride_p_up=dim_n if up is None or pre is None else pre.stride(0),
        EPILOGUE="none" if is_plain else "gated" if is_gated else "plain", ACTIVATION=spec,
        ADDS_PRE=adds_pre, STORES_PRE=pre is not None, IS_INTERLEAVED=is_interleaved,
        # reads the weights in order if neighbours in memory are hidden columns
        IN_HALVES=is_gated and not is_interleaved and weight.stride(1) == 1 != weight.stride(2),
        GATHER_DIVISOR=groups.num_choices if gathers else 0, SCATTERS=scatters,
        HAS_BIAS=bias is not None,
        EVEN_N=groups.are_even(dim_n, columns, is_width=not is_plain),
        EVEN_K=groups.are_even(dim_k, block_k, is_width=is_plain), PRECISION=precision_of(x),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k, GROUP_M=tile.group_m,
        NUM_SLICES=2 if tile.block_n >= 256 else 1,
        **tile.options(num_stages=num_stages),
        **groups.arguments(), **groups.width_arguments(), **packed,
    )  # fmt: skip
    return out
