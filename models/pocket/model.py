"""Sizes of the pocket model that its measurement needs; the whole of it stands in train.toml."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 512
NUM_EXPERTS = 16
TOP_K = 2


def active_parameters(model: "PreTrainedModel") -> int:
    """Parameters that one token passes through, embeddings counted once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name
    )
    return total - routed + routed * TOP_K // NUM_EXPERTS
