"""The case ``ops``: every op of ``kernels`` in a layer of experts, on the CPU.

Each op is a system, whose result is first compared with its reference.

T tokens, E experts, K choices, D model, F hidden; R routed rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.benchmarks.cases.expert_layers import CallsPlan, CallsSystem, TimedCall
from moe_runtime.benchmarks.suite import Rules, measure_systems
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.kernels.block_sparse import ExpertColumns, dsd, expert_topology, sdd
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import PackedExperts, StackedExperts, expert_mlp
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.token_sort import token_sort

SIZES = LayerSizes(num_experts=32, top_k=4, dim_model=1024, dim_hidden=512)
"""Of the default layer."""
# Results and hidden states are rounded by half a unit in the last place, and sums have another
# order: as much again twice, relative to the largest result.
_ROUNDINGS = 4


class OpCall(NamedTuple):
    """One op with its operands."""

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
    """Every op of a layer, with the operands that it has there."""
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


def op_system(ops: Mapping[int, OpCall], plan: OpsPlan) -> CallsSystem:
    """An op as a system under test, checked at each number of tokens."""

    def forward(op: OpCall, _: int) -> Tensor:
        with torch.no_grad():
            return op.call("auto")

    def both(op: OpCall, _: int) -> object:
        out = op.call("auto")
        return torch.autograd.grad(out, op.leaves, torch.ones_like(out))

    calls = {
        name: TimedCall(partial(both, ops[tokens]), lambda _: (0, 0))
        if trains
        else TimedCall(partial(forward, ops[tokens]), partial(_judged, ops[tokens]))
        for name, tokens, trains in plan.calls()
        if ops[tokens].leaves or not trains
    }
    difference = "results differ from those of the reference by more than roundings allow"
    name = next(iter(ops.values())).name
    return CallsSystem(name, calls, plan.block_s, difference=difference)


def _judged(op: OpCall, found: Tensor) -> tuple[int, int]:
    with torch.no_grad():
        expected = op.call("reference")
    if not found.is_floating_point():
        return 1, int(torch.equal(found, expected))
    bound = _ROUNDINGS * torch.finfo(found.dtype).eps * float(expected.abs().max())
    return 1, int((found.double() - expected.double()).abs().max() <= bound)


def measure_ops(plan: OpsPlan, rules: Rules, settings: Mapping[str, Any]) -> dict[str, Any]:
    weights = draw_weights(plan.sizes, plan.dtype)
    by_tokens = {tokens: list(op_calls(tokens, plan.sizes, weights)) for tokens in plan.tokens}
    systems = [
        op_system(dict(zip(by_tokens, calls, strict=True)), plan)
        for calls in zip(*by_tokens.values(), strict=True)
    ]
    return measure_systems("ops", systems, plan.metrics(), rules, settings)
