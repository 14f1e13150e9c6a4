"""The option that says who computes experts which a device lacks."""

from __future__ import annotations

import torch

from moe_runtime.config import MISSES, require_known


def check_misses(misses: str, place: torch.device, *, is_alone: bool) -> None:
    """Refuses a way to treat missing experts that there is none of, or none of here.

    Raises:
        ValueError: nothing has the name, or the model is not on a device, or several processes
            divide its experts.
    """
    require_known("misses", misses, MISSES)
    if place.type == "cpu" and misses != "device":
        raise ValueError(
            f"misses is for models on a GPU; this one is on the CPU, got {misses!r}: leave it out"
        )
    if not is_alone and misses != "device":
        raise ValueError(
            f"misses is for one process; leave it out, or group and placement, got {misses!r}"
        )
