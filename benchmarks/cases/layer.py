"""The case ``layer``: `MoELayer` beside Qwen3-MoE's block in transformers, on the same weights.

Results are compared as in ``experts``, with a bound that includes the rounding of the gate's
logits. Tokens for which roundings may choose another expert are not compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_runtime.benchmarks.cases.expert_layers import (
    FEW,
    IN_FLOAT64,
    OURS,
    CallsPlan,
    CallsSystem,
    TimedCall,
    num_near,
    output_or_gradient,
)
from moe_runtime.benchmarks.cases.layer_shapes import LayerSizes
from moe_runtime.benchmarks.suite import Rules, measure_systems
from moe_runtime.layer import MoELayer

PEERS = ("eager", "grouped_mm")


@dataclass(frozen=True, kw_only=True)
class LayerPlan(CallsPlan):
    sizes: LayerSizes
    dtype: torch.dtype

    def x(self, num_tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(1, num_tokens, self.sizes.dim_model, generator=generator)
        return x.to(self.dtype)


def make_layer(plan: LayerPlan) -> MoELayer:
    """Ours, with random weights."""
    sizes = plan.sizes
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return MoELayer(
            sizes.dim_model, sizes.dim_hidden, sizes.num_experts, sizes.top_k, dtype=plan.dtype
        )


def transformers_block(name: str, layer: MoELayer, sizes: LayerSizes) -> nn.Module:
    """Qwen3-MoE's block with one of transformers' implementations, on the layer's weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=sizes.dim_model,
        moe_intermediate_size=sizes.dim_hidden,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        **cast(Any, {"experts_implementation": name}),
    )
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.load_state_dict(layer.state_dict(), assign=True)
    return block


def run_block(block: nn.Module, x: Tensor, *, trains: bool) -> Tensor:
    """A call: the output, or the gradient of x; ``[T, D]``."""
    found = output_or_gradient(block, x, trains=trains)
    block.zero_grad(set_to_none=True)
    return found[0]


@dataclass(frozen=True)
class Expected:
    """Our results ``[T, D]``, exact ones of the first tokens; ``clear`` ``[T]`` are compared."""

    ours: Tensor
    clear: Tensor
    exact: Tensor
    bound: float

    def judge(self, found: Tensor) -> tuple[int, int]:
        """How many tokens are compared, and how many of them are near enough."""
        near = num_near(found[self.clear], self.ours[self.clear], self.exact, self.bound)
        return int(self.clear.sum()), near


def expect(layer: MoELayer, plan: LayerPlan, num_tokens: int, *, trains: bool) -> Expected:
    """Computes what a call's results are held to."""
    sizes, x = plan.sizes, plan.x(num_tokens)
    own, fp32 = (torch.finfo(dtype).eps / 2 for dtype in (plan.dtype, torch.float32))
    weights = {name: value.detach() for name, value in layer.named_parameters()}
    logits = x[0].double() @ weights["gate.weight"].double().T
    norms = x[0].double().norm(dim=-1, keepdim=True) * weights["gate.weight"].double().norm(dim=-1)
    error = own * logits.abs().amax(-1) + sizes.dim_model * fp32 * norms.amax(-1)
    ranked = logits.sort(descending=True).values
    clear = torch.ones(num_tokens, dtype=torch.bool)
    if sizes.top_k < sizes.num_experts:
        clear = ranked[:, sizes.top_k - 1] - ranked[:, sizes.top_k] > 4 * error
    roundings = (sizes.top_k + 7) * own + (sizes.dim_model + sizes.dim_hidden) * fp32
    bound = (2 if trains else 1) * (roundings + 2 * float(error.max()))
    few = x[0][clear][:IN_FLOAT64].double()
    exact = output_or_gradient(lambda x: formula(weights, x, sizes.top_k), few, trains=trains)
    return Expected(run_block(layer, x, trains=trains), clear, exact, bound)


def formula(weights: Mapping[str, Tensor], x: Tensor, top_k: int) -> Tensor:
    """The layer in float64, token by token; ``[T, D]``."""
    probabilities = (x @ weights["gate.weight"].double().T).softmax(-1)
    shares, ids = probabilities.topk(top_k, dim=-1)
    shares = shares / shares.sum(-1, keepdim=True)
    rows = []
    for token, experts, of_experts in zip(x, ids.tolist(), shares, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(experts, of_experts, strict=True):
            both = weights["experts.gate_up_proj"][expert].double() @ token
            gate, up = both.chunk(2)
            hidden = gate * torch.sigmoid(gate) * up
            total = total + share * (weights["experts.down_proj"][expert].double() @ hidden)
        rows.append(total)
    return torch.stack(rows) if rows else x


def block_system(
    name: str, block: nn.Module, plan: LayerPlan, expected: Mapping[str, Expected]
) -> CallsSystem:
    def run(x: Tensor, trains: bool, _: int) -> Tensor:
        return run_block(block, x, trains=trains)

    slow = name == "eager" and plan.sizes.num_experts > FEW
    calls = {
        metric: TimedCall(partial(run, plan.x(tokens), trains), expected[metric].judge)
        for metric, tokens, trains in plan.calls()
        if not (trains and slow)
    }
    return CallsSystem(name, calls, plan.block_s)


def measure_layer(plan: LayerPlan, rules: Rules, settings: Mapping[str, Any]) -> dict[str, Any]:
    layer = make_layer(plan)
    expected = {
        name: expect(layer, plan, tokens, trains=trains) for name, tokens, trains in plan.calls()
    }
    blocks: dict[str, nn.Module] = {OURS: layer}
    blocks |= {name: transformers_block(name, layer, plan.sizes) for name in PEERS}
    systems = [block_system(name, block, plan, expected) for name, block in blocks.items()]
    return measure_systems("layer", systems, plan.metrics(), rules, settings)
