"""Each gate's formula written a second time, as a dense matrix of weights, one token at a time.

Plain loops and argmax over small tensors; nothing is taken from the product but the gate's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_runtime.layer import MoELayer

Formula = Callable[[MoELayer, Tensor], Tensor]


@dataclass(frozen=True)
class GateCase:
    """A gate with options, and the matrix `[T, E]` of weights it must produce."""

    label: str
    gate: str
    formula: Formula
    num_experts: int = 6
    top_k: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    training: bool = True


def linear_scores(layer: MoELayer, x: Tensor) -> Tensor:
    return torch.stack([layer.gate.weight @ row for row in x])


def best(row: Tensor, k: int) -> list[int]:
    """The k largest entries, largest first."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda e: -values[e])[:k]


def place(rows: list[dict[int, Tensor]], num_experts: int, like: Tensor) -> Tensor:
    """Rows of `{expert: weight}` as a dense matrix that keeps gradients."""
    zero = like.new_zeros(())
    return torch.stack(
        [torch.stack([row.get(e, zero) for e in range(num_experts)]) for row in rows]
    )


def softmax_before(renormalize: bool, scale: float = 1.0) -> Formula:
    def formula(layer: MoELayer, x: Tensor) -> Tensor:
        rows = []
        for row in linear_scores(layer, x):
            probs = row.exp() / row.exp().sum()
            chosen = best(probs, layer.gate.top_k)
            total = sum(probs[e] for e in chosen) if renormalize else 1.0
            rows.append({e: scale * probs[e] / total for e in chosen})
        return place(rows, layer.gate.num_experts, x)

    return formula


def softmax_after(layer: MoELayer, x: Tensor) -> Tensor:
    rows = []
    for row in linear_scores(layer, x):
        chosen = best(row, layer.gate.top_k)
        total = sum(row[e].exp() for e in chosen)
        rows.append({e: row[e].exp() / total for e in chosen})
    return place(rows, layer.gate.num_experts, x)


def sigmoid(layer: MoELayer, x: Tensor) -> Tensor:
    rows = []
    for row in linear_scores(layer, x):
        scores = 1 / (1 + (-row).exp())
        chosen = best(scores, layer.gate.top_k)
        total = sum(scores[e] for e in chosen)
        rows.append({e: scores[e] / total for e in chosen})
    return place(rows, layer.gate.num_experts, x)


def deepseek(layer: MoELayer, x: Tensor) -> Tensor:
    """Groups of experts by their two best scores, then the best experts of the kept groups."""
    gate = layer.gate
    size = gate.num_experts // gate.num_expert_groups
    rows = []
    for row in linear_scores(layer, x):
        scores = 1 / (1 + (-row).exp())
        groups = [scores[g * size : (g + 1) * size] for g in range(gate.num_expert_groups)]
        sums = torch.stack([sum(group[e] for e in best(group, 2)) for group in groups])
        kept = best(sums, gate.num_limited_groups)
        allowed = [e for g in kept for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: -scores.tolist()[e])[: gate.top_k]
        total = sum(scores[e] for e in chosen)
        rows.append({e: gate.scale * scores[e] / total for e in chosen})
    return place(rows, gate.num_experts, x)


FORMULAS = [
    GateCase("softmax-renormalised", "softmax_topk", softmax_before(True)),
    GateCase(
        "softmax-top3-scale",
        "softmax_topk",
        softmax_before(False, 1.5),
        top_k=3,
        options={"renormalize": False, "scale": 1.5},
    ),
    GateCase("softmax-after", "softmax_topk", softmax_after, options={"softmax": "after"}),
    GateCase(
        "softmax-all-experts",
        "softmax_topk",
        softmax_before(False),
        top_k=6,
        options={"renormalize": False},
    ),
    GateCase("sigmoid", "sigmoid_topk", sigmoid, top_k=3),
    GateCase(
        "deepseek",
        "group_limited_topk",
        deepseek,
        num_experts=12,
        top_k=3,
        options={"num_expert_groups": 4, "num_limited_groups": 2, "scale": 2.5},
    ),
]
