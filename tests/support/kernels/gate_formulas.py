"""Each gate's formula written a second time, as a dense matrix of weights, one token at a time.

Plain loops and sorting over small tensors; nothing is taken from the product but the gate's
parameters. Randomness is drawn anew from a generator with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_runtime.layer import MoELayer

Formula = Callable[[MoELayer, Tensor], Tensor]
VOCAB = 40


def random_source() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def token_numbers(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) * 7 % VOCAB


def previous_scores(num_tokens: int, num_scores: int) -> Tensor:
    return torch.randn(num_tokens, num_scores, dtype=torch.float64, generator=random_source())


def linear_scores(layer: MoELayer, x: Tensor) -> Tensor:
    return torch.stack([layer.gate.weight @ row for row in x])


def softmax(row: Tensor) -> Tensor:
    return row.exp() / row.exp().sum()


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


def shares(scores: Tensor, chosen: list[int]) -> dict[int, Tensor]:
    """The chosen scores divided by their sum; a single one as it is."""
    total = sum(scores[e] for e in chosen) if len(chosen) > 1 else 1.0
    return {e: scores[e] / total for e in chosen}


def by_row(weights_of: Callable[[Any, Tensor], dict[int, Tensor]]) -> Formula:
    """A formula for the scores of one token."""

    def formula(layer: MoELayer, x: Tensor) -> Tensor:
        rows = [weights_of(layer.gate, row) for row in linear_scores(layer, x)]
        return place(rows, layer.gate.num_experts, x)

    return formula


def softmax_before(renormalize: bool, scale: float = 1.0) -> Formula:
    @by_row
    def formula(gate: Any, row: Tensor) -> dict[int, Tensor]:
        probs = softmax(row)
        chosen = best(probs, gate.top_k)
        total = sum(probs[e] for e in chosen) if renormalize else 1.0
        return {e: scale * probs[e] / total for e in chosen}

    return formula


def softmax_of(row: Tensor, chosen: list[int]) -> dict[int, Tensor]:
    total = sum(row[e].exp() for e in chosen)
    return {e: row[e].exp() / total for e in chosen}


@by_row
def softmax_after(gate: Any, row: Tensor) -> dict[int, Tensor]:
    return softmax_of(row, best(row, gate.top_k))


@by_row
def sigmoid(gate: Any, row: Tensor) -> dict[int, Tensor]:
    scores = 1 / (1 + (-row).exp())
    return shares(scores, best(scores, gate.top_k))


@by_row
def deepseek(gate: Any, row: Tensor) -> dict[int, Tensor]:
    """Groups of experts by their two best scores, then the best experts of the kept groups."""
    size = gate.num_experts // gate.num_expert_groups
    scores = 1 / (1 + (-row).exp())
    groups = [scores[g * size : (g + 1) * size] for g in range(gate.num_expert_groups)]
    sums = torch.stack([sum(group[e] for e in best(group, 2)) for group in groups])
    kept = best(sums, gate.num_limited_groups)
    allowed = [e for g in kept for e in range(g * size, (g + 1) * size)]
    values = scores.tolist()
    chosen = sorted(allowed, key=lambda e: -values[e])[: gate.top_k]
    return {e: gate.scale * share for e, share in shares(scores, chosen).items()}


def cosine(layer: MoELayer, x: Tensor) -> Tensor:
    gate = layer.gate
    rows = []
    for token in x:
        projected = gate.projector @ token
        angles = [
            (projected @ center) / projected.norm() / center.norm() for center in gate.centers
        ]
        probs = softmax(torch.stack(angles) * gate.log_scale.exp())
        chosen = best(probs, gate.top_k)
        rows.append(shares(probs, chosen))
    return place(rows, gate.num_experts, x)


def noisy(layer: MoELayer, x: Tensor) -> Tensor:
    gate = layer.gate
    scores = linear_scores(layer, x)
    if layer.training:
        noise = torch.randn(scores.shape, dtype=x.dtype, generator=random_source())
        sigma = torch.log1p((x @ gate.noise_weight.T).exp()) + 0.01
        scores = scores + noise * sigma
    rows = []
    for row in scores:
        rows.append(shares(softmax(row), best(row, gate.top_k)))
    return place(rows, gate.num_experts, x)


def switch(layer: MoELayer, x: Tensor) -> Tensor:
    noise = torch.rand(x.shape, dtype=x.dtype, generator=random_source())
    jitter = layer.gate.jitter
    scores = linear_scores(layer, x * (1 - jitter + 2 * jitter * noise))
    rows = [{best(row, 1)[0]: softmax(row)[best(row, 1)[0]]} for row in scores]
    return place(rows, layer.gate.num_experts, x)


def gshard(layer: MoELayer, x: Tensor) -> Tensor:
    """The paper's algorithm: two passes over each group with one counter for each expert."""
    gate, num_groups = layer.gate, layer.gate.num_groups
    draws = torch.rand(len(x), generator=random_source())
    size = len(x) // num_groups
    limit = math.inf
    if gate.capacity is not None:
        limit = math.ceil(gate.capacity.factor * 2 * size / gate.num_experts)
    rows: list[dict[int, Tensor]] = [{} for _ in x]
    scores = linear_scores(layer, x)
    for group in range(num_groups):
        taken = [0] * gate.num_experts
        members = range(group * size, (group + 1) * size)
        for choice in (0, 1):
            for t in members:
                probs = softmax(scores[t])
                pair = best(probs, 2)
                weight = probs[pair[choice]] / (probs[pair[0]] + probs[pair[1]])
                if choice == 1 and 2 * weight.item() <= draws[t].item():
                    continue
                if taken[pair[choice]] < limit:
                    rows[t][pair[choice]] = weight
                taken[pair[choice]] += 1
    return place(rows, gate.num_experts, x)


