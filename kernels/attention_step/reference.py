"""The specification of `attention_step`: plain torch, one operation after another.

Shape suffixes: B sequences, D model, R turned values of a head, H query heads, G key heads, S
tokens, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.attention_step.weights import AttentionWeights, HeadNorm
from moe_runtime.kernels.linear.reference import linear_reference
from moe_runtime.kernels.rms_norm import rms_norm_reference
from moe_runtime.kernels.single_query_attention.reference import single_query_attention_reference


def attention_step_reference(
    x_BD: Tensor,
    weights: AttentionWeights,
    cos_BR: Tensor,
    sin_BR: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None = None,
) -> Tensor:
    """Computes as `attention_step` says; every operation rounds to the dtype of `x`."""
    qkv_BN = linear_reference(x_BD, weights.qkv, weights.qkv_bias)
    num_values = weights.num_key_heads * weights.value_dim
    if weights.pairs_share:
        cos_BR, sin_BR = (torch.cat((angles, angles), dim=-1) for angles in (cos_BR, sin_BR))
    query, key, value = qkv_BN.split([weights.num_queries, weights.num_keys, num_values], dim=1)
    query_BHD = _heads(_normed(query, weights.q_norm), weights.key_dim)
    key_BGD = _heads(_normed(key, weights.k_norm), weights.key_dim)
    key_BGSD[:, :, -1] = rotated(key_BGD, cos_BR, sin_BR)
    value_BGSV[:, :, -1] = _heads(value, weights.value_dim)
    mixed_BHV = single_query_attention_reference(
        rotated(query_BHD, cos_BR, sin_BR),
        key_BGSD,
        value_BGSV,
        mask_BS,
        weights.scale,
        weights.sinks,
    )
    return linear_reference(mixed_BHV.flatten(1), weights.output, weights.output_bias)


def heads_reference(
    query_BTQ: Tensor, key_BTN: Tensor, weights: AttentionWeights, cos_BTR: Tensor, sin_BTR: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes as `attention_heads` says; every operation rounds to the dtype of the queries."""
    batch, tokens = query_BTQ.shape[:2]
    if weights.pairs_share:
        cos_BTR, sin_BTR = (torch.cat((angles, angles), dim=-1) for angles in (cos_BTR, sin_BTR))
    cos, sin = (angles.expand(batch, -1, -1).flatten(0, 1) for angles in (cos_BTR, sin_BTR))

    def heads(values_BTN: Tensor, norm: HeadNorm | None) -> Tensor:
        rows = _heads(_normed(values_BTN.flatten(0, 1), norm), weights.key_dim)
        return rotated(rows, cos, sin).unflatten(0, (batch, tokens)).transpose(1, 2)

    return heads(query_BTQ, weights.q_norm), heads(key_BTN, weights.k_norm)


def _heads(values: Tensor, dim: int) -> Tensor:
    return values.unflatten(1, (-1, dim))


def _normed(values: Tensor, norm: HeadNorm | None) -> Tensor:
    if norm is None:
        return values
    groups = values.unflatten(1, (-1, len(norm.weight)))
    return rms_norm_reference(groups, norm.weight, norm.eps).flatten(1)


def rotated(heads: Tensor, cos_BR: Tensor, sin_BR: Tensor) -> Tensor:
    """Rotary embedding of the first R values of heads `[B, H, D]`, in halves."""
    turned, rest = heads.split([cos_BR.shape[-1], heads.shape[-1] - cos_BR.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    crossed = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos_BR[:, None] + crossed * sin_BR[:, None], rest), dim=-1)
