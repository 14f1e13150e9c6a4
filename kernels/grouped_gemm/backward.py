"""Launchers of the backward kernels, and autograd around `grouped_gemm`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.grouped_gemm.backward_kernel import (
    gate_weight_grad,
    grouped_bias_grad,
    grouped_gemm_down_act,
    grouped_gemm_dw,
)
from moe_runtime.kernels.grouped_gemm.forward import plain_product, precision_of
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.packed import Weights, takes_format
from moe_runtime.kernels.grouped_gemm.tile import Tile
from moe_runtime.kernels.operands import ActivationSpec, GateLayout
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.kernels.quantized import QuantizedStack
from moe_runtime.kernels.triton_support import cdiv, check_triton_dtype, launch, power_of_2

_GATE_ROWS = 32  # per program of `gate_weight_grad`


class ActivationGrads(NamedTuple):
    """`[R, Z]` gradients of pre-activations, `[R, F]` hidden values times the gate weight, and
    `[T*K]` fp32 gradients of the gate weights in slot order; None if not needed.
    """

    dpre: Tensor
    hidden: Tensor | None
    gate_weight_grad: Tensor | None


def activation_backward(
    dout_TD: Tensor,
    down_SDF: Tensor,
    pre_RZ: Tensor,
    scale_R: Tensor | None,
    groups: Groups,
    spec: ActivationSpec,
    layout: GateLayout,
    *,
    down_bias_SD: Tensor | None = None,
    needs_hidden: bool = True,
    needs_gate_weight_grad: bool = True,
    dpre: Tensor | None = None,
    more_RF: Tensor | None = None,
    tile: Tile | None = None,
) -> ActivationGrads:
    """From the gradient of the layer's output to that of the pre-activations, in one product.

    Hidden values are computed again from the pre-activations, so the forward pass keeps neither
    them nor the experts' outputs: the gradient of a gate weight is `<dout @ down, hidden>`.

    Args:
        down_SDF: Any strides; `[E, D, N]` if experts differ in width.
        pre_RZ: Unit stride along Z; `[2, V]` or `[1, V]` if experts differ in width.
        scale_R: Gate weight of each slot, in slot order, contiguous; None for unweighted rows,
            whose gradients are sorted in `dout_TD`.
        down_bias_SD: Needed for the gate weights' gradient only.
        needs_hidden: Whether the gradient of `down` is wanted.
        dpre: Memory for the result; rows of other experts stay.
        more_RF: Added to the gradient of the hidden values before the gate weight is multiplied;
            receives `hidden`.
        tile: Overrides the rule.
    """
    dim_f, dim_d = groups.width_of(down_SDF.shape[2]), down_SDF.shape[1]
    num_rows = groups.num_rows
    tile = tile or groups.choose_tile("down_act_backward", dout_TD, dim_f, dim_d)
    num_tiles_n = cdiv(dim_f, tile.block_n)
    dpre = torch.empty_like(pre_RZ) if dpre is None else dpre
    is_ragged = groups.columns is not None
    hidden = more_RF
    if needs_hidden and hidden is None:
        hidden = pre_RZ.new_empty((1, pre_RZ.shape[1]) if is_ragged else (num_rows, dim_f))
    partial = None
    if needs_gate_weight_grad:
        partial = pre_RZ.new_empty(num_tiles_n, num_rows, dtype=torch.float32)
    if num_rows and dim_f:
        tiles = groups.tiles(tile.block_m)
        launch(
            grouped_gemm_down_act, (len(tiles.expert) * num_tiles_n,),
            dout_ptr=dout_TD, weight_ptr=down_SDF, pre_ptr=pre_RZ,
            scale_ptr=dout_TD if scale_R is None else scale_R, tile_expert_ptr=tiles.expert,
            tile_row_ptr=tiles.first_row, dpre_ptr=dpre,
            hidden_ptr=dpre if hidden is None else hidden,
            partial_ptr=dpre if partial is None else partial,
            num_tiles_m=len(tiles.expert), num_rows=num_rows, dim_n=dim_f, dim_k=dim_d,
            stride_gr=dout_TD.stride(0), stride_gk=dout_TD.stride(1),
            stride_ws=down_SDF.stride(0), stride_wn=down_SDF.stride(2),
            stride_wk=down_SDF.stride(1), stride_zr=pre_RZ.stride(0), stride_dzr=dpre.stride(0),
            stride_hr=0 if hidden is None else hidden.stride(0),
            stride_z_up=pre_RZ.stride(0) if is_ragged else dim_f,
            IS_GATED=layout.has_gate, IS_INTERLEAVED=not layout.is_concatenated,
            GATHER_DIVISOR=0 if scale_R is None else groups.num_choices,
            HAS_SCALE=scale_R is not None, ADDS_HIDDEN=more_RF is not None,
            STORES_HIDDEN=hidden is not None,
            STORES_PARTIAL=partial is not None,
            EVEN_N=groups.are_even(dim_f, tile.block_n, is_width=True),
            EVEN_K=dim_d % tile.block_k == 0, PRECISION=precision_of(dout_TD), BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
            NUM_SLICES=max(1, tile.block_n // 32),
            IS_AHEAD=tile.block_m * tile.block_n >= 128 * 128 and not tile.max_registers,
            **tile.options(),
            ACTIVATION=spec,
            **groups.arguments(), **groups.width_arguments(),
        )  # fmt: skip
    grad_R = None
    if partial is not None:
        grad_R = _sum_gate_weight_grad(partial, dout_TD, down_bias_SD, groups)
    return ActivationGrads(dpre, hidden, grad_R)


def _sum_gate_weight_grad(
    partial: Tensor, dout_TD: Tensor, down_bias_SD: Tensor | None, groups: Groups
) -> Tensor:
    grad_R = torch.empty(groups.num_rows, dtype=torch.float32, device=partial.device)
    if groups.num_rows:
        bias = dout_TD if down_bias_SD is None else down_bias_SD
        launch(
            gate_weight_grad, (cdiv(groups.num_rows, _GATE_ROWS),),
            partial_ptr=partial, dout_ptr=dout_TD, bias_ptr=bias, gate_weight_grad_ptr=grad_R,
            num_partials=len(partial), num_rows=groups.num_rows, num_experts=groups.num_experts,
            dim=dout_TD.shape[1],
            stride_gr=dout_TD.stride(0), stride_gk=dout_TD.stride(1),
            stride_bs=bias.stride(0), stride_bn=bias.stride(1),
            GATHER_DIVISOR=groups.num_choices,
            **groups.arguments(),
            HAS_BIAS=down_bias_SD is not None, BLOCK_E=power_of_2(groups.num_experts),
            BLOCK_R=_GATE_ROWS, BLOCK_D=64,
        )  # fmt: skip
    return grad_R


def weight_grad(
    left: Tensor,
    right: Tensor,
    groups: Groups,
    *,
    out_SNK: Tensor,
    left_divisor: int = 0,
    right_divisor: int = 0,
    accumulates: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`out[slot] = left.T @ right` over each expert's rows; zeros for experts without rows.

    Args:
        left: `[*, N]`: the gradient of the product; `[1, V]` hidden values if experts differ in
            width, with `out` `[E, N, K]` of the columns of all.
        right: `[*, K]`: the product's input.
        out_SNK: Any strides. Slots without an expert stay as they are.
        left_divisor: 0 if `left` is sorted, else row r reads `order[r] // divisor`.
        right_divisor: The same for `right`.
        accumulates: Adds to `out`.
        tile: Overrides the rule.
    """
    dim_n, dim_k = groups.width_of(out_SNK.shape[1]), out_SNK.shape[2]
    tile = tile or groups.choose_tile("dw", left, dim_k, dim_n)
    if not dim_n or not dim_k:
        return out_SNK
    num_stages = tile.num_stages
    if (left_divisor or right_divisor) and left.element_size() == 2:
        # loads of rows wait for loads of their indices, which need as many stages
        num_stages = 2 * num_stages - 1
    tiles_n, tiles_k = cdiv(dim_n, tile.block_m), cdiv(dim_k, tile.block_n)
    launch(
        grouped_gemm_dw, (tiles_n * tiles_k, groups.num_experts),
        left_ptr=left, right_ptr=right, dw_ptr=out_SNK,
        dim_n=dim_n, dim_k=dim_k,
        stride_lr=left.stride(0), stride_ln=left.stride(1),
        stride_rr=right.stride(0), stride_rk=right.stride(1),
        stride_ws=out_SNK.stride(0), stride_wn=out_SNK.stride(1), stride_wk=out_SNK.stride(2),
        LEFT_DIVISOR=left_divisor, RIGHT_DIVISOR=right_divisor,
        **groups.arguments(), **groups.width_arguments(),
        ACCUMULATES=accumulates, EVEN_N=groups.are_even(dim_n, tile.block_m, is_width=True),
        EVEN_K=dim_k % tile.block_n == 0, PRECISION=precision_of(left), BLOCK_N=tile.block_m,
        BLOCK_K=tile.block_n, BLOCK_R=tile.block_k, GROUP_M=tile.group_m,
        **tile.options(num_stages=num_stages),
    )  # fmt: skip
    return out_SNK


