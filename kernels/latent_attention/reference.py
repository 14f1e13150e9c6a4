"""`latent_attention` in plain torch: keys and values are expanded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.operands import precise_dtype


class Tokens(NamedTuple):
    """What one query attends to.

    Attributes:
        latents: `[S, R]`, S at least 1.
        turned: `[S, P]`, the part of the keys with positions, which all heads share.
        mask: `[S]` fp32 to be added to the scores, or None.
    """

    latents: Tensor
    turned: Tensor
    mask: Tensor | None = None


def latent_attention_reference(
    query_BHD: Tensor, tokens: Sequence[Tokens], weight_HWR: Tensor, scale: float
) -> Tensor:
    """Computes in fp32, or in fp64 when the query is fp64, and rounds once."""
    wide = precise_dtype(query_BHD)
    weight = weight_HWR.to(wide)
    mixed = []
    for query_HD, (latents_SR, turned_SP, mask_S) in zip(query_BHD.to(wide), tokens, strict=True):
        key_dim = query_HD.shape[1] - turned_SP.shape[1]
        expanded_HSW = latents_SR.to(wide) @ weight.mT
        keys_HSN, values_HSV = expanded_HSW[..., :key_dim], expanded_HSW[..., key_dim:]
        query_HN, query_HP = query_HD.split((key_dim, turned_SP.shape[1]), dim=-1)
        scores_HS = torch.einsum("hn,hsn->hs", query_HN, keys_HSN) + query_HP @ turned_SP.to(wide).T
        scores_HS = scores_HS * scale
        if mask_S is not None:
            scores_HS = scores_HS + mask_S.to(wide)
        mixed.append(torch.einsum("hs,hsv->hv", torch.softmax(scores_HS, dim=-1), values_HSV))
    return torch.stack(mixed).to(query_BHD.dtype)
