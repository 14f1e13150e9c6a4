"""Compiles kernels for targets and prints what came out, as JSON.

A process of its own: the suite's interpreter replaces the compiler for good. `aot_report.py all
sm_90` compiles every shipped tile; `in-turn sm_90 sm_100` what is these targets' turn. `turns`
compiles nothing, and prints the kernels that each target would compile in turn.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from aot_compile import Binary, compile_launches, launched_names
from aot_slots import added_up, few_from_slab, from_slab, training_from_slab
from aot_small import between_products, meta, small_kernels

from moe_runtime.kernels.block_sparse.kernel import (
    choose_dsd_tile,
    choose_tile,
    launch_dsd,
    launch_sdd,
)
from moe_runtime.kernels.block_sparse.topology import BlockTopology, Gather, expert_topology
from moe_runtime.kernels.expert_mlp import QuantizedExperts, StackedExperts
from moe_runtime.kernels.expert_mlp.decode import decode_expert_mlp
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
)
from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout
from moe_runtime.kernels.quantized import SCALES, QuantizedStack, WeightFormat
from moe_runtime.kernels.token_sort import SortedTokens

# One layer of Qwen3-30B-A3B, whose dimensions every tile divides, and gpt-oss, which has biases,
# transposed interleaved weights, a bounded gate and a width that no tile divides.
QWEN3 = {"T": 4096, "K": 8, "E": 128, "D": 2048, "F": 768}
GPT_OSS_GATE = ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0)
GPT_OSS = {"T": 4096, "K": 4, "E": 32, "D": 2880, "F": 2880}
PACKED = {
    "mxfp4": WeightFormat("e2m1", "e8m0", group_cols=32),
    "fp8-block": WeightFormat("e4m3", "f32", group_rows=128, group_cols=128),
    "int4-zeros": WeightFormat("uint4", "bf16", group_cols=32, has_zero_points=True),
    "nvfp4": WeightFormat("e2m1", "e4m3", group_cols=16, global_scale="divide"),
    # blocks with offsets spill, on gfx942 all blocks: kernels/README.md says where and how much
    **{
        name: WeightFormat(name)  # type: ignore[arg-type]
        for name in BLOCKS_READ
        if name not in ("q4_1", "q4_k", "q5_k")
    },
}
SELDOM = {"fp8-block", *BLOCKS_READ} - {"q8_0"}
"""Formats of which every tile is compiled or none."""
DEVICES = {
    "sm_80": GpuLimits(shared_bytes=163 * 1024, has_wide_accumulators=False),
    "sm_90": GpuLimits(),
    "sm_100": GpuLimits(),
    "sm_86": GpuLimits(shared_bytes=99 * 1024, has_wide_accumulators=False),
    "sm_89": GpuLimits(shared_bytes=99 * 1024, has_wide_accumulators=False),
    "sm_120": GpuLimits(shared_bytes=99 * 1024, has_wide_accumulators=False),
    "gfx942": GpuLimits(shared_bytes=64 * 1024, has_wide_accumulators=False),
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
    T, K, E, D, _ = QWEN3.values()
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
    T, K, E, D, F = QWEN3.values()
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
    is_chained = target in ("sm_90", "sm_100")
    between = partial(between_products, is_chained=is_chained)
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
    few, many_rows = packed_calls(target, every_tile=every_tile)
    yield ("sm_80", "sm_86", "sm_89", "sm_100"), few
    yield ("sm_90", "sm_120", "sm_86", "sm_80"), many_rows
    yield ("sm_100", "sm_90"), block_sparse_calls(device, every_tile=every_tile)
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


def main() -> None:
    tiles, *targets = sys.argv[1:]
    if tiles == "turns":
        for target in (*LARGE, *SMALL):
            every = (launched_names(call) for _, call in calls(target, every_tile=False))
            sys.stdout.write(" ".join((target, *{name for names in every for name in names})))
            sys.stdout.write("\n")
    for target in targets:
        for description, call in calls(target, every_tile=tiles == "all"):
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
