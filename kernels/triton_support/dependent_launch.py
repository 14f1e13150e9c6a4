"""Programmatic dependent launch: a kernel begins while the one before it on its stream ends.

Such a kernel waits for that one (`gdc_wait`) before it reads what others may have written, and
writes: who waits for it has waited for all before it.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from moe_runtime.kernels.triton_support.choice import is_interpreted


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """What such a kernel is launched with: IS_CHAINED and, from Hopper on, Triton's option."""
    is_able = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_properties(device).major >= 9
        and not is_interpreted()
    )
    return {"IS_CHAINED": True, "launch_pdl": True} if is_able else {"IS_CHAINED": False}
