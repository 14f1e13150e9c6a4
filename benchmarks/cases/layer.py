"""The case ``layer``: `MoELayer` beside transformers' block, routing included, on the same weights.

The block is Qwen3-MoE's, whose formula is that of `MoELayer` as it comes. Before the first
repetition results are compared: of two tokens with what the formula gives in float64, of all others
with this project's. The bound is that of ``experts``, and of the gate's logits, whose
rounding is a relative error of its size in a gate weight. Tokens for which roundings may choose
another expert, the next one being so near, are not compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_runtime.benchmarks.cases.expert_layers import OURS, LayerSizes, kinds_of_calls, time_block
from moe_runtime.benchmarks.cases.experts import distance
from moe_runtime.benchmarks.suite.results import Metric, measure_systems
from moe_runtime.benchmarks.suite.runner import (
    BenchSystem,
    Number,
    Rules,
    peer_failures,
)
from moe_runtime.layer import MoELayer

PEERS = ("eager", "grouped_mm")
_IN_FLOAT64 = 2
_FEW = 8


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What is asked of every system.

    Attributes:
        sizes: of the layer.
        dtype: of weights and tokens.
        tokens: numbers of tokens of a call.
        trains: whether calls with backward are measured, too.
        block_s: seconds that a repetition takes for each kind of call.
    """

    sizes: LayerSizes
    dtype: torch.dtype
    tokens: Sequence[int]
    trains: bool
    block_s: float

    def calls(self) -> Iterator[tuple[str, int, bool]]:
        """As ``kinds_of_calls``."""
        return kinds_of_calls(self.tokens, trains=self.trains)

    def x(self, num_tokens: int) -> Tensor:
        """Tokens ``[1, T, D]``."""
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
    if not trains:
        with torch.no_grad():
            return block(x)[0]
    leaf = x.clone().requires_grad_()
    block(leaf).backward(x)
    block.zero_grad(set_to_none=True)
    assert leaf.grad is not None
    return leaf.grad[0]


@dataclass(frozen=True)
class Expected:
    """What results are held to.

    Attributes:
        ours: this project's results, ``[T, D]``.
        clear: the tokens that are compared, ``[T]`` bool.
        exact: of the first of these, in float64.
        bound: relative distance that roundings allow.
    """

    ours: Tensor
    clear: Tensor
    exact: Tensor
    bound: float

    def num_equal(self, found: Tensor) -> int:
        """How many of the tokens compared are near enough."""
        near = distance(found[self.clear], self.ours[self.clear]) <= 2 * self.bound
        few = found[self.clear][: len(self.exact)]
        near[: len(few)] &= distance(few, self.exact) <= self.bound  # which no NaN is
        return int(near.sum())


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
    few = x[0][clear][:_IN_FLOAT64].double().requires_grad_(trains)
    exact = formula(weights, few, sizes.top_k)
    if trains:
        exact.backward(few.detach())
        assert few.grad is not None
        exact = few.grad
    return Expected(run_block(layer, x, trains=trains), clear, exact.detach(), bound)


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


class BlockSystem(BenchSystem):
    """A block under test; tokens are compared."""

    def __init__(
        self, name: str, block: nn.Module, plan: LayerPlan, expected: Mapping[str, Expected]
    ) -> None:
        super().__init__(name)
        self._block, self._plan, self._expected = block, plan, expected

    def repeat(self) -> Mapping[str, Number]:
        """Measures every kind of call; before the first time, compares results.

        Raises:
            PeerFailedError: it cannot compute this layer, or its results differ.
        """
        with peer_failures():
            if not self.compared:
                self._compare()
            return {
                name: time_block(self._call(tokens, trains=trains), self._plan.block_s)
                for name, tokens, trains in self._calls()
            }

    def _calls(self) -> Iterator[tuple[str, int, bool]]:
        # Eager's backward fills a gradient of all experts for each: a minute for many experts.
        is_slow = self.name == "eager" and self._plan.sizes.num_experts > _FEW
        return (call for call in self._plan.calls() if not (is_slow and call[2]))

    def _call(self, num_tokens: int, *, trains: bool) -> Callable[[int], object]:
        x = self._plan.x(num_tokens)
        return lambda _: run_block(self._block, x, trains=trains)

    def _compare(self) -> None:
        for name, tokens, trains in self._calls():
            found = run_block(self._block, self._plan.x(tokens), trains=trains)
            self.compared += int(self._expected[name].clear.sum())
            self.equal += self._expected[name].num_equal(found)
        self.require_all_equal()


def measure_layer(plan: LayerPlan, rules: Rules, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measures `MoELayer` and transformers' blocks; the content of a results file."""
    layer = make_layer(plan)
    expected = {
        name: expect(layer, plan, tokens, trains=trains) for name, tokens, trains in plan.calls()
    }
    blocks: dict[str, nn.Module] = {OURS: layer}
    blocks |= {name: transformers_block(name, layer, plan.sizes) for name in PEERS}
    systems = [BlockSystem(name, block, plan, expected) for name, block in blocks.items()]
    metrics = {name: Metric("s") for name, _, _ in plan.calls()}
    return measure_systems("layer", systems, metrics, rules, settings)
