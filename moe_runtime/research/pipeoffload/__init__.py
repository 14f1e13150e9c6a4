"""PipeOffload in real pipelines: activations of micro-batches that wait lie in a file.

Source: Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory
Optimization" (2025). Autograd's hooks write what a forward pass keeps, and read it for the backward
pass. The file stands for the host's memory, as experts off memory use it too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.files import make_folders
from moe_runtime.lab.simulate.pipeline import passes_of
from moe_runtime.models.lm.parallel import StageModule
from moe_runtime.training.offload.activations import SLOT_BYTES, ActivationSwap, Swapped
from moe_runtime.training.run_config import ParallelConfig, PipelineSchedule

SMALLEST_BYTES = SLOT_BYTES
"""Smaller tensors stay in memory."""


def waits_of(stage: int, stages: int, micro_batches: int, schedule: PipelineSchedule) -> list[int]:
    """Passes of a stage between the forward and the backward pass of each micro-batch."""
    if schedule == "gpipe":
        return [micro_batches - 1] * micro_batches
    order = list(passes_of(stage, stages, micro_batches))
    return [
        order.index(("backward", number)) - order.index(("forward", number)) - 1
        for number in range(micro_batches)
    ]


def chosen(waits: Sequence[int], share: float) -> set[int]:
    """The micro-batches that are offloaded: those that wait longest, equals evenly.

    A micro-batch whose backward pass follows at once stays.
    """
    left, found = math.floor(share * len(waits)), set[int]()
    for wait in sorted(set(waits) - {0}, reverse=True):
        alike = [number for number, own in enumerate(waits) if own == wait]
        taken = min(left - len(found), len(alike))
        found |= {alike[place * len(alike) // taken] for place in range(taken)}
    return found


class StageOffload:
    """Offloads activations of a stage's micro-batches, in the order of their forward passes.

    Args:
        folder: for the file, whose name is free again at once.
        micro_batches: of a step.

    Attributes:
        moved_bytes: written so far.
    """

    def __init__(
        self, folder: Path, module: StageModule, micro_batches: int, config: ParallelConfig
    ) -> None:
        make_folders(folder)
        self._module, self._next = module, 0
        index, count = module.stage.index, module.stage.count
        waits = waits_of(index, count, micro_batches, config.schedule)
        away = chosen(waits, config.offload)
        self._away = [number in away for number in range(micro_batches)]
        self._swap = ActivationSwap(folder, smallest_bytes=SMALLEST_BYTES)
        # nothing is left of it, however the run ends
        (folder / "activations.scratch").unlink()
        with contextlib.suppress(OSError):  # something else lies there
            folder.rmdir()
        self._kept = set[int]()
        self.moved_bytes = 0

    def saving(self) -> AbstractContextManager[object]:
        """A context for the next forward pass."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        number, self._next = self._next, (self._next + 1) % len(self._away)
        if not self._away[number]:
            return contextlib.nullcontext()
        own = [*self._module.parameters(), *self._module.buffers()]
        self._kept = {tensor.untyped_storage()._cdata for tensor in own}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._swap.unpack)

    def close(self) -> None:
        self._swap.close()

    def _pack(self, tensor: Tensor) -> Tensor | Swapped:
        if tensor.untyped_storage()._cdata in self._kept:
            return tensor
        held = self._swap.pack(tensor.detach())
        self.moved_bytes += held.num_bytes if isinstance(held, Swapped) else 0
        return held
