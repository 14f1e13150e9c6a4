"""`expert_mlp`: the routed feed-forward of one layer, in torch, C and Triton.

Names are imported on first use: loading a model needs `expert_ffn` only.
"""

from typing import TYPE_CHECKING

from moe_runtime.kernels.operands import ACTIVATION_NAMES, ActivationName, ActivationSpec
from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights
    from moe_runtime.kernels.expert_mlp.experts import PackedExperts, StackedExperts
    from moe_runtime.kernels.expert_mlp.op import expert_mlp, grouped_expert_mlp
    from moe_runtime.kernels.expert_mlp.quantized import QuantizedExperts
    from moe_runtime.kernels.expert_mlp.rows import ParameterGradients
    from moe_runtime.kernels.expert_mlp.separate_experts import expert_ffn, frozen_expert
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".expert_weights": "ExpertWeights",
            ".experts": "PackedExperts StackedExperts",
            ".op": "expert_mlp grouped_expert_mlp",
            ".rows": "ParameterGradients",
            ".quantized": "QuantizedExperts",
            ".separate_experts": "expert_ffn frozen_expert",
        },
    )

__all__ = [
    "ACTIVATION_NAMES",
    "ActivationName",
    "ActivationSpec",
    "ExpertWeights",
    "PackedExperts",
    "ParameterGradients",
    "QuantizedExperts",
    "StackedExperts",
    "expert_ffn",
    "expert_mlp",
    "frozen_expert",
    "grouped_expert_mlp",
]
