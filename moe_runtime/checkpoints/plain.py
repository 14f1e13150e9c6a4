"""What is done with plain checkpoints only, and refused of others in one line."""

from __future__ import annotations

from moe_runtime.checkpoints.opening import Checkpoint
from moe_runtime.errors import UnsupportedModelError


def require_plain(checkpoint: Checkpoint, purpose: str) -> None:
    """Refuses quantised weights where they have no use yet.

    Args:
        checkpoint: which.
        purpose: what is not done with them, such as "training".

    Raises:
        UnsupportedModelError: there are some.
    """
    if checkpoint.packed or checkpoint.folder.is_file():
        raise UnsupportedModelError(
            f"{checkpoint.folder}: {purpose} of quantised weights or GGUF files is not supported "
            "yet; expected a safetensors checkpoint in bf16, fp16 or fp32"
        )
    if checkpoint.runs is not None:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: {purpose} of a packed checkpoint is not supported; take the one "
            "that it was packed from"
        )
