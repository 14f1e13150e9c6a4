"""`expert_mlp`: the whole routed feed-forward of one layer, differentiable in everything."""

from moe_runtime.kernels.expert_mlp.experts import PackedExperts, StackedExperts
from moe_runtime.kernels.expert_mlp.op import expert_mlp, grouped_expert_mlp
from moe_runtime.kernels.expert_mlp.parameter_gradients import ParameterGradients
from moe_runtime.kernels.operands.activation import ACTIVATION_NAMES, ActivationSpec

__all__ = [
    "ACTIVATION_NAMES",
    "ActivationSpec",
    "PackedExperts",
    "ParameterGradients",
    "StackedExperts",
    "expert_mlp",
    "grouped_expert_mlp",
]
