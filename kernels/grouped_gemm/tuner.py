"""Measures tiles for given shapes on this GPU, only on request.

Shape suffixes: T tokens, R sorted rows, E experts, D model, F hidden, Z = 2F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.backward import activation_backward, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.tile import (
    GpuLimits,
    ProductKind,
    Tile,
    TileKey,
    describe_device,
    tile_by_rule,
    tile_key,
)
from moe_runtime.kernels.operands import ActivationSpec, GateLayout
from moe_runtime.kernels.token_sort import token_sort

# rows, columns, depth and warps of tiles, for experts with many rows and with few
_WIDE = (
    (128, 256, 64, 8),
    (128, 128, 64, 4),
    (128, 128, 64, 8),
    (256, 128, 64, 8),
    (64, 256, 64, 4),
    (64, 128, 64, 4),
)
_NARROW = tuple(product((16, 32, 64), (64, 128), (64, 128), (4,)))
_FINALISTS, _ROUNDS = 4, 2  # the fastest are timed again in turn, as a GPU's speed varies
_SHARED_REGISTERS = 128  # per thread, so that two programs of eight warps share a multiprocessor


class LayerBatch(NamedTuple):
    """One layer of experts and a batch: T, D, F, E, K."""

    num_tokens: int
    dim_model: int
    dim_hidden: int
    num_experts: int
    num_choices: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One product of a layer: its key in the table, the rule's tile, and a run in any tile."""

    name: str
    key: TileKey
    flops: int
    rule: Tile
    run: Callable[[Tile], Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest tile of a problem, and the rule's time.

    Attributes:
        num_tried: Tiles that ran.
        num_refused: Tiles that did not fit or compile.
    """

    problem: Problem
    tile: Tile
    seconds: float
    rule_seconds: float
    num_tried: int
    num_refused: int


def tune(
    problems: Iterable[Problem],
    candidates: Callable[[Problem], Iterable[Tile]],
    seconds_of: Callable[[Callable[[], Any]], float],
    *,
    refusals: tuple[type[Exception], ...] = (),
    num_threads: int = 1,
) -> Iterator[Measured]:
    """Times every tile of every problem, and the fastest ones again in turn.

    The rule's tile is timed first, wins ties and must run; others may raise one of `refusals`.
    `seconds_of` times a call. A product that two layers share is measured once. `num_threads`
    compile at once before anything is timed.
    """
    done: set[TileKey] = set()
    for problem in problems:
        if problem.key in done:
            continue
        done.add(problem.key)
        tiles = [tile for tile in dict.fromkeys(candidates(problem)) if tile != problem.rule]
        fits = partial(_runs, problem, refusals=refusals)
        with ThreadPoolExecutor(num_threads) as pool:
            tried = [tile for tile, fit in zip(tiles, pool.map(fits, tiles), strict=True) if fit]
        seconds: dict[Tile, float] = {}
        turns = [problem.rule, *tried]
        for _ in range(1 + _ROUNDS):
            for tile in turns:
                found = seconds_of(partial(problem.run, tile))
                seconds[tile] = min(found, seconds.get(tile, found))
            turns = sorted(seconds, key=lambda tile: seconds[tile])[:_FINALISTS]
            if len(seconds) == 1:
                break
        best = turns[0]
        yield Measured(
            problem,
            best,
            seconds[best],
            seconds[problem.rule],
            len(seconds),
            len(tiles) - len(tried),
        )


def _runs(problem: Problem, tile: Tile, *, refusals: tuple[type[Exception], ...]) -> bool:
    try:
        problem.run(tile)
    except refusals:
        return False
    return True


def candidate_tiles(problem: Problem, device: GpuLimits) -> list[Tile]:
    """Tiles worth trying: those that the device holds and that fit the rows of an expert."""
    kind, bits, _, _, rows = problem.key
    is_filled = kind == "dw" or rows >= 64
    found = []
    for sizes, num_stages in product(_WIDE if is_filled else _NARROW, (4, 3)):
        tile = Tile(*sizes, num_stages)
        fits = tile.fitted(bits // 8, device) == tile
        # the tile of a weight gradient spans weights, others span rows, some of them empty
        if fits and (kind == "dw" or tile.block_m <= max(16, 2 * rows)):
            found.append(tile)
    return [variant for tile in found for variant in _variants(tile, kind, device)]


def _variants(tile: Tile, kind: ProductKind, device: GpuLimits) -> Iterator[Tile]:
    """A tile, and other variants of wide ones."""
    yield tile
    if tile.block_m * tile.block_n <= 128 * 64:
        return
    if kind in ("plain", "gated") and device.has_wide_accumulators:
        yield replace(tile, is_persistent=True)
    elif kind == "down_act_backward" and tile.num_warps == 8 and tile.block_n == 128:
        yield replace(tile, max_registers=_SHARED_REGISTERS)
    if kind == "dw":
        yield replace(tile, group_m=1)


def layer_problems(
    shape: LayerBatch, dtype: torch.dtype, device: torch.device, *, impl: str = "auto"
) -> list[Problem]:
    """Every product of a gated layer, forward and backward, with tokens spread at random."""
    T, D, F, E, K = shape
    rows = T * K
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        values = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
        return (values * sizes[-1] ** -0.5).to(dtype)

    ids = torch.rand(T, E, generator=generator, device=device).topk(K).indices
    order = token_sort(ids, E, impl=impl)  # type: ignore[arg-type]
    groups = Groups(order.offsets_E1, rows, None, order.order_R, num_choices=K)
    x, dout, gate_up, down = draw(T, D), draw(T, D), draw(E, 2 * F, D), draw(E, D, F)
    hidden, pre = draw(rows, F), draw(rows, 2 * F)
    scale = torch.rand(rows, generator=generator, device=device)
    spec = ActivationSpec("silu")

    def problem(
        name: str, kind: ProductKind, dim_n: int, dim_k: int, run: Callable[..., Any]
    ) -> Problem:
        sizes: dict[str, Any] = {"num_rows": rows, "num_experts": E, "dim_n": dim_n}
        rule = tile_by_rule(kind, **sizes, dtype=dtype)
        return Problem(
            name,
            tile_key(kind, **sizes, dim_k=dim_k, dtype=dtype),
            2 * rows * dim_n * dim_k,
            rule.fitted(dtype.itemsize, describe_device(device)),
            lambda tile: run(tile=tile),
        )

    out_RD, out_RF = x.new_empty(rows, D), x.new_empty(rows, F)
    out_up, out_down = torch.empty_like(gate_up), torch.empty_like(down)
    layout = GateLayout()
    activated = partial(activated_product, x, gate_up, groups, spec, layout, out=out_RF, pre=pre)
    down_product = partial(plain_product, hidden, down, groups, out=out_RD)
    down_back = partial(activation_backward, dout, down, pre, scale, groups, spec, layout)
    x_grad = partial(plain_product, pre, gate_up.transpose(1, 2), groups, out=out_RD)
    up_grad = partial(weight_grad, pre, x, groups, out_SNK=out_up, right_divisor=K)
    down_grad = partial(weight_grad, dout, hidden, groups, out_SNK=out_down, left_divisor=K)
    return [
        problem("gate and up, activated", "gated", 2 * F, D, partial(activated, gathers=True)),
        problem("down", "plain", D, F, down_product),
        problem("back through down and activation", "down_act_backward", F, D, down_back),
        problem("gradient of x", "plain", D, 2 * F, x_grad),
        problem("gradient of gate and up", "dw", D, 2 * F, up_grad),
        problem("gradient of down", "dw", F, D, down_grad),
    ]


def parse_shape(text: str) -> LayerBatch:
    """A shape from `tokens,hidden,intermediate,experts,top_k`.

    Raises:
        ValueError: Not five numbers from 1 on, or more choices than experts.
    """
    parts: Sequence[str] = text.split(",")
    if len(parts) != 5 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ValueError(
            f"a shape is tokens,hidden,intermediate,experts,top_k, five numbers from 1 on; got "
            f"{text!r}"
        )
    shape = LayerBatch(*map(int, parts))
    if shape.num_choices > shape.num_experts:
        raise ValueError(
            f"top_k must be at most the number of experts ({shape.num_experts}), got "
            f"{shape.num_choices}"
        )
    return shape