@by_row
def prototype(gate: Any, row: Tensor) -> dict[int, Tensor]:
    size = gate.num_experts // gate.top_k
    chosen = {}
    for first in range(0, gate.num_experts, size):
        probs = softmax(row[first : first + size])
        chosen[first + best(probs, 1)[0]] = probs[best(probs, 1)[0]]
    return chosen


@by_row
def sam(gate: Any, row: Tensor) -> dict[int, Tensor]:
    size = gate.num_experts // gate.num_expert_groups
    probs = softmax(row)
    groups = [probs[g * size : (g + 1) * size] for g in range(gate.num_expert_groups)]
    scores = torch.stack([g.sum() if gate.group_score == "sum" else g.max() for g in groups])
    group = best(scores, 1)[0]
    return shares(probs, [group * size + e for e in best(groups[group], gate.top_k)])


def expert_choice(layer: MoELayer, x: Tensor) -> Tensor:
    gate = layer.gate
    size = len(x) // gate.num_groups
    factor = 1.0 if gate.capacity is None else gate.capacity.factor
    num_taken = math.ceil(factor * size * gate.top_k / gate.num_experts)
    probs = torch.stack([softmax(row) for row in linear_scores(layer, x)])
    rows: list[dict[int, Tensor]] = [{} for _ in x]
    for first in range(0, len(x), size):
        for e in range(gate.num_experts):
            for t in best(probs[first : first + size, e], num_taken):
                rows[first + t][e] = probs[first + t, e]
    return place(rows, gate.num_experts, x)


def dense_to_sparse(layer: MoELayer, x: Tensor) -> Tensor:
    gate = layer.gate
    scores = linear_scores(layer, x)
    uniform = torch.rand(scores.shape, dtype=x.dtype, generator=random_source())
    rows = []
    for row, draw in zip(scores, uniform, strict=True):
        probs = softmax((row - (-draw.log()).log()) / gate.tau_start)
        used = {e for e, p in enumerate(probs.tolist()) if p > gate.threshold}
        rows.append({e: probs[e] for e in used | {best(probs, 1)[0]}})
    return place(rows, gate.num_experts, x)


def hashed(layer: MoELayer, x: Tensor) -> Tensor:
    table = layer.gate.table.tolist()
    one = x.new_ones(()) / layer.gate.top_k
    rows = [dict.fromkeys(table[t], one) for t in token_numbers(len(x)).tolist()]
    return place(rows, layer.gate.num_experts, x)


