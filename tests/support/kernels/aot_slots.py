"""Launches of products whose experts lie in slots of a slab, to be compiled for GPUs that are not
there: forward passes, those of training with adapters, and what is scattered or added up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from aot_small import meta
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.decode import DecodeProducts
from moe_runtime.kernels.grouped_gemm.backward import activation_backward, bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, ProductKind, Tile, tile_by_rule
from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout

# One layer of Qwen3-30B-A3B, whose dimensions every tile divides.
T, K, E, D, F = 4096, 8, 128, 2048, 768
SPEC, LAYOUT, RANK = ActivationSpec("silu"), GateLayout(), 16


def _slab(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gate and up, and down, of all slots: an expert's lie one behind the other."""
    slab = meta(E + 8, 3 * D * F, dtype=dtype)
    up = slab.as_strided((E + 8, 2 * F, D), (3 * D * F, D, 1))
    return up, slab.as_strided((E + 8, D, F), (3 * D * F, F, 1), 2 * F * D)


def _groups(*, has_slots: bool = True) -> Groups:
    slots = meta(E, dtype=torch.int32) if has_slots else None
    return Groups(meta(E + 1, dtype=torch.int64), T * K, slots, meta(T * K, dtype=torch.int64), K)


def few_from_slab(dtype: torch.dtype, device: GpuLimits) -> None:
    """Of eight tokens, which the device can hold."""
    ids, weights = meta(8, K, dtype=torch.int64), meta(8, K, dtype=dtype)
    products = DecodeProducts(meta(8, D, dtype=dtype), ids, weights, E, device)
    up, down = _slab(dtype)
    slots = meta(E, dtype=torch.int32)
    products.add(StackedExperts(gate_up=up, down=down, slot_of_expert=slots), SPEC)
    products.sums()


def from_slab(tile: Tile, dtype: torch.dtype = torch.bfloat16) -> None:
    """Of a prompt, in one tile."""
    (up, down), groups, hidden = _slab(dtype), _groups(), meta(T * K, F, dtype=dtype)
    more: dict[str, Any] = {"out": hidden, "pre": None, "gathers": True, "tile": tile}
    activated_product(meta(T, D, dtype=dtype), up, groups, SPEC, LAYOUT, **more)
    plain_product(hidden, down, groups, out=meta(T * K, D, dtype=dtype), tile=tile)


def _tile(kind: ProductKind, dim_n: int, dtype: torch.dtype, device: GpuLimits) -> Tile:
    """What the rule gives a product of so many columns, not persistent."""
    tile = tile_by_rule(kind, num_rows=T * K, num_experts=E, dim_n=dim_n, dtype=dtype)
    return replace(tile.fitted(dtype.itemsize, device), is_persistent=False)


def training_from_slab(dtype: torch.dtype, device: GpuLimits) -> None:
    """As `SlottedTraining` with adapters on both products."""
    (up, down), groups, every = _slab(dtype), _groups(), _groups(has_slots=False)
    x, rows, hidden = (meta(*size, dtype=dtype) for size in ((T, D), (T * K, D), (T * K, F)))
    pre, weights = meta(T * K, 2 * F, dtype=dtype), meta(T * K)
    more: dict[str, Any] = {"out": hidden, "pre": pre, "gathers": True, "adds_pre": True}
    activated_product(
        x, up, groups, SPEC, LAYOUT, tile=_tile("gated", 2 * F, dtype, device), **more
    )
    activation_backward(
        x, down, pre, weights, groups, SPEC, LAYOUT, dpre=meta(T * K, 2 * F, dtype=dtype),
        more_RF=hidden, tile=_tile("down_act_backward", F, dtype, device),
    )  # fmt: skip
    wide = _tile("plain", D, dtype, device)
    plain_product(pre, up.transpose(1, 2), groups, out=rows, tile=wide)
    launch_combine_fwd(rows, None, meta(T * K, dtype=torch.int64), meta(1, dtype=torch.int64), K)
    inner, first = meta(T * K, RANK, dtype=dtype), meta(E, RANK, D, dtype=dtype)
    narrow = _tile("plain", RANK, dtype, device)
    plain_product(x, first, every, out=inner, gathers=True, tile=narrow)
    shallow = replace(wide, block_k=RANK)
    plain_product(inner, first.transpose(1, 2), every, out=rows, tile=shallow)
    gradient = meta(E, RANK, D, dtype=torch.float32).transpose(1, 2)
    tile = _tile("dw", RANK, dtype, device)
    adds: dict[str, Any] = {"accumulates": True, "left_divisor": K, "tile": tile}
    weight_grad(x, inner, every, out_SNK=gradient, **adds)


def added_up(gradients: torch.dtype, device: GpuLimits) -> None:
    """A product with biases whose rows go back to their slots; and gradients of some
    type that are added to those there are, the products' two among them."""
    dtype = torch.bfloat16
    (_, down), groups, out = _slab(dtype), _groups(), meta(T * K, D, dtype=dtype)
    more: dict[str, Any] = {"bias_SN": meta(E + 8, D, dtype=dtype)}
    tile = _tile("plain", D, dtype, device)
    hidden = meta(T * K, F, dtype=dtype)
    plain_product(hidden, down, groups, out=out, scatters=True, tile=tile, **more)
    adds: dict[str, Any] = {"accumulates": True, "tile": _tile("dw", F, dtype, device)}
    bias_grad(out, groups, out_SN=meta(E + 8, D, dtype=gradients), accumulates=True)
    of_down, of_up = (meta(E + 8, *size, dtype=gradients) for size in ((D, F), (2 * F, D)))
    weight_grad(meta(T, D, dtype=dtype), hidden, groups, out_SNK=of_down, left_divisor=K, **adds)
    pre = meta(T * K, 2 * F, dtype=dtype)
    weight_grad(pre, meta(T, D, dtype=dtype), groups, out_SNK=of_up, right_divisor=K, **adds)
