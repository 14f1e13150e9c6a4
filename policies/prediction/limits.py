"""How much is remembered by what learns while it runs, and the memory that takes."""

from moe_runtime.policies.prediction.base import Shape

COLLECTED_MATRICES = 120
"""Activation matrices that are kept; MoE-Infinity finds 120 enough for 290 tasks."""

REMEMBERED_TOKENS = 2048
"""Tokens in which similar moments are looked for."""


def remembered_tokens_bytes(shape: Shape) -> int:
    """Memory of a full ring of tokens: paths (``uint8``), followers (float32), who each was."""
    return REMEMBERED_TOKENS * (shape.num_layers * (shape.num_experts + 1) * 5 + 5 * 8)


def most_learned_bytes(shape: Shape) -> int:
    """Most that one learner keeps for later processes: a full collection, and popularity."""
    return (COLLECTED_MATRICES + 1) * shape.num_layers * shape.num_experts * 4


def most_remembered_bytes(shape: Shape) -> int:
    """Most that a policy and a predictor that need no training remember of a model's routing.

    The policy ``reuse``, and the collections of activation matrices (float32) of
    ``activation-aware`` and of the predictor ``eam``; one more while such a collection, kept from
    earlier processes, is read or written.
    """
    return remembered_tokens_bytes(shape) + 3 * most_learned_bytes(shape)
