"""`rotary_step` in plain torch: the specification.

Shape suffixes: B sequences, N values of all heads of a token, R turned values of a head, A rows of
angles, H query heads, G key heads, S places, D values of a query or key head, V of a value head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.attention_step.reference import rotated
from moe_runtime.kernels.rms_norm import NormForm, rms_norm_reference


class RowNorm(NamedTuple):
    """A root-mean-square normalisation of queries or keys, in any form of `rms_norm`.

    Attributes:
        weight: As long as a head, which it then normalises, or as all heads together.
        eps: Added to the mean of squares.
        form: As of `rms_norm`.
    """

    weight: Tensor
    eps: float
    form: NormForm = "rounded"


def rotary_step_reference(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    norms: tuple[RowNorm | None, RowNorm | None] = (None, None),
    *,
    pairs_share: bool = False,
) -> Tensor:
    """Computes as `rotary_step` says; every operation rounds to the dtype of the queries.

    Args:
        qkv: `[B, H * D]`, `[B, G * D]` and `[B, G * V]`.
        angles: Cosines and sines, `[A, R]`.
        cache: `[B, G, S, D]` and `[B, G, S, V]`, which are changed.
        place: One int64, or `[B]`.
        norms: Of queries and of keys.
        pairs_share: As of `rotary_step`.
    """
    query_BN, key_BN, value_BN = qkv
    keys_BGSD, values_BGSV = cache
    cos_AR, sin_AR = (torch.cat((a, a), dim=-1) if pairs_share else a for a in angles)
    query_BHD, key_BGD = (
        rotated(_normed(row_BN, norm).unflatten(1, (-1, keys_BGSD.shape[-1])), cos_AR, sin_AR)
        for row_BN, norm in zip((query_BN, key_BN), norms, strict=True)
    )
    value_BGV = value_BN.unflatten(1, (-1, values_BGSV.shape[-1]))
    for cached, new in ((keys_BGSD, key_BGD), (values_BGSV, value_BGV)):
        if place.ndim:
            cached[torch.arange(len(cached), device=place.device), :, place] = new
        else:
            cached.index_copy_(2, place.view(1), new.unsqueeze(2))
    return query_BHD.unsqueeze(2)


def _normed(row_BN: Tensor, norm: RowNorm | None) -> Tensor:
    if norm is None:
        return row_BN
    groups = row_BN.unflatten(1, (-1, len(norm.weight)))
    return rms_norm_reference(groups, norm.weight, norm.eps, norm.form).flatten(1)
