"""What gates refuse, and in which words."""

import math
import re
from typing import Any

import pytest
import torch

from moe_runtime.routing import Capacity, Routing, RoutingContext, SigmoidTopK, make_gate


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("softmax_topk", 8, 4, 5), {}, "top_k must be at most num_experts=4, got 5"),
        (("softmax_topk", 8, 4, True), {}, "top_k must be an integer of at least 1, got True"),
        (("softmax_topk", 8, 0, 1), {}, "num_experts must be an integer of at least 1, got 0"),
        (("softmax_topk", 8, 4, 2), {"num_groups": 0}, "num_groups must be an integer"),
        (("softmax_tpok", 8, 4, 2), {}, "did you mean 'softmax_topk'"),
        (("softmax_topk", 8, 4, 2), {"renormalise": True}, "did you mean 'renormalize'"),
        (("softmax_topk", 8, 4, 2), {"softmax": "inside"}, "softmax must be 'before' or 'after'"),
        (("softmax_topk", 8, 4, 1), {"softmax": "after"}, 'softmax="after" gives the one choice'),
        (("sigmoid_topk", 8, 4, 1), {"renormalize": True}, "renormalize=True gives the one choice"),
        (("switch", 8, 4, 2), {}, "Switch routes with top_k=1, got 2"),
        (("switch", 8, 4, 1), {"jitter": 1.5}, "jitter must be in [0, 1)"),
        (("gshard", 8, 4, 1), {}, "GShard routes with top_k=2, got 1"),
        (("prototype", 8, 6, 4), {}, "the prototypes (top_k=4) must divide num_experts=6"),
        (("sam", 8, 6, 3), {"num_expert_groups": 3}, "a group holds 2 experts, fewer than"),
        (("group_limited_topk", 8, 6, 2), {"num_expert_groups": 4}, "must divide num_experts=6"),
        (
            ("group_limited_topk", 8, 8, 3),
            {"num_expert_groups": 4},
            "1 groups of 2 experts cannot give top_k=3",
        ),
        (("hash", 8, 4, 1), {"vocab_size": 3, "frequencies": [1.0]}, "expected 3 frequencies"),
        (("hash", 8, 4, 1), {"vocab_size": 3, "loss_weights": {"z": 1.0}}, "no scores to train"),
        (("moepp", 8, 4, 2), {"tau": 0.0}, "tau must be in (0, 1], got 0.0"),
        (("dense_to_sparse", 8, 4, 1), {"tau_end": 3.0}, "expected 0 < tau_end <= tau_start"),
        (("sinkhorn", 8, 4, 1), {"max_iterations": 0}, "max_iterations must be at least 1"),
        (("expert_choice", 8, 4, 1), {"max_experts_per_token": 9}, "must be in 1..4, got 9"),
        (("cosine_topk", 8, 4, 1), {"temperature": 0.0}, "temperature must be positive"),
        (("softmax_topk", 8, 4, 2), {"top_k": 1}, "gate 'softmax_topk' has no option 'top_k'"),
        (("hash", 8, 4, 1), {}, "gate 'hash' needs the option 'vocab_size'"),
        (("hash", 8, 4, 1), {"vocab_size": True}, "option 'vocab_size' of gate Hash must be"),
        (
            ("hash", 8, 4, 1),
            {"vocab_size": 2, "frequencies": ["x", "y"]},
            "gate 'hash' cannot be made with the options {",
        ),
        (
            ("moepp", 8, 4, 2),
            {"zero_experts": "x"},
            "option 'zero_experts' of gate MoEPlusPlus must",
        ),
        (
            ("sigmoid_topk", 8, 4, 2),
            {"bias_update_rate": "x"},
            "option 'bias_update_rate' of gate SigmoidTopK must be a number, got 'x'",
        ),
        (("expert_choice", 8, 4, 1), {"max_experts_per_token": 1.5}, "of gate ExpertChoice must"),
        (("rl_r", 8, 4, 1), {"top_p": 0.0}, "top_p must lie in (0, 1], got 0.0"),
        (("rl_r", 8, 4, 1), {"policy_weight": -1.0}, "policy_weight must be at least 0"),
        (
            ("softmax_topk", 8, 4, 2),
            {"loss_weights": {"load_balanc": 0.1}},
            "did you mean 'load_balance'",
        ),
    ],
)
def test_sizes_and_names(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_gate(*arguments, **options)


def test_gates_refuse_options_by_themselves():
    with pytest.raises(ValueError, match="option 'scale' of gate SigmoidTopK must be a number"):
        SigmoidTopK(8, 4, 2, scale="2")
    for factor in (0, -1.0, math.nan, "1", True):
        with pytest.raises(ValueError, match="capacity_factor must be positive and finite"):
            Capacity(factor)
    with pytest.raises(ValueError, match="policy must be one of choice, token, priority, score"):
        Capacity(1.0, "tokn")
    with pytest.raises(ValueError, match="ids must be int64"):
        Routing(torch.zeros(3, 2), torch.zeros(3, 2), 4)
    with pytest.raises(ValueError, match=r"weights must be \[3, 2\]"):
        Routing(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3), 4)


def test_batches_that_do_not_fit():
    gate = make_gate("gshard", 8, 4, 2, num_groups=3, capacity=Capacity(1.0), name="layer 2's gate")
    with pytest.raises(
        ValueError, match="layer 2's gate: 10 tokens do not divide into num_groups=3"
    ):
        gate(torch.randn(10, 8))
    with pytest.raises(ValueError, match=r"expected tokens \[T, 8\], got \[9, 7\]"):
        gate(torch.randn(9, 7))
    with pytest.raises(ValueError, match="9 tokens do not divide into 2 sequences"):
        gate(torch.randn(9, 8), RoutingContext(num_sequences=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["softmax_topk", "noisy_topk", "expert_choice", "base"])
def test_scores_that_are_not_numbers_name_the_layer(name, value):
    gate = make_gate(name, 8, 4, 1, name="layer 7")
    x = torch.randn(6, 8)
    x[4, 3] = value
    with pytest.raises(ValueError, match=r"layer 7: the scores of 1 of 6 tokens .* token 4"):
        gate(x)


def test_token_ids():
    gate = make_gate("hash", 8, 4, 1, vocab_size=10)
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="hash routing needs token_ids"):
        gate(x)
    with pytest.raises(ValueError, match="must be 3 int64 numbers"):
        gate(x, RoutingContext(token_ids_T=torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"must be in \[0, 10\), got 0..10"):
        gate(x, RoutingContext(token_ids_T=torch.tensor([0, 10, 3])))


def test_previous_logits_of_another_width():
    gate = make_gate("moepp", 8, 4, 2)
    with pytest.raises(ValueError, match=r"previous_logits must be \[3, 8\], got \[3, 4\]"):
        gate(torch.randn(3, 8), RoutingContext(previous_logits_TE=torch.zeros(3, 4)))


def test_a_gate_from_outside_may_name_types_for_checkers_alone():
    def own_init(self: SigmoidTopK, hidden_size: int, num_experts: int, top_k: int) -> None:
        SigmoidTopK.__init__(self, hidden_size, num_experts, top_k)

    own_init.__annotations__["hidden_size"] = "TypeOfCheckers"
    gate: Any = type("Own", (SigmoidTopK,), {"__init__": own_init})
    assert gate(8, 4, 2).hidden_size == 8
