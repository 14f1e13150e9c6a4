"""Measures tiles: only when asked to, on the GPU at hand, for shapes that are named.

Shape suffixes: T tokens, R sorted rows, E experts, D model, F hidden, Z = 2F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.backward import activation_backward, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.table import TileKey, tile_key
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, ProductKind, Tile
from moe_runtime.kernels.grouped_gemm.tiles import describe_device, tile_by_rule
from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout
from moe_runtime.kernels.token_sort import token_sort

# Sums of a program that one thread can keep in registers beside its operands.
_SUMS_OF_A_THREAD = 128


class LayerBatch(NamedTuple):
    """One layer of experts and a batch: T, D, F, E, K."""

    num_tokens: int
    dim_model: int
    dim_hidden: int
    num_experts: int
    num_choices: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One product of a layer.

    Attributes:
        name: What it computes.
        key: What its tile is kept for.
        flops: Of one run.
        rule: The tile that it has without a table.
        run: Computes it in a tile.
    """

    name: str
    key: TileKey
    flops: int
    rule: Tile
    run: Callable[[Tile], Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a problem's tiles took.

    Attributes:
        problem: The product.
        tile: The fastest tile.
        seconds: Of the fastest.
        rule_seconds: Of the rule's tile.
        num_tried: Tiles that ran.
        num_refused: Tiles that the device could not hold or the compiler not compile.
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
) -> Iterator[Measured]:
    """Times every tile of every problem, one problem after another.

    The rule's tile is timed first and wins ties. It must run; any other may be refused.

    Args:
        problems: What to tune. A product that two layers share is measured once.
        candidates: Tiles to try beside the rule's.
        seconds_of: Runs a call often enough and says what it takes.
        refusals: What a tile that does not fit raises.
    """
    done: set[TileKey] = set()
    for problem in problems:
        if problem.key in done:
            continue
        done.add(problem.key)
        seconds = {problem.rule: seconds_of(partial(problem.run, problem.rule))}
        num_refused = 0
        for tile in candidates(problem):
            if tile in seconds:
                continue
            try:
                seconds[tile] = seconds_of(partial(problem.run, tile))
            except refusals:
                num_refused += 1
        best = min(seconds, key=lambda tile: seconds[tile])
        yield Measured(
            problem, best, seconds[best], seconds[problem.rule], len(seconds), num_refused
        )


def candidate_tiles(problem: Problem, device: GpuLimits) -> list[Tile]:
    """Tiles worth trying: those that the device holds and that fit the rows of an expert."""
    kind, bits, _, _, rows = problem.key
    found = []
    for block_m, block_n, block_k, num_warps, num_stages in product(
        (16, 32, 64, 128), (64, 128, 256), (32, 64, 128), (4, 8), (3, 4)
    ):
        tile = Tile(block_m, block_n, block_k, num_warps, num_stages)
        fits = tile.fitted(bits // 8, device) == tile
        sums = block_m * block_n // (num_warps * 32)
        is_sensible = sums <= _SUMS_OF_A_THREAD and (sums >= 16 or num_warps == 4)
        # A weight gradient's tile spans weights; of any other it spans rows, some of them empty.
        if kind == "dw":
            is_sensible &= block_m >= 64 and block_n >= 128
        else:
            is_sensible &= block_m <= max(16, 2 * rows) and block_m >= min(64, rows // 2)
        # The epilogue that goes back through an activation cuts a tile into at most four parts.
        if fits and is_sensible and not (kind == "down_act_backward" and block_n > 128):
            found.append(tile)
    return found


def layer_problems(
    shape: LayerBatch, dtype: torch.dtype, device: torch.device, *, impl: str = "auto"
) -> list[Problem]:
    """Every product of a gated layer, forward and backward, with tokens spread at random.

    Args:
        shape: The layer and the batch.
        dtype: Of tokens and weights.
        device: Where it runs.
        impl: Of `token_sort`.
    """
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
