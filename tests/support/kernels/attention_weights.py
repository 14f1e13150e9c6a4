"""Weights of small attention layers of every kind, for tests of the kernels."""

from typing import Any

import torch
from native_marks import needs_native as needs_native

from moe_runtime.kernels.decode_step.attention_step import AttentionWeights, RowNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"key_heads": 2, "value_dim": 5},
    "biased": {"bias": True, "turned": 10},
    "norm of a head": {"norm": "head", "key_heads": 1},
    "norm of all heads": {"norm": "row"},
    "sinks": {"bias": True, "key_heads": 2, "sinks": True},
    "angles of pairs": {"pairs_share": True, "turned": 7},
    "angles of some pairs": {"pairs_share": True, "turned": 5},
}


def make_layer(
    dtype: torch.dtype,
    *,
    heads: int = 4,
    key_heads: int = 4,
    key_dim: int = 14,
    value_dim: int = 14,
    dim: int = 33,
    bias: bool = False,
    norm: str | None = None,
    sinks: bool = False,
    pairs_share: bool = False,
) -> AttentionWeights:
    generator = torch.Generator().manual_seed(heads + key_heads)

    def random(*shape: int) -> torch.Tensor:
        scale = shape[1] ** -0.5 if len(shape) > 1 else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    rows = (heads + key_heads) * key_dim + key_heads * value_dim
    norms: dict[str, Any] = {}
    if norm is not None:
        q_size, k_size = (heads * key_dim, key_heads * key_dim) if norm == "row" else [key_dim] * 2
        norms = {"q_norm": RowNorm(random(q_size), 1e-5), "k_norm": RowNorm(random(k_size), 1e-6)}
    return AttentionWeights(
        qkv=random(rows, dim),
        output=random(dim, heads * value_dim),
        qkv_bias=random(rows) if bias else None,
        output_bias=random(dim) if bias else None,
        **norms,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=0.3,
        sinks=random(heads) if sinks else None,
        pairs_share=pairs_share,
    )
