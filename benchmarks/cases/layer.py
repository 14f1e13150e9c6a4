"""The case ``layer``: `MoELayer` and transformers' Qwen3-MoE block on the same weights.

Results are compared as in ``experts``, with a bound that includes the rounding of the gate's
logits. Tokens whose choice of experts depends on rounding are not drawn.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_runtime.benchmarks.cases.expert_layers import (
    FEW,
    OURS,
    ExpertLayer,
    ExpertsPlan,
    measure_experts,
)
from moe_runtime.benchmarks.suite import Rules
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.layer import MoELayer

PEERS = ("eager", "grouped_mm")


class Blocks(nn.Module):
    """Our layer with random weights, and transformers' blocks on the same; one of them computes."""

    def __init__(self, sizes: LayerSizes, dtype: torch.dtype) -> None:
        super().__init__()
        experts, top_k, dim_model, dim_hidden = sizes
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.ours = MoELayer(dim_model, dim_hidden, experts, top_k, dtype=dtype)
        others = {name: transformers_block(name, self.ours, sizes) for name in PEERS}
        self.blocks, self.chosen = nn.ModuleDict({OURS: self.ours, **others}), OURS

    def forward(self, x_TD: Tensor, *_: Tensor) -> Tensor:
        return self.blocks[self.chosen](x_TD[None])[0]


def transformers_block(name: str, layer: MoELayer, sizes: LayerSizes) -> nn.Module:
    """Qwen3-MoE's block with one implementation of transformers, on the layer's weights."""
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


class BlockLayer(ExpertLayer):
    """A whole layer, whose gate chooses the experts."""

    def select(self, implementation: str) -> None:
        self.module.chosen = implementation

    def contenders(self, num_tokens: int, *, trains: bool) -> list[str]:
        del num_tokens
        return [
            name for name in PEERS if not (name == "eager" and trains and self.num_experts > FEW)
        ]

    def tokens(self, num_tokens: int) -> Tensor:
        return self._clear(num_tokens)[0]

    def input_rounding(self, num_tokens: int) -> float:
        return torch.finfo(self.dtype).eps / 2 + 2 * self._clear(num_tokens)[1]

    def _clear(self, num_tokens: int) -> tuple[Tensor, float]:
        """Tokens ``[T, D]`` whose choices no rounding of logits changes, and the largest logit."""
        drawn, top_k = super().tokens(2 * num_tokens + 64), self.top_k
        x, gate = drawn.double(), self.module.ours.gate.weight.detach().double()
        own, fp32 = (torch.finfo(dtype).eps / 2 for dtype in (self.dtype, torch.float32))
        logits, norms = x @ gate.T, x.norm(dim=-1) * gate.norm(dim=-1).max()
        errors = own * logits.abs().amax(-1) + self.dim_model * fp32 * norms
        ranked = logits.sort(descending=True).values
        clear = torch.ones(len(x), dtype=torch.bool)
        if top_k < self.num_experts:
            clear = ranked[:, top_k - 1] - ranked[:, top_k] > 4 * errors
        kept = clear.nonzero()[:num_tokens, 0]
        if len(kept) < num_tokens:
            raise ValueError(f"{self.dtype} rounds too roughly: most tokens could go elsewhere")
        return drawn[kept], float(errors[kept].max())

    def in_float64(self, ids: Tensor) -> tuple[Callable[..., Tensor], Tensor]:
        weights = {name: value.detach() for name, value in self.module.ours.named_parameters()}
        return lambda x, *_: formula(weights, x, self.top_k), ids


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
    return torch.stack(rows)


def make_layer(sizes: LayerSizes, dtype: torch.dtype) -> BlockLayer:
    return BlockLayer(module=Blocks(sizes, dtype), **sizes._asdict())


def measure_layer(plan: ExpertsPlan, rules: Rules, settings: Mapping[str, Any]) -> dict[str, Any]:
    return measure_experts(plan, rules, settings, case="layer", others=PEERS)