def sinkhorn(layer: MoELayer, x: Tensor) -> Tensor:
    """Sinkhorn's iterations as they are usually written, on the matrix of exponentials."""
    gate = layer.gate
    scores = linear_scores(layer, x)
    kernel = scores.detach().exp()
    columns = torch.ones(gate.num_experts, dtype=x.dtype)
    for _ in range(2000):
        rows_scale = 1 / len(x) / (kernel @ columns)
        columns = 1 / gate.num_experts / (kernel.T @ rows_scale)
    plan = rows_scale[:, None] * kernel * columns
    return from_chosen([best(row, gate.top_k) for row in plan], scores, layer, x)


def linear_programme(layer: MoELayer, x: Tensor) -> Tensor:
    """BASE as a transport problem: its vertices are whole numbers."""
    from scipy.optimize import linprog

    scores = linear_scores(layer, x)
    num_tokens, num_experts = scores.shape
    each_token = np.kron(np.eye(num_tokens), np.ones(num_experts))
    each_expert = np.kron(np.ones(num_tokens), np.eye(num_experts))
    solution = linprog(
        -scores.detach().numpy().ravel(),
        A_ub=each_expert,
        b_ub=np.full(num_experts, math.ceil(num_tokens / num_experts)),
        A_eq=each_token,
        b_eq=np.ones(num_tokens),
    )
    plan = torch.from_numpy(solution.x).view(num_tokens, num_experts)
    return from_chosen([best(row, 1) for row in plan], scores, layer, x)


def plain_top_k(layer: MoELayer, x: Tensor) -> Tensor:
    """What the assignment gates do in evaluation."""
    scores = linear_scores(layer, x)
    return from_chosen([best(row, layer.gate.top_k) for row in scores], scores, layer, x)


def from_chosen(chosen: list[list[int]], scores: Tensor, layer: MoELayer, x: Tensor) -> Tensor:
    rows = []
    for row, ids in zip(scores, chosen, strict=True):
        is_one = layer.gate.top_k == 1
        rows.append({ids[0]: 1 / (1 + (-row[ids[0]]).exp())} if is_one else softmax_of(row, ids))
    return place(rows, layer.gate.num_experts, x)


def moepp(layer: MoELayer, x: Tensor) -> Tensor:
    gate = layer.gate
    num_all = gate.num_experts + gate.zero_experts.total
    scores = linear_scores(layer, x) + previous_scores(len(x), num_all) @ gate.residual.T
    rows = []
    for row in scores:
        probs = softmax(row)
        chosen = [e for e in best(probs, gate.top_k) if e < num_all - gate.zero_experts.zero]
        total = sum(probs[e] for e in chosen) if gate.top_k > 1 else 1.0
        rows.append({e: probs[e] / total for e in chosen})
    return place(rows, num_all, x)


def sampled(layer: MoELayer, x: Tensor) -> Tensor:
    """RL-R: one draw a token against the running sums of the likeliest experts."""
    draws = torch.rand((len(x), 1), dtype=x.dtype, generator=random_source())
    rows = []
    for row, draw in zip(linear_scores(layer, x).detach(), draws, strict=True):
        probs = softmax(row)
        order = best(probs, len(probs))
        num_kept = sum(float(probs[order[:n]].sum()) < layer.gate.top_p for n in range(len(order)))
        sums = {e: probs[[f for f in order[:num_kept] if f <= e]].sum() for e in order[:num_kept]}
        expert = min(e for e in sums if sums[e] > draw * max(sums.values()))
        rows.append({expert: torch.ones_like(draw[0])})
    return place(rows, layer.gate.num_experts, x)


@by_row
def most_likely(_: Any, row: Tensor) -> dict[int, Tensor]:
    """RL-R in evaluation."""
    return {best(row, 1)[0]: torch.ones_like(row[0])}


def in_turn(renormalize: bool) -> Formula:
    """Experts 0, 1, 2, ... to the choices as they come, with the softmax of their scores."""

    def formula(layer: MoELayer, x: Tensor) -> Tensor:
        gate, expert = layer.gate, 0
        rows = []
        for row in linear_scores(layer, x):
            probs, chosen = softmax(row), []
            for _ in range(gate.top_k):
                chosen.append(expert)
                expert = (expert + 1) % gate.num_experts
            total = sum(probs[e] for e in chosen) if renormalize else 1.0
            rows.append({e: probs[e] / total for e in chosen})
        return place(rows, gate.num_experts, x)

    return formula
