"""`expert_mlp` of a handful of tokens on a GPU: three launches for the whole layer."""

from moe_runtime.kernels.expert_mlp.decode.decode_launches import MAX_TOKENS
from moe_runtime.kernels.expert_mlp.decode.decode_products import DecodeProducts, decode_expert_mlp

__all__ = ["MAX_TOKENS", "DecodeProducts", "decode_expert_mlp"]
