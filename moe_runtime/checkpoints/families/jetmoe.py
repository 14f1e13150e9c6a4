"""JetMoE: two stacked linear layers and a bias after the sum; its attention experts stay dense."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE

from moe_runtime.checkpoints.families.stacked_experts import StackedExpertsModule

RENAMINGS = {
    r"mlp\.input_linear\.weight": "mlp.experts.gate_up_proj",
    r"mlp\.output_linear\.weight": "mlp.experts.down_proj",
}


class _Block(JetMoeMoE):
    experts: Any

    def forward(self, layer_input: torch.Tensor) -> torch.Tensor:
        hidden_TD = layer_input.reshape(-1, self.input_size)
        logits_TE = self.router(hidden_TD)[-1]
        chosen_TK, ids_TK = logits_TE.topk(self.router.top_k, dim=1)
        weights_TK = chosen_TK.softmax(dim=1).type_as(hidden_TD)
        return self.experts(hidden_TD, ids_TK, weights_TK).view_as(layer_input) + self.bias


def adapt(block: Any, config: Any) -> None:
    """Turns a block; see the package."""
    gate_up, down = block.input_linear.weight, block.output_linear.weight
    del block.input_linear, block.output_linear
    block.experts = StackedExpertsModule(config, block.activation, gate_up, down)
    block.__class__ = _Block
