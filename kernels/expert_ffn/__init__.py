"""`expert_ffn`: the routed experts of one layer over rows grouped by expert."""

from moe_runtime.kernels.expert_ffn.op import ACTIVATIONS, Activation, expert_ffn, frozen_expert
from moe_runtime.kernels.expert_ffn.step import ExpertStep
from moe_runtime.kernels.expert_ffn.weights import ExpertWeights

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ExpertStep",
    "ExpertWeights",
    "expert_ffn",
    "frozen_expert",
]
