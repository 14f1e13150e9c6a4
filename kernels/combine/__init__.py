"""`combine`: the weighted sum over the K expert outputs of each token."""

from moe_runtime.kernels.combine.op import IMPLS, combine

__all__ = ["IMPLS", "combine"]
