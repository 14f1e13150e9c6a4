"""`single_query_attention` in plain torch: the specification."""

import torch
from torch import Tensor

from moe_runtime.kernels.operands import precise_dtype


def single_query_attention_reference(
    query_BHD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Computes in fp32, or in fp64 when the query is fp64, and rounds once."""
    wide = precise_dtype(query_BHD)
    shared = query_BHD.shape[1] // key_BGSD.shape[1]
    query_BGRD = query_BHD.to(wide).unflatten(1, (-1, shared)) * scale
    scores_BGRS = query_BGRD @ key_BGSD.to(wide).transpose(-1, -2)
    if mask_BS is not None:
        scores_BGRS = scores_BGRS + mask_BS[:, None, None].to(wide)
    if sinks_H is not None:
        sinks_BGR1 = sinks_H.to(wide).view(-1, shared, 1).expand(*scores_BGRS.shape[:-1], 1)
        scores_BGRS = torch.cat((scores_BGRS, sinks_BGR1), dim=-1)
    weights_BGRS = torch.softmax(scores_BGRS, dim=-1)[..., : key_BGSD.shape[2]]
    mixed_BGRV = weights_BGRS @ value_BGSV.to(wide)
    return mixed_BGRV.flatten(1, 2).to(query_BHD.dtype)
