"""LongCat-Flash: some choices of the router are identity experts, which have no weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

from moe_runtime.checkpoints.families.stacked_experts import StackedExpertsModule

RENAMINGS: dict[str, str] = {}


class _Block(LongcatFlashMoE):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_TD = hidden_states.view(-1, hidden_states.shape[-1])
        # before transformers 5.20 the router did not return its logits first
        *_, weights_TK, ids_TK = self.router(hidden_states)
        num_experts = self.experts.num_experts
        # the id behind the last expert adds nothing; a token's own values are added for it here
        routed_TD = self.experts(hidden_TD, ids_TK.clamp(max=num_experts), weights_TK)
        is_identity_TK = ids_TK >= num_experts
        own_T1 = (weights_TK * is_identity_TK).sum(-1, keepdim=True)
        return (routed_TD + (hidden_TD * own_T1).to(routed_TD.dtype)).view_as(hidden_states)


def adapt(block: Any, config: Any) -> None:
    """Turns a block; see the package."""
    experts = block.experts
    gate_up = experts.gate_up_proj[: len(experts.down_proj)].detach()
    # transformers writes room for identity experts in one of the two weights, and never reads it
    block.experts = StackedExpertsModule(
        config, experts.act_fn, gate_up, experts.down_proj, may_be_padded=True
    )
    block.__class__ = _Block
