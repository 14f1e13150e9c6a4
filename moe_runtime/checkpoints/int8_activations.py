"""Quantised weights that round what they multiply to int8, where a user asks for it."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_runtime.checkpoints.opening import Checkpoint
from moe_runtime.errors import UnsupportedModelError


def with_int8_activations(checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
    """The same checkpoint, whose products with quantised weights round their rows to int8.

    Raises:
        UnsupportedModelError: none of its weights takes such rows, or not on that device.
    """
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"activations='int8' is for models on the CPU, got the device {device}"
        )
    rounding = {
        name: replace(weight, format=replace(weight.format, int8_activations=True))
        for name, weight in checkpoint.packed.items()
        if weight.format.takes_int8_activations
    }
    if not rounding:
        raise UnsupportedModelError(
            "activations='int8' needs weights in GGUF's blocks, or in MXFP4, in int4, or in int8 "
            "without zero points, in groups of 32, 64, 128, ... columns; "
            f"{checkpoint.folder} has none: leave it out"
        )
    return replace(checkpoint, packed=checkpoint.packed | rounding)
