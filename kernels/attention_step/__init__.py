"""`attention_step`: an attention layer for one new token of each sequence.

`attention_heads` is its part between the products and the scores, for whole sequences.
"""

from moe_runtime.kernels.attention_step.heads import attention_heads
from moe_runtime.kernels.attention_step.op import attention_step
from moe_runtime.kernels.attention_step.weights import AttentionWeights, HeadNorm

__all__ = [
    "AttentionWeights",
    "HeadNorm",
    "attention_heads",
    "attention_step",
]
