"""Triton kernels between the block-sparse products: the activation, and back through it.

Everything is computed block by block, where the values lie. No atomics: the gradient of a gate
weight is summed over a row's blocks by one program, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology import BlockTopology
from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.grouped_gemm.activation_kernel import activate, gate_bwd, gate_fwd
from moe_runtime.kernels.triton_support import launch

# Rows of a block that one program computes: what its registers hold of five operands.
_ROWS = 16


@triton.jit
def block_activation(
    gate_ptr,
    up_ptr,
    hidden_ptr,
    row_of_block_ptr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Hidden values of some rows of a block; blocks that nobody needs are left alone."""
    block = tl.program_id(0).to(tl.int64)
    if tl.load(row_of_block_ptr + block) < 0:
        return
    offs_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = block * (BLOCK_M * BLOCK_N) + offs_m[:, None] * BLOCK_N
    places += tl.arange(0, BLOCK_N)[None, :]
    up = tl.load(up_ptr + places).to(tl.float32)
    if IS_GATED:
        hidden = gate_fwd(
            tl.load(gate_ptr + places).to(tl.float32),
            up,
            ACTIVATION,
        )
    else:
        hidden, _ = activate(up, ACTIVATION)
    tl.store(hidden_ptr + places, hidden)


@triton.jit
def block_activation_bwd(
    dhidden_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    hidden_ptr,
    dots_ptr,
    scale_ptr,
    order_ptr,
    row_of_block_ptr,
    row_first_ptr,
    row_end_ptr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of gate and up for `d = dhidden` times the row's gate weight `s`.

    Also `hidden = s * h` for the gradient of the down projection, and each row's `<d, h>`, this
    block's part of the gradient of `s`. `dgate` may lie where `dhidden` does.
    """
    block = tl.program_id(0).to(tl.int64)
    strip = tl.load(row_of_block_ptr + block)
    if strip < 0:
        return
    offs_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows = tl.load(row_first_ptr + strip) + offs_m
    mask_m = rows < tl.load(row_end_ptr + strip)
    slots = tl.load(order_ptr + rows, mask=mask_m, other=0)
    scale = tl.load(scale_ptr + slots, mask=mask_m, other=0.0).to(tl.float32)
    places = block * (BLOCK_M * BLOCK_N) + offs_m[:, None] * BLOCK_N
    places += tl.arange(0, BLOCK_N)[None, :]
    dhidden = tl.load(dhidden_ptr + places).to(tl.float32)
    scaled = dhidden * scale[:, None]
    up = tl.load(up_ptr + places).to(tl.float32)
    if IS_GATED:
        hidden, dgate, dup = gate_bwd(
            scaled,
            tl.load(gate_ptr + places).to(tl.float32),
            up,
            ACTIVATION,
        )
        tl.store(dgate_ptr + places, dgate)
        tl.store(dup_ptr + places, dup)
    else:
        hidden, slope = activate(up, ACTIVATION)
        tl.store(dup_ptr + places, scaled * slope)
    tl.store(hidden_ptr + places, hidden * scale[:, None])
    tl.store(dots_ptr + block * BLOCK_M + offs_m, tl.sum(dhidden * hidden, axis=1))


@triton.jit
def block_dots_sum(
    dots_ptr,
    dscale_ptr,
    order_ptr,
    row_first_ptr,
    row_end_ptr,
    offsets_ptr,
    BLOCK_M: tl.constexpr,
):
    """Adds up the blocks of a strip of rows; rows without an expert have none and get zero."""
    strip = tl.program_id(0)
    offs_m = tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for place in range(tl.load(offsets_ptr + strip), tl.load(offsets_ptr + strip + 1)):
        total += tl.load(dots_ptr + tl.cast(place, tl.int64) * BLOCK_M + offs_m)
    rows = tl.load(row_first_ptr + strip) + offs_m
    mask = rows < tl.load(row_end_ptr + strip)
    slots = tl.load(order_ptr + rows, mask=mask, other=0)
    tl.store(dscale_ptr + slots, total, mask=mask)


class BlockGrads(NamedTuple):
    """What `launch_activation_bwd` found, as blocks.

    Attributes:
        gate: Gradient of the gate's pre-activations, in the memory of `dhidden`; or None.
        up: Gradient of up's.
        hidden: Hidden values times the gate weights.
        scale: `[T * K]` fp32: gradient of the gate weights, in slot order.
    """

    gate: Tensor | None
    up: Tensor
    hidden: Tensor
    scale: Tensor


def launch_activation(
    gate: Tensor | None, up: Tensor, topology: BlockTopology, spec: ActivationSpec
) -> Tensor:
    """Hidden values of the blocks `[B, block_rows, block_columns]` of gate and up."""
    hidden = torch.empty_like(up)
    if hidden.numel():
        launch(
            block_activation,
            (topology.num_blocks, topology.block_rows // _ROWS),
            gate_ptr=up if gate is None else gate,
            up_ptr=up,
            hidden_ptr=hidden,
            row_of_block_ptr=topology.row_of_block_B,
            IS_GATED=gate is not None,
            BLOCK_M=topology.block_rows,
            BLOCK_N=topology.block_columns,
            ROWS=_ROWS,
            ACTIVATION=spec,
        )
    return hidden


def launch_activation_bwd(
    dhidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    scale_R: Tensor,
    order_R: Tensor,
    topology: BlockTopology,
    spec: ActivationSpec,
) -> BlockGrads:
    """Steps back over the activation.

    Args:
        dhidden: Blocks: gradient of the hidden values for gate weights of one. Overwritten.
        gate: Blocks of pre-activations, or None.
        up: Likewise.
        scale_R: Gate weights in slot order, contiguous.
        order_R: Slot of each row.
        topology: The blocks.
        spec: The activation.
    """
    dup, hidden = torch.empty_like(up), torch.empty_like(up)
    like = {"dtype": torch.float32, "device": up.device}
    dots = torch.empty(up.shape[:2], **like)
    dscale = torch.empty(len(order_R), **like)
    rows = topology.rows
    sides = {"row_first_ptr": rows.first, "row_end_ptr": rows.end, "order_ptr": order_R}
    if up.numel():
        launch(
            block_activation_bwd,
            (topology.num_blocks, topology.block_rows // _ROWS),
            dhidden_ptr=dhidden,
            gate_ptr=up if gate is None else gate,
            up_ptr=up,
            dgate_ptr=dhidden,
            dup_ptr=dup,
            hidden_ptr=hidden,
            dots_ptr=dots,
            scale_ptr=scale_R,
            row_of_block_ptr=topology.row_of_block_B,
            IS_GATED=gate is not None,
            BLOCK_M=topology.block_rows,
            BLOCK_N=topology.block_columns,
            ROWS=_ROWS,
            **sides,
            ACTIVATION=spec,
        )
    if len(rows.first):
        launch(
            block_dots_sum,
            (len(rows.first),),
            dots_ptr=dots,
            dscale_ptr=dscale,
            offsets_ptr=rows.offsets,
            BLOCK_M=topology.block_rows,
            **sides,
        )
    return BlockGrads(None if gate is None else dhidden, dup, hidden, dscale)
