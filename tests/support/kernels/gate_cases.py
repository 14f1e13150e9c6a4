"""Every gate with the options that tests try, and the formula that judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gate_formulas import (
    VOCAB,
    Formula,
    cosine,
    deepseek,
    dense_to_sparse,
    expert_choice,
    gshard,
    hashed,
    in_turn,
    linear_programme,
    moepp,
    most_likely,
    noisy,
    plain_top_k,
    prototype,
    sam,
    sampled,
    sigmoid,
    sinkhorn,
    softmax_after,
    softmax_before,
    switch,
)

from moe_runtime.routing import ZeroExpertCounts


@dataclass(frozen=True)
class GateCase:
    """A gate with options, and the matrix `[T, E]` of weights it must produce."""

    label: str
    gate: str
    formula: Formula
    num_experts: int = 6
    top_k: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    training: bool = True


GROUPED = {"num_groups": 3, "capacity_factor": 0.8}
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
    GateCase("cosine", "cosine_topk", cosine, options={"projection_size": 8}),
    GateCase("noisy", "noisy_topk", noisy, top_k=3),
    GateCase("noisy-eval", "noisy_topk", noisy, training=False),
    GateCase("switch", "switch", switch, top_k=1, options={"jitter": 0.3}),
    GateCase("gshard", "gshard", gshard),
    GateCase("gshard-groups-capacity", "gshard", gshard, layer=GROUPED),
    GateCase("prototype", "prototype", prototype, top_k=3),
    GateCase("sam-sum", "sam", sam, options={"num_expert_groups": 3}),
    GateCase("sam-max", "sam", sam, options={"num_expert_groups": 2, "group_score": "max"}),
    GateCase("expert-choice", "expert_choice", expert_choice),
    GateCase("expert-choice-groups", "expert_choice", expert_choice, layer=GROUPED),
    GateCase(
        "dense-to-sparse", "dense_to_sparse", dense_to_sparse, top_k=1, options={"threshold": 0.15}
    ),
    GateCase("hash", "hash", hashed, top_k=2, options={"vocab_size": VOCAB}),
    GateCase(
        "sinkhorn",
        "sinkhorn",
        sinkhorn,
        top_k=1,
        options={"max_iterations": 500, "tolerance": 1e-12},
    ),
    GateCase(
        "sinkhorn-top2",
        "sinkhorn",
        sinkhorn,
        top_k=2,
        options={"max_iterations": 500, "tolerance": 1e-12},
    ),
    GateCase("sinkhorn-eval", "sinkhorn", plain_top_k, training=False),
    GateCase("base", "base", linear_programme, top_k=1),
    GateCase("base-eval", "base", plain_top_k, top_k=1, training=False),
    GateCase("rl-r", "rl_r", sampled, top_k=1, options={"top_p": 0.8}),
    GateCase("rl-r-eval", "rl_r", most_likely, top_k=1, training=False),
    GateCase("round-robin", "round_robin", in_turn(True), num_experts=5),
    GateCase(
        "round-robin-raw", "round_robin", in_turn(False), top_k=3, options={"renormalize": False}
    ),
    GateCase("moepp", "moepp", moepp, top_k=3),
    GateCase(
        "moepp-more-zeros",
        "moepp",
        moepp,
        top_k=2,
        options={"zero_experts": ZeroExpertCounts(constant=3, copy=2, zero=1)},
    ),
]
# One choice keeps its probability, so that the gate learns from the task.
FORMULAS += [
    GateCase(f"{gate}-top1", gate, formula, top_k=1, options=options)
    for gate, formula, options in (
        ("softmax_topk", softmax_before(False), {}),
        ("sigmoid_topk", sigmoid, {}),
        ("group_limited_topk", deepseek, {"num_expert_groups": 3, "num_limited_groups": 2}),
        ("cosine_topk", cosine, {"projection_size": 8}),
        ("noisy_topk", noisy, {}),
        ("sam", sam, {"num_expert_groups": 3}),
        ("moepp", moepp, {}),
        ("round_robin", in_turn(False), {}),
    )
]
