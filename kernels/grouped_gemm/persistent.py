"""Launcher of the persistent kernel: the forward products of many rows on Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.persistent_kernel import grouped_gemm_persistent
from moe_runtime.kernels.grouped_gemm.tile import Tile
from moe_runtime.kernels.grouped_gemm.tiles import describe_device
from moe_runtime.kernels.triton_support import cdiv, launch

if TYPE_CHECKING:
    from moe_runtime.kernels.operands.activation import ActivationSpec

# What TMA asks of addresses and of distances between rows.
_ALIGNMENT = 16


def takes_weight(weight_SNK: Tensor, block_k: int, *, is_gated: bool) -> bool:
    """Whether the kernel reads these weights by a descriptor: rows of K, or of N if not gated."""
    in_rows = weight_SNK.stride(2) == 1
    rows = weight_SNK if in_rows else weight_SNK.transpose(1, 2)
    # Past the end of K lies zero where rows are of K, and whatever follows otherwise.
    return _is_aligned(rows) and (
        in_rows
        if is_gated
        else rows.stride(0) % rows.stride(1) == 0 and (in_rows or rows.shape[1] % block_k == 0)
    )


def takes_rows(x: Tensor, *, gathers: bool) -> bool:
    """Whether the kernel reads these rows."""
    return x.stride(1) == 1 if gathers else _is_aligned(x)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether TMA reads rows of a tensor, 16 bits a value."""
    *distances, step = tensor.stride()
    return (
        tensor.element_size() == 2
        and step == 1
        and tensor.data_ptr() % _ALIGNMENT == 0
        and all(distance and distance * 2 % _ALIGNMENT == 0 for distance in distances)
    )


def persistent_product(
    x: Tensor,
    weight_SNK: Tensor,
    groups: Groups,
    tile: Tile,
    *,
    out: Tensor,
    dim_n: int,
    gathers: bool,
    spec: ActivationSpec | None,
    pre: Tensor | None,
) -> None:
    """`plain_product`, or with `spec` `activated_product` of gate and up one after the other.

    Args:
        x: As in `plain_product`.
        weight_SNK: `[S, N, K]` that `takes_weight`.
        groups: The rows.
        tile: Persistent.
        out: `[R, dim_n]`.
        dim_n: Columns of the result.
        gathers: As in `plain_product`.
        spec: The activation, or None.
        pre: `[R, 2 * dim_n]` for the pre-activations, or None.
    """
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
    arguments: dict[str, Any] = groups.arguments()
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
        **tile.options(), **arguments,
    )  # fmt: skip
