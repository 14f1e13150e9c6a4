"""`heterogeneous_mlp`: the routed feed-forward of experts that differ in width."""

from moe_runtime.kernels.heterogeneous_mlp.experts import PackedExperts
from moe_runtime.kernels.heterogeneous_mlp.op import heterogeneous_mlp

__all__ = ["PackedExperts", "heterogeneous_mlp"]
