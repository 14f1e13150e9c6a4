"""`attention_step`: an attention layer for one new token of each sequence."""

from moe_runtime.kernels.attention_step.op import attention_step
from moe_runtime.kernels.attention_step.weights import AttentionWeights, HeadNorm

__all__ = [
    "AttentionWeights",
    "HeadNorm",
    "attention_step",
]
