"""`activations="int8"`: products of quantised experts with integers on both sides; lossy.

What an expert multiplies, its inputs and its hidden values, is rounded to int8 in groups of 32; the
weights stay what they are. Their codes are integers, which processors multiply faster than they
decode them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.formats.packed_weight import Packing
from moe_runtime.errors import UnsupportedModelError

_INTEGERS = ("e2m1", "uint4", "uint8", "int8")
"""Codes that are integers, or halves of some."""


def round_activations(experts: ExpertMap, place: torch.device) -> None:
    """Lets the products of all experts round what they multiply.

    Raises:
        UnsupportedModelError: an expert has a matrix that is not of integers, or the model is on a
            device.
    """
    if place.type != "cpu":
        raise UnsupportedModelError(
            f"activations int8 is for models on the CPU; expected exact on {place.type}"
        )
    for packings in experts.packings:
        kinds = {getattr(packing, "format", None) for packing in packings.values()}
        if not kinds or any(kind is None or kind.codes not in _INTEGERS for kind in kinds):
            raise UnsupportedModelError(
                "activations int8 is for experts in int4, int8 or fp4, and these are "
                f"{' and '.join(experts.type_names)}; expected activations exact"
            )
        for name, packing in packings.items():
            assert isinstance(packing, Packing)
            packings[name] = packing._replace(format=replace(packing.format, rounds_x=True))
    experts.type_names = [f"{name}, activations in int8" for name in experts.type_names]