def bias_grad(
    x: Tensor,
    groups: Groups,
    *,
    out_SN: Tensor,
    divisor: int = 0,
    scale_R: Tensor | None = None,
    accumulates: bool = False,
) -> Tensor:
    """`out[slot] = sum of scale * x` over each expert's rows, written or with `accumulates` added.

    `out_SN` has unit stride along N. `divisor` is as in `weight_grad`, and not 0 with a scale, one
    factor per slot in slot order.
    """
    dim = groups.width_of(out_SN.shape[1])
    if not dim:
        return out_SN
    block_n = 64
    launch(
        grouped_bias_grad, (cdiv(dim, block_n), groups.num_experts),
        x_ptr=x, scale_ptr=x if scale_R is None else scale_R, sum_ptr=out_SN,
        dim=dim,
        stride_xr=x.stride(0), stride_xn=x.stride(1), stride_ss=out_SN.stride(0),
        GATHER_DIVISOR=divisor,
        **groups.arguments(), **groups.width_arguments(),
        HAS_SCALE=scale_R is not None, ACCUMULATES=accumulates, BLOCK_R=32, BLOCK_N=block_n,
    )  # fmt: skip
    return out_SN


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_SNK: Tensor,
        bias_SN: Tensor | None,
        groups: Groups,
        inverse_R: Tensor | None,
        moves: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(x, weight_SNK, bias_SN, inverse_R)
        ctx.groups, ctx.moves = groups, moves
        out = x.new_zeros(groups.num_rows, weight_SNK.shape[1])
        return plain_product(x, weight_SNK, groups, out=out, bias_SN=bias_SN, **moves)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_SNK, bias_SN, inverse_R = ctx.saved_tensors
        dout, groups, moves = grads[0], ctx.groups, ctx.moves
        left = 1 if moves["scatters"] else 0
        right = groups.num_choices if moves["gathers"] else 0
        # the kernels write every expert with a slot; unused slots are zero
        make = torch.empty_like if groups.slot_of_expert is None else torch.zeros_like
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            by_slot, to_rows = replace(groups, num_choices=1), weight_SNK.transpose(1, 2)
            dx = x.new_zeros(groups.num_rows, x.shape[1])
            plain_product(dout, to_rows, by_slot, out=dx, gathers=moves["scatters"])
            if right:
                dx = launch_combine_fwd(dx, None, inverse_R, groups.offsets_E1[-1:], right)
        if ctx.needs_input_grad[1]:
            out = make(weight_SNK)
            divisors = {"left_divisor": left, "right_divisor": right}
            dweight = weight_grad(dout, x, groups, out_SNK=out, **divisors)
        if ctx.needs_input_grad[2]:
            out = make(bias_SN)
            dbias = bias_grad(dout, groups, out_SN=out, divisor=left)
        return dx, dweight, dbias, None, None, None


def grouped_gemm_triton(
    x: Tensor,
    weight_SNK: Weights,
    bias_SN: Tensor | None,
    groups: Groups,
    inverse_R: Tensor | None,
    moves: dict[str, Any],
    out: Tensor | None,
) -> Tensor:
    """`grouped_gemm` on a GPU, or in Triton's interpreter; `moves`: gathers and scatters."""
    check_triton_dtype(x)
    if isinstance(weight_SNK, QuantizedStack):
        if not takes_format(weight_SNK.format):
            raise ValueError(f"impl='triton' cannot read {weight_SNK.format}; impl='torch' can")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("impl='triton' has no gradient of quantised weights; impl='torch' has")
        out = x.new_zeros(groups.num_rows, weight_SNK.shape[1]) if out is None else out
    if out is not None:
        if out.stride(1) != 1:
            raise ValueError(f"out must have unit stride along N, got strides {out.stride()}")
        return plain_product(x, weight_SNK, groups, out=out, bias_SN=bias_SN, **moves)
    result = _GroupedGemm.apply(x, weight_SNK, bias_SN, groups, inverse_R, moves)
    return result  # type: ignore[no-any-return]
