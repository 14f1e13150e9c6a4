"""Compiles kernels for targets and prints what came out, as JSON.

A process of its own: the suite's interpreter replaces the compiler for good. `aot_report.py all
sm_90` compiles every shipped tile; `in-turn sm_90 sm_100` what is these targets' turn, and `few
sm_90` what of this takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from aot_compile import Binary, compile_launches
from torch import Tensor

import moe_runtime.kernels.decode_step.expert_choice_kernel as choice_kernel
import moe_runtime.kernels.decode_step.split_attention_kernel as attention_kernel
import moe_runtime.kernels.linear.kernel as linear_kernel
import moe_runtime.kernels.rms_norm.kernel as norm_kernel
from moe_runtime.kernels.block_sparse.kernel import (
    choose_dsd_tile,
    choose_tile,
    launch_dsd,
    launch_sdd,
)
from moe_runtime.kernels.block_sparse.topology import BlockTopology, Gather, expert_topology
from moe_runtime.kernels.combine.kernel import launch_combine_bwd, launch_combine_fwd
from moe_runtime.kernels.decode_step.expert_choice import ChoiceForm
from moe_runtime.kernels.decode_step.split_attention import RowNorm
from moe_runtime.kernels.expert_fetch import FetchTables
from moe_runtime.kernels.expert_fetch.op import launch_fetch_experts
from moe_runtime.kernels.expert_mlp import QuantizedExperts, StackedExperts
from moe_runtime.kernels.expert_mlp.decode import DecodeProducts, decode_expert_mlp
from moe_runtime.kernels.grouped_gemm.backward import activation_backward, bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.columns import BLOCK_SIZES, ExpertColumns
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.packed import BLOCKS_READ
from moe_runtime.kernels.grouped_gemm.tile import (
    TILES_16_BIT,
    TILES_32_BIT,
    TILES_PACKED,
    GpuLimits,
    ProductKind,
    Tile,
    packed_table,
    tile_by_rule,
)
from moe_runtime.kernels.operands import ActivationSpec, GateLayout
from moe_runtime.kernels.quantized import SCALES, QuantizedStack, WeightFormat
from moe_runtime.kernels.rms_norm.op import MOST_COLUMNS
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.token_sort.kernel import token_sort_triton


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def small_kernels() -> None:
    """What has no tile to choose."""
    ids, order = meta(4096, 8, dtype=torch.int64), meta(4096 * 8, dtype=torch.int64)
    token_sort_triton(ids, 128)
    token_sort_triton(ids[:16], 128)
    y, weights, one = meta(4096 * 8, 2048), meta(4096, 8, dtype=torch.float32), order[:1]
    launch_combine_fwd(y, weights, order, one, 8)
    launch_combine_bwd(
        meta(4096, 2048), y, weights, order, one, 8, needs_dy=True, needs_dweights=True
    )
    groups = Groups(meta(129, dtype=torch.int64), 4096 * 8, None, order, num_choices=8)
    bias_grad(y, groups, out_SN=meta(128, 2048))
    for num_parts, word_bytes in ((1, 8), (9, 2)):
        slots_E, landing = meta(128, dtype=torch.int32), meta(8, dtype=torch.int32)
        sources = meta(128, num_parts, dtype=torch.int64)
        parts = meta(2, num_parts, dtype=torch.int64)
        tables = FetchTables(slots_E, sources, parts, landing)
        slots = meta(1024, 9437184, dtype=torch.uint8)
        launch_fetch_experts(ids[:16], tables, slots, slots_E, 8, word_bytes)


def between_products(*, is_chained: bool) -> None:
    """Those of Qwen3-30B-A3B, and the widest; launched before the one before them has ended."""
    chain = {"IS_CHAINED": is_chained}
    with contextlib.ExitStack() as patches:
        for module in (choice_kernel, linear_kernel, norm_kernel, attention_kernel):
            patches.enter_context(patch.object(module, "dependent_launch", lambda _: chain))
        _between_products()


def _between_products() -> None:
    norm_kernel.launch_rms_norm(meta(8, 1, 2048), meta(2048), 1e-6, "rounded")
    linear_kernel.launch_linear_row(
        meta(1, 2048), [(meta(n, 2048), None) for n in (4096, 512, 512)]
    )
    linear_kernel.launch_linear_row(meta(1, 2880), [(meta(201, 2880), meta(201))])
    recorded = {"_are_parameters": lambda _: True, "_is_recorded": lambda: True}
    with patch.multiple(linear_kernel, **recorded):
        linear_kernel.launch_linear_row(meta(1, 4096), [(meta(2048, 4096), None)])
    norm_kernel.launch_rms_norm(meta(8, 1, MOST_COLUMNS), meta(MOST_COLUMNS), 1e-6, "wide")
    sums = meta(8, 1, 2048)
    norm_kernel.launch_rms_norm(sums, meta(2048), 1e-6, "rounded", sums)
    form = ChoiceForm("softmax", normalises=True)
    choice_kernel.launch_choose_experts(meta(8, 128), 8, form, None, torch.bfloat16)
    bias, form = meta(512, dtype=torch.float32), ChoiceForm("sigmoid", True, 2.5)
    choice_kernel.launch_choose_experts(
        meta(8, 512, dtype=torch.float32), 16, form, bias, torch.float32
    )
    # Qwen3-30B-A3B, gpt-oss-20b, and fp32
    for dtype, heads, key_heads, dim, is_whole, mask, window in (
        (torch.bfloat16, 32, 4, 128, False, torch.bool, 0),
        (torch.bfloat16, 64, 8, 64, False, torch.bfloat16, 128),
        (torch.float32, 48, 8, 128, True, None, 0),
    ):
        query, key = meta(8, heads * dim, dtype=dtype), meta(8, key_heads * dim, dtype=dtype)
        widths = (heads * dim, key_heads * dim) if is_whole else (dim, dim)
        query_norm, key_norm = (RowNorm(meta(width, dtype=dtype), 1e-6) for width in widths)
        angles, cache = meta(8, dim, dtype=dtype), meta(8, key_heads, 32768, dim, dtype=dtype)
        for place in (meta(dtype=torch.int64), meta(8, dtype=torch.int64)):
            attention_kernel.launch_split_attention(
                (query, key, key), (angles, angles), (cache, cache), place, (query_norm, key_norm),
                dim, 0.1, None if mask is None else meta(8, 32768, dtype=mask),
                meta(heads, dtype=dtype) if window else None, window,
                meta(1 + 8 * key_heads, dtype=torch.int32),
            )  # fmt: skip


# One layer of Qwen3-30B-A3B, whose dimensions every tile divides, and gpt-oss, which has biases,
# transposed interleaved weights, a bounded gate and a width that no tile divides.
QWEN3 = {"T": 4096, "K": 8, "E": 128, "D": 2048, "F": 768}
T, K, E, D, F = QWEN3.values()
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


GPT_OSS_GATE = ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0)
GPT_OSS = {"T": 4096, "K": 4, "E": 32, "D": 2880, "F": 2880}
PACKED = {
    "mxfp4": WeightFormat("e2m1", "e8m0", group_cols=32),
    "fp8-block": WeightFormat("e4m3", "f32", group_rows=128, group_cols=128),
    "int4": WeightFormat("uint4", "bf16", group_cols=32, zero=8),
    "int4-zeros": WeightFormat("uint4", "bf16", group_cols=32, has_zero_points=True),
    "nvfp4": WeightFormat("e2m1", "e4m3", group_cols=16, global_scale="divide"),
    # blocks with offsets spill, on gfx942 all blocks: kernels/README.md says where and how much
    **{name: WeightFormat(name) for name in BLOCKS_READ if name not in ("q4_1", "q4_k", "q5_k")},
}
SELDOM = {"fp8-block", *BLOCKS_READ} - {"q8_0"}
"""Formats of which every tile is compiled or none."""
DEVICES = {
    "sm_80": GpuLimits(163 * 1024, False, chains_launches=False, converts_fp8=False),
    "sm_90": GpuLimits(),
    "sm_100": GpuLimits(),
    "sm_86": GpuLimits(99 * 1024, False, chains_launches=False, converts_fp8=False),
    "sm_89": GpuLimits(99 * 1024, False, chains_launches=False),
    "sm_120": GpuLimits(99 * 1024, False),
    "gfx942": GpuLimits(64 * 1024, False, chains_launches=False, converts_fp8=False),
}


def product(
    kind: ProductKind,
    tile: Tile,
    dtype: torch.dtype,
    *,
    gpt_oss: bool = False,
    has_adapters: bool = False,
) -> None:
    """Launches one kind of product in one tile; as adapters beside the experts need it or not."""
    T, K, E, D, F = (GPT_OSS if gpt_oss else QWEN3).values()
    rows = T * K
    groups = Groups(
        meta(E + 1, dtype=torch.int64), rows, None, meta(rows, dtype=torch.int64), num_choices=K
    )
    spec = ActivationSpec("silu")
    up, down = meta(E, 2 * F, D, dtype=dtype), meta(E, D, F, dtype=dtype)
    if gpt_oss:
        spec = GPT_OSS_GATE
        up, down = (meta(E, *w.mT.shape[1:], dtype=dtype).mT for w in (up, down))
    x, pre = meta(T, D, dtype=dtype), meta(rows, 2 * F, dtype=dtype)
    layout: dict[str, Any] = {"layout": GateLayout(True, not gpt_oss), "tile": tile}
    if kind == "plain":
        plain_product(meta(rows, F, dtype=dtype), down, groups, out=meta(rows, D), tile=tile)
    elif kind == "gated":
        bias = meta(E, 2 * F, dtype=dtype) if gpt_oss else None
        out = meta(rows, F, dtype=dtype)
        more: dict[str, Any] = {"bias_SZ": bias, "gathers": True, "adds_pre": has_adapters}
        activated_product(x, up, groups, spec, out=out, pre=pre, **more, **layout)
    elif kind == "down_act_backward":
        more = {"down_bias_SD": meta(E, D, dtype=dtype) if gpt_oss else None}
        more["more_RF"] = meta(rows, F, dtype=dtype) if has_adapters else None
        activation_backward(x, down, pre, meta(rows), groups, spec, **more, **layout)
    else:
        weight_grad(pre, x, groups, out_SNK=up, right_divisor=K, tile=tile)


def product_of_widths(kind: ProductKind, tile: Tile, dtype: torch.dtype, width: int) -> None:
    """As `product`, for experts of which every other one is half as wide."""
    rows = T * K
    columns = ExpertColumns.of([width, width // 2] * (E // 2), block_columns=128, device="meta")
    groups = Groups(
        meta(E + 1, dtype=torch.int64), rows, None, meta(rows, dtype=torch.int64), K, columns
    )
    matrix = meta(columns.num_columns, D, dtype=dtype).expand(E, -1, -1)
    bias = meta(columns.num_columns, dtype=dtype).expand(E, -1)
    x, hidden = meta(T, D, dtype=dtype), meta(1, columns.most_values(rows), dtype=dtype)
    pre = meta(2, hidden.shape[1], dtype=dtype)
    layout: dict[str, Any] = {"layout": GateLayout(), "tile": tile}
    if kind == "plain":
        out = meta(rows, D, dtype=dtype)
        plain_product(hidden, matrix.transpose(1, 2), groups, out=out, tile=tile)
    elif kind == "gated":
        more: dict[str, Any] = {"bias_SZ": bias, "up": (matrix, bias), "gathers": True, **layout}
        activated_product(x, matrix, groups, GPT_OSS_GATE, out=hidden, pre=pre, **more)
    elif kind == "down_act_backward":
        scale, down = meta(rows, dtype=torch.float32), matrix.transpose(1, 2)
        activation_backward(x, down, pre, scale, groups, GPT_OSS_GATE, **layout)
    else:
        weight_grad(hidden, x, groups, out_SNK=matrix, right_divisor=K, tile=tile)
        bias_grad(hidden, groups, out_SN=bias)


def few_tokens(model: str, dtype: torch.dtype, device: GpuLimits, *, num_tokens: int = 8) -> None:
    """The decoding kernels of some tokens."""
    is_gpt_oss = model == "gpt-oss"
    _, K, E, D, F = (GPT_OSS if is_gpt_oss else QWEN3).values()
    up, down = meta(E, 2 * F, D, dtype=dtype), meta(E, D, F, dtype=dtype)
    if is_gpt_oss:
        up, down = (meta(E, *w.mT.shape[1:], dtype=dtype).mT for w in (up, down))
    experts = StackedExperts(
        gate_up=up,
        down=down,
        gate_up_bias=meta(E, 2 * F, dtype=dtype) if is_gpt_oss else None,
        down_bias=meta(E, D, dtype=dtype) if is_gpt_oss else None,
        is_concatenated=not is_gpt_oss,
        slot_of_expert=meta(E, dtype=torch.int64) if is_gpt_oss else None,
    )
    x, ids = meta(num_tokens, D, dtype=dtype), meta(num_tokens, K, dtype=torch.int64)
    weights, spec = meta(num_tokens, K, dtype=torch.float32), ActivationSpec("silu")
    decode_expert_mlp(x, ids, weights, experts, GPT_OSS_GATE if is_gpt_oss else spec, device)


def packed_stack(kind: WeightFormat, num_slots: int, num_rows: int, num_cols: int) -> Any:
    groups = kind.scales_shape(num_rows, num_cols)
    return QuantizedStack(
        kind,
        num_cols,
        meta(num_slots, num_rows, kind.row_bytes(num_cols), dtype=torch.uint8),
        None if kind.block_codes else meta(num_slots, *groups, dtype=SCALES[kind.scales]),
        meta(num_slots, *groups, dtype=torch.uint8) if kind.has_zero_points else None,
        None if kind.global_scale == "none" else meta(num_slots, 1, dtype=torch.float32),
    )


def packed_products(name: str, tile: Tile | None, dtype: torch.dtype, device: GpuLimits) -> None:
    """Both products of a layer whose experts are packed, read through a slot table.

    Args:
        name: Of `PACKED`.
        tile: None for those of eight tokens.
        dtype: Of the rows.
        device: What they must fit in.
    """
    kind, is_gpt_oss = PACKED[name], name == "mxfp4"
    T, K, E, D, F = (GPT_OSS if is_gpt_oss else QWEN3).values()
    gate, up = (packed_stack(kind, E + 8, F, D) for _ in range(2))
    down = packed_stack(kind, E + 8, D, F)
    biases = [meta(E + 8, n, dtype=torch.float32) if is_gpt_oss else None for n in (F, F, D)]
    spec = GPT_OSS_GATE if is_gpt_oss else ActivationSpec("silu")
    slots = meta(E, dtype=torch.int32)
    if tile is None:
        experts = QuantizedExperts(
            gate=gate, up=up, down=down, gate_bias=biases[0], up_bias=biases[1],
            down_bias=biases[2], slot_of_expert=slots,
        )  # fmt: skip
        ids, weights = meta(8, K, dtype=torch.int64), meta(8, K, dtype=dtype)
        decode_expert_mlp(meta(8, D, dtype=dtype), ids, weights, experts, spec, device)
        return
    rows = T * K
    groups = Groups(
        meta(E + 1, dtype=torch.int64), rows, slots, meta(rows, dtype=torch.int64), num_choices=K
    )
    x, hidden = meta(T, D, dtype=dtype), meta(rows, F, dtype=dtype)
    activated_product(
        x, gate, groups, spec, GateLayout(),
        out=hidden, pre=None, bias_SZ=biases[0], up=(up, biases[1]), gathers=True, tile=tile,
    )  # fmt: skip
    out = meta(rows, D, dtype=dtype)
    plain_product(hidden, down, groups, out=out, bias_SN=biases[2], tile=tile)


def packed_rows(name: str, device: GpuLimits) -> None:
    """Both products of a layer for one token, and a linear layer."""
    kind, is_gpt_oss = PACKED.get(name) or WeightFormat("q4_k"), name == "mxfp4"
    _, K, E, D, F = (GPT_OSS if is_gpt_oss else QWEN3).values()
    gate, up = (packed_stack(kind, E, F, D) for _ in range(2))
    experts = QuantizedExperts(gate=gate, up=up, down=packed_stack(kind, E, D, F))
    x, ids, weights = meta(1, D), meta(1, K, dtype=torch.int64), meta(1, K)
    decode_expert_mlp(x, ids, weights, experts, GPT_OSS_GATE if is_gpt_oss else SPEC, device)
    linear_kernel.launch_packed_row(x, packed_stack(kind, 1, 4096, D), meta(4096), device)


Calls = list[tuple[str, Callable[[], None]]]
"""What to compile, with descriptions."""


def packed_calls(target: str, *, every_tile: bool) -> tuple[Calls, Calls]:
    """The products of `packed_products`, of few rows and of many.

    Unless it is every tile, each format is compiled for few rows or for many.
    """
    few, many = [], []
    device = DEVICES[target]
    for name in (n for n in PACKED if target != "gfx942" or n not in BLOCKS_READ):
        if every_tile or name not in SELDOM:
            call = partial(packed_products, name, None, torch.bfloat16, device)
            few.append((f"packed {name} few tokens", call))
        table = TILES_PACKED[packed_table(PACKED[name], torch.bfloat16)]
        tiles = [tile for _, tile in table] if every_tile else [table[-1][1]]
        is_compiled = name == "fp8-block" or name not in {*SELDOM, "int4-zeros"}
        for tile in tiles if every_tile or is_compiled else ():
            fitted = tile.fitted(torch.bfloat16.itemsize, device)
            call = partial(packed_products, name, fitted, torch.bfloat16, device)
            many.append((f"packed {name} {fitted}", call))
    if every_tile:
        fitted = TILES_PACKED["32-bit rows"][-1][1].fitted(torch.float32.itemsize, device)
        call = partial(packed_products, "mxfp4", fitted, torch.float32, device)
        many.append((f"packed mxfp4 float32 {fitted}", call))
    return few, many


def block_sparse(
    block_rows: int, dtype: torch.dtype, device: GpuLimits, *, is_even: bool, gathers: bool
) -> None:
    """The two products, as a layer and its backward pass launch them."""
    block_columns = 64 if dtype == torch.float32 else 128
    width = F if is_even else F - 24
    columns = ExpertColumns.of([width] * E, block_columns=block_columns, device="meta")
    topology = meta_topology(columns, T * K, block_rows)
    x, weight = meta(T if gathers else T * K, D, dtype=dtype), meta(width * E, D, dtype=dtype)
    order = meta(T * K, dtype=torch.int64)
    gather = Gather(SortedTokens(order, order, order, order), K) if gathers else None
    tile = choose_tile(block_rows, block_columns, x, device)
    values = launch_sdd(x, weight.T, topology, tile=tile, gather=gather)
    tile, out = choose_dsd_tile(block_rows, x, device), meta(T * K, D, dtype=dtype)
    launch_dsd(values, weight, topology, out=out, is_transposed=False, tile=tile)
    tile = choose_dsd_tile(block_columns, x, device)
    launch_dsd(values, x, topology, out=weight, is_transposed=True, tile=tile, gather=gather)


def meta_topology(columns: ExpertColumns, num_rows: int, block_rows: int) -> BlockTopology:
    offsets = meta(len(columns.widths) + 1, dtype=torch.int64)
    return expert_topology(offsets, columns, num_rows=num_rows, block_rows=block_rows)


def block_sparse_calls(device: GpuLimits, *, every_tile: bool) -> Calls:
    widest = BLOCK_SIZES[-1]
    kinds = [(torch.bfloat16, widest, False, True), (torch.bfloat16, widest, True, False)]
    if every_tile:
        kinds += [(torch.bfloat16, rows, False, True) for rows in BLOCK_SIZES[:-1]]
        kinds += [(torch.bfloat16, rows, False, False) for rows in BLOCK_SIZES]
        kinds += [(torch.float32, widest, False, gathers) for gathers in (False, True)]
    return [
        (
            f"block-sparse {dtype} {rows} rows, {is_even=}, {gathers=}",
            partial(block_sparse, rows, dtype, device, is_even=is_even, gathers=gathers),
        )
        for dtype, rows, is_even, gathers in kinds
    ]


def product_calls(
    kind: ProductKind, dtype: torch.dtype, device: GpuLimits, *, every_tile: bool
) -> Calls:
    """One kind of product, for experts of one width and of two, whether tiles divide it or not."""
    tables = TILES_32_BIT if dtype == torch.float32 else TILES_16_BIT
    *narrow, widest = [tile.fitted(dtype.itemsize, device) for _, tile in tables[kind]]
    name, found = f"{kind} {dtype} {widest}", []
    for width in (768, 744):
        tile = widest.for_widths()
        call = partial(product_of_widths, kind, tile, dtype, width)
        found.append((f"widths {width} {kind} {dtype} {tile}", call))
    found.append((name, partial(product, kind, widest, dtype)))
    if dtype == torch.bfloat16:
        found.append((f"gpt-oss {name}", partial(product, kind, widest, dtype, gpt_oss=True)))
    if kind in ("gated", "down_act_backward"):
        found.append((f"adapters {name}", partial(product, kind, widest, dtype, has_adapters=True)))
    for tile in narrow if every_tile else ():
        found.append((f"{kind} {dtype} {tile}", partial(product, kind, tile, dtype)))
    return found


# Targets whose instructions differ, and those that differ from `sm_80` in what a program can hold.
LARGE, SMALL = ("sm_80", "sm_90", "sm_100"), ("sm_86", "sm_89", "sm_120")


def groups_of_calls(target: str, *, every_tile: bool) -> Iterator[tuple[Sequence[str], Calls]]:
    """Everything to compile: calls of one kind, and the targets that compile one each, in turn.

    A kernel is compiled for two targets at least, and what fills registers and shared memory, the
    gated product and the way back through it, for all.
    """
    device = DEVICES[target]
    stays = TILES_16_BIT["gated"][-1][1].fitted(torch.bfloat16.itemsize, device)
    many = replace(stays, is_persistent=False)
    halves = (torch.bfloat16, torch.float16)
    sums = (torch.bfloat16, torch.float32)
    yield ("sm_80", "sm_120"), [("small kernels", small_kernels)]
    between = partial(between_products, is_chained=device.chains_launches)
    yield ("sm_90", "sm_89"), [("between products", between)]
    layers = [("qwen3", torch.bfloat16), ("gpt-oss", torch.bfloat16), ("qwen3", torch.float32)]
    yield (
        ("sm_90", "sm_86", "sm_100"),
        [
            (f"{model} {dtype} few tokens", partial(few_tokens, model, dtype, device))
            for model, dtype in layers
        ],
    )
    yield (
        ("sm_90", "sm_120"),
        [
            (f"one token {dtype}", partial(few_tokens, "qwen3", dtype, device, num_tokens=1))
            for dtype in sums
        ],
    )
    yield (
        ("sm_90", "sm_80"),
        [
            (f"slots few tokens in {dtype}", partial(few_from_slab, dtype, device))
            for dtype in halves
        ],
    )
    yield (
        ("sm_80", "sm_90"),
        [(f"slots in {dtype} {many}", partial(from_slab, many, dtype)) for dtype in halves],
    )
    yield ("sm_90",), [(f"stays {stays}", partial(from_slab, stays))]
    if every_tile:
        trains = partial(training_from_slab, torch.bfloat16, device)
        yield (), [("trains from slots, tiles of 128 rows", trains)]
    yield (
        ("sm_80", "sm_89"),
        [
            (f"adds up {dtype}, tiles of 128 rows", partial(added_up, dtype, device))
            for dtype in sums
        ],
    )
    rows = {
        name: (f"rows {name}", partial(packed_rows, name, device)) for name in (*PACKED, "q4_k")
    }
    yield ("sm_86", "sm_89", "sm_90", "sm_120"), [rows["mxfp4"]]
    yield ("sm_86", "sm_89", "sm_90", "sm_120"), [rows["fp8-block"]]
    yield ("sm_80", "sm_100"), [rows["int4"], rows["nvfp4"]]
    yield ("sm_86", "sm_120"), [rows["q4_k"]]
    few, many_rows = packed_calls(target, every_tile=every_tile)
    yield ("sm_80", "sm_86", "sm_89", "sm_100"), few
    yield ("sm_90", "sm_120", "sm_86", "sm_80"), many_rows
    yield ("sm_100", "sm_90"), block_sparse_calls(device, every_tile=every_tile)
    wide_rows = partial(
        block_sparse, BLOCK_SIZES[-1], torch.float32, device, is_even=False, gathers=True
    )
    yield ("sm_86", "sm_120"), [(f"block-sparse fp32 {BLOCK_SIZES[-1]} rows", wide_rows)]
    for kind in TILES_16_BIT:
        is_wide = kind in ("gated", "down_act_backward")
        yield (
            (*LARGE, *SMALL) if is_wide else LARGE,
            [
                call
                for dtype in sums
                for call in product_calls(kind, dtype, device, every_tile=every_tile)
            ],
        )


def calls(target: str, *, every_tile: bool) -> Calls:
    """What to compile for a target: everything, or what is its turn."""
    found: Calls = []
    for targets, group in groups_of_calls(target, every_tile=every_tile):
        if every_tile:
            found += group
        elif target in targets:
            found.append(group[targets.index(target) % len(group)])
    return found


# Kernels of one token, of few and of many: packed weights, slots, and the matrix units.
FEW = ("rows mxfp4", "slots ")


def main() -> None:
    tiles, *targets = sys.argv[1:]
    for target in targets:
        for description, call in calls(target, every_tile=tiles == "all"):
            if tiles == "few" and not description.startswith(FEW):
                continue
            for binary in compile_launches(call, target):
                print_binary(binary, description)


def print_binary(binary: Binary, description: str) -> None:
    entry = asdict(binary)
    text = entry.pop("instructions")
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)", text)
    entry |= {
        "wgmma": text.count("wgmma.mma_async"),
        "copies": len(copies),
        "copies_of_16_bytes": sum(int(n, 0) == 16 for n in copies),
        "tcgen05": text.count("tcgen05.mma"),
        "what": description,
    }
    sys.stdout.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
