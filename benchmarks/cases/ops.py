"""The case ``ops``: every op of ``kernels`` that a layer of experts is made of, on the CPU.

Each is a system of its own; its result is first compared with that of its reference.

T tokens, E experts, K choices, D model, F hidden; R routed rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.benchmarks.cases.expert_layers import CallsPlan, time_block
from moe_runtime.benchmarks.cases.layer_shapes import LayerSizes
from moe_runtime.benchmarks.suite.results import measure_systems
from moe_runtime.benchmarks.suite.runner import (
    BenchSystem,
    Number,
    PeerFailedError,
    Rules,
    peer_failures,
)
from moe_runtime.kernels.block_sparse import ExpertColumns, dsd, expert_topology, sdd
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import PackedExperts, StackedExperts, expert_mlp
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.token_sort import token_sort

SIZES = LayerSizes(num_experts=32, top_k=4, dim_model=1024, dim_hidden=512)
"""Of the default layer."""
# A result and the hidden state before it are rounded, by half a unit in the last place each, and
# sums are taken in another order: twice as much again, relative to the largest result.
_ROUNDINGS = 4


class OpCall(NamedTuple):
    """One op on its operands."""

    name: str
    call: Callable[[Any], Tensor]
    leaves: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpsPlan(CallsPlan):
    sizes: LayerSizes
    dtype: torch.dtype


class LayerWeights(NamedTuple):
    """Random weights of a layer; ``packed`` has three matrices ``[E * F, D]``."""

    gate_up: Tensor
    down: Tensor
    packed: tuple[Tensor, Tensor, Tensor]


def draw_weights(sizes: LayerSizes, dtype: torch.dtype) -> LayerWeights:
    num_experts, _, dim_d, dim_f = sizes
    generator = torch.Generator().manual_seed(0)
    first, second, third = (_leaf(generator, dtype, num_experts * dim_f, dim_d) for _ in range(3))
    return LayerWeights(
        gate_up=_leaf(generator, dtype, num_experts, 2 * dim_f, dim_d),
        down=_leaf(generator, dtype, num_experts, dim_d, dim_f),
        packed=(first, second, third),
    )


def op_calls(num_tokens: int, sizes: LayerSizes, weights: LayerWeights) -> Iterator[OpCall]:
    """Every op of a layer, on the operands that it has in one."""
    num_experts, top_k, dim_d, dim_f = sizes
    gate_up, down, (up, second, third) = weights
    generator, dtype = torch.Generator().manual_seed(num_tokens), gate_up.dtype
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    shares, ids = (part.contiguous() for part in scores.topk(top_k))
    shares = (shares / shares.sum(1, keepdim=True)).requires_grad_()
    num_rows = ids.numel()
    x = _leaf(generator, dtype, num_tokens, dim_d)
    yield OpCall("token_sort", lambda impl: token_sort(ids, num_experts, impl=impl).order_R)
    order = token_sort(ids, num_experts)
    product: dict[str, Any] = {"sorted_tokens": order, "gathers_choices": top_k}
    yield OpCall(
        "grouped_gemm",
        lambda impl: grouped_gemm(x, gate_up, order.offsets_E1, impl=impl, **product),
        (x, gate_up),
    )
    y = _leaf(generator, dtype, num_rows, dim_d)
    yield OpCall("combine", lambda impl: combine(y, shares, order, impl=impl), (y, shares))
    experts = StackedExperts(gate_up=gate_up, down=down)
    yield OpCall(
        "expert_mlp",
        lambda impl: expert_mlp(x, ids, shares, experts, activation="silu", impl=impl),
        (x, shares, gate_up, down),
    )
    columns = ExpertColumns.of([dim_f] * num_experts, block_columns=128)
    topology = expert_topology(order.offsets_E1, columns, num_rows=num_rows).trimmed()
    yield OpCall("sdd", lambda impl: sdd(x, up.T, topology, impl=impl, **product), (x, up))
    values = sdd(x, up.T, topology, **product).detach().requires_grad_()
    yield OpCall("dsd", lambda impl: dsd(values, second, topology, impl=impl), (values, second))
    packed = PackedExperts(gate=up, up=second, down=third, columns=columns)
    yield OpCall(
        "heterogeneous_mlp",
        lambda impl: expert_mlp(x, ids, shares, packed, activation="silu", impl=impl),
        (x, shares, up, second, third),
    )


def _leaf(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=generator, dtype=dtype)
    return values.mul_(shape[-1] ** -0.5).requires_grad_()


class OpSystem(BenchSystem):
    """An op as a system under test; results are compared at each number of tokens."""

    def __init__(self, calls: Mapping[int, OpCall], plan: OpsPlan) -> None:
        super().__init__(next(iter(calls.values())).name)
        self._calls, self._plan = calls, plan

    def repeat(self) -> Mapping[str, Number]:
        with peer_failures():
            return self._times()

    def _times(self) -> Mapping[str, Number]:
        if not self.compared:
            self.compared = len(self._calls)
            self.equal = sum(map(_is_near, self._calls.values()))
            if self.equal < self.compared:
                raise PeerFailedError(
                    "its result differs from its reference's by more than roundings allow"
                )
        return {
            name: median(time_block(_timed(self._calls[tokens], trains=trains), self._plan.block_s))
            for name, tokens, trains in self._plan.calls()
            if self._calls[tokens].leaves or not trains
        }


def _timed(op: OpCall, *, trains: bool) -> Callable[[int], object]:
    def forward(number: int) -> Tensor:
        del number
        with torch.no_grad():
            return op.call("auto")

    def both(number: int) -> object:
        del number
        out = op.call("auto")
        return torch.autograd.grad(out, op.leaves, torch.ones_like(out))

    return both if trains else forward


def _is_near(op: OpCall) -> bool:
    with torch.no_grad():
        found, expected = op.call("auto"), op.call("reference")
    if not found.is_floating_point():
        return torch.equal(found, expected)
    bound = _ROUNDINGS * torch.finfo(found.dtype).eps * float(expected.abs().max())
    return bool((found.double() - expected.double()).abs().max() <= bound)


def measure_ops(plan: OpsPlan, rules: Rules, settings: Mapping[str, Any]) -> dict[str, Any]:
    weights = draw_weights(plan.sizes, plan.dtype)
    by_tokens = {tokens: list(op_calls(tokens, plan.sizes, weights)) for tokens in plan.tokens}
    systems = [
        OpSystem(dict(zip(by_tokens, calls, strict=True)), plan)
        for calls in zip(*by_tokens.values(), strict=True)
    ]
    return measure_systems("ops", systems, plan.metrics(), rules, settings)
