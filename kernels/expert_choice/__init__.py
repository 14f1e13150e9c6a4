"""`choose_experts`: from a router's logits to the experts of each token and their weights."""

from moe_runtime.kernels.expert_choice.op import choose_experts
from moe_runtime.kernels.expert_choice.reference import (
    SCORES,
    ChoiceForm,
    choose_experts_reference,
)

__all__ = ["SCORES", "ChoiceForm", "choose_experts", "choose_experts_reference"]
