"""Recurrent steps in plain torch: the specification. Shape suffixes as in op.py."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule_step_reference(
    state_BHKV: Tensor,
    query_BGK: Tensor,
    key_BGK: Tensor,
    value_BHV: Tensor,
    log_decay: Tensor,
    beta_BH: Tensor,
    scale: float,
    unit_eps: float | None,
) -> Tensor:
    """`delta_rule_step`: small products read the states, and two operations change them."""
    heads = state_BHKV.shape[1]
    query_BGK, key_BGK = query_BGK.float(), key_BGK.float()
    if unit_eps is not None:
        query_BGK, key_BGK = _unit_length(query_BGK, unit_eps), _unit_length(key_BGK, unit_eps)
    state, value = state_BHKV.flatten(0, 1), value_BHV.float().flatten(0, 1)
    decay = log_decay.float().exp().flatten(0, 1)[:, None]
    both = torch.stack((query_BGK * scale, key_BGK), dim=2)
    both = both.repeat_interleave(heads // query_BGK.shape[1], dim=1).flatten(0, 1)
    known = torch.bmm(both * decay, state)
    learnt = (value - known[:, 1]) * beta_BH.float().flatten()[:, None]
    # not as a product: MKL rounds one of a single sequence otherwise than several
    state.mul_(decay.transpose(1, 2)).addcmul_(both[:, 1, :, None], learnt[:, None])
    overlap = torch.linalg.vecdot(both[:, 0], both[:, 1])[:, None]
    return torch.addcmul(known[:, 0], overlap, learnt).view_as(value_BHV)


def conv_step_reference(
    state_BCL: Tensor, x_BC: Tensor, taps_CN: Tensor, bias_C: Tensor | None
) -> Tensor:
    """`conv_step`: sums in fp32, rounded once."""
    inputs_BCL = torch.cat((state_BCL, x_BC[..., None]), dim=-1)
    state_BCL.copy_(inputs_BCL[..., 1:])
    products_BCN = inputs_BCL[..., -taps_CN.shape[1] :].float() * taps_CN.float()
    sums_BC = products_BCN.sum(-1)
    return (sums_BC if bias_C is None else sums_BC + bias_C.float()).to(x_BC.dtype)


def _unit_length(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)
