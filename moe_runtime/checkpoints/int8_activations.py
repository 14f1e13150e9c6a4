"""Quantised weights that round what they multiply to int8, where a user asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_runtime.checkpoints.formats import PackedWeight, Packing
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.quantized import WeightFormat

if TYPE_CHECKING:
    from moe_runtime.checkpoints.expert_map import ExpertMap


def round_activations(experts: ExpertMap, device: torch.device) -> None:
    """Lets all products with weights that stay quantised in memory round their rows to int8.

    Raises:
        UnsupportedModelError: none of these weights takes such rows, or not on that device.
    """
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"activations='int8' is for models on the CPU, got the device {device}"
        )
    is_rounded = False
    for packings in experts.packings:
        for name, packing in packings.items():
            if isinstance(packing, Packing) and packing.format.takes_int8_activations:
                packings[name] = packing._replace(format=_rounding(packing.format))
                is_rounded = True
    for name in experts.packed_dense:
        weight = experts.dense_entries[name]
        if isinstance(weight, PackedWeight) and weight.format.takes_int8_activations:
            experts.dense_entries[name] = replace(weight, format=_rounding(weight.format))
            is_rounded = True
    if not is_rounded:
        raise UnsupportedModelError(
            "activations='int8' needs weights in GGUF's blocks, or in MXFP4, in int4, or in int8 "
            "without zero points, in groups of 32, 64, 128, ... columns, that stay so in memory; "
            "this model has none: leave it out"
        )


def _rounding(kind: WeightFormat) -> WeightFormat:
    return replace(kind, int8_activations=True)
