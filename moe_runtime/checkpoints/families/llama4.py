"""Llama 4 (Scout, Maverick): one expert a token, whose input is multiplied by its gate weight."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from moe_runtime.checkpoints.families.stacked_experts import TransposedExperts
from moe_runtime.errors import UnsupportedModelError

RENAMINGS: dict[str, str] = {}


class _Block(Llama4TextMoe):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TD = hidden_states.reshape(-1, self.hidden_dim)
        scores_TE, logits_TE = self.router(hidden_TD)
        ids_T1 = logits_TE.argmax(dim=-1, keepdim=True)
        scale_T1 = scores_TE.gather(1, ids_T1)
        # the weight stands before the expert, so nothing is left to multiply its output by
        routed_TD = self.experts(hidden_TD * scale_T1, ids_T1, torch.ones_like(scale_T1))
        return self.shared_expert(hidden_TD) + routed_TD, logits_TE


def adapt(block: Any, config: Any) -> None:
    """Turns a block; see the package.

    Raises:
        UnsupportedModelError: more than one expert for each token, or a model with a vision tower
            in the version of transformers that cannot run one.
    """
    if config.model_type == "llama4" and transformers.__version__ == "5.24.0":
        raise UnsupportedModelError(
            "transformers 5.24.0 cannot run Llama4ForConditionalGeneration, not even on text: it "
            "reads image_outputs, which its language model does not return; install another "
            "version, such as 5.23.0, for llama4"
        )
    if block.top_k != 1:
        raise UnsupportedModelError(
            f"llama4 with {block.top_k} experts for each token is not supported; expected "
            "num_experts_per_tok 1, as in all published models of the family"
        )
    experts = block.experts
    block.experts = TransposedExperts(
        config.get_text_config(), experts.act_fn, experts.gate_up_proj, experts.down_proj
    )
    block.__class__ = _Block
