"""Reads every weight that a model uses once, to find values that are no numbers.

A scale that is NaN or infinite makes everything behind it so, and no header tells it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.dense_weights import DenseReader, Progress
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.expert_tensors import TensorFinder
from moe_runtime.checkpoints.opening import Checkpoint
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.linear import values_of
from moe_runtime.memory.slab import aligned_bytes
from moe_runtime.memory.source import ExpertSource
from moe_runtime.types import ExpertKey

_AGAIN = "fetch the checkpoint again"


def verify_weights(
    checkpoint: Checkpoint, experts: ExpertMap, progress: Progress | None = None
) -> None:
    """Reads all experts, one after another, and then all other weights.

    Args:
        checkpoint: whose weights.
        experts: where its experts lie.
        progress: called with what is being done, the bytes done and the bytes in all.

    Raises:
        CheckpointError: a weight cannot be read, or has values, or scales, that are NaN or
            infinite; names the tensor and its expert.
    """
    finder = TensorFinder(checkpoint.entries.values())
    source, slot = ExpertSource(experts.layouts), aligned_bytes(experts.slot_bytes)
    done, total = 0, sum(layout.tensor_bytes for layout in experts.layouts.values())
    try:
        for key, layout in experts.layouts.items():
            source.read({key: slot})
            named = dict(zip(experts.matrices[key.layer], layout.tensors, strict=True))
            for matrix, found in experts.matrices_in(key, slot).items():
                if fault := _fault_in(found):
                    part, numbers, remedy = fault
                    own = [name for name in named if name == f"{matrix}.{part}"] or [
                        name for name in named if name.partition(".")[0] == matrix
                    ]
                    _refuse(finder.entry_of(named[own[0]]).name, numbers, remedy, matrix, key)
            done += layout.tensor_bytes
            if progress is not None:
                progress("verifying experts", done, total)
    finally:
        source.close()
    reader = DenseReader(experts.dense_entries.values(), torch.float32, progress)
    try:
        for name, entry in experts.dense_entries.items():
            values = reader.read(entry)
            may_be_infinite = name in experts.buffers  # a bound, of clipping for example
            if values.isnan().any() or not (may_be_infinite or values.isfinite().all()):
                parts = getattr(entry, "entries", [entry])
                _refuse(" with ".join(part.name for part in parts), values)
    finally:
        reader.close()


def _fault_in(found: Any) -> tuple[str, Tensor, str] | None:
    """Which part of a matrix spoils its values, these or its own, and what to do; None if none."""
    values = found if isinstance(found, Tensor) else values_of(found, torch.float32)
    if values.isfinite().all():
        return None
    for part in ("scales", "global_scale"):
        numbers = getattr(found, part, None)
        if numbers is None:
            continue
        if numbers.dtype == torch.uint8:
            numbers = numbers.view(torch.float8_e8m0fnu)
        if not numbers.float().isfinite().all():
            return part, numbers.float(), _AGAIN
    if getattr(found, "scales", None) is None or not values.isinf().any():
        return "codes", values, _AGAIN
    return "scales", values, "its scales are finite, codes times scales are not: save it again"


def _refuse(
    name: str,
    numbers: Tensor,
    remedy: str = _AGAIN,
    matrix: str = "",
    key: ExpertKey | None = None,
) -> None:
    whose = f" ({matrix} of expert {key.expert} of MoE layer {key.layer})" if key else ""
    count = int(numbers.isfinite().logical_not().sum())
    raise CheckpointError(
        f"{name}{whose}: expected finite numbers, found {count} of {numbers.numel()} NaN or "
        f"infinite; {remedy}"
    )
