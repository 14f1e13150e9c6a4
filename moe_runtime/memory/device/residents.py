"""The experts of a layer that are in slots of a device, as kernels take them."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.memory.entries import Entry

Slots = npt.NDArray[np.int32]
"""``[E]``: of each expert of a layer, below 0 for none."""


def is_resident(entry: Entry[Any] | None) -> bool:
    """Whether an expert is in its slot, as a look without the lock has it."""
    return entry is not None and entry.arrived and entry.read.error is None


class SlotStacks(Protocol):
    """How kernels take the experts of a layer where they lie in the slots of a device."""

    def takes(self, layer: int, dtype: torch.dtype) -> bool:
        """Whether kernels take the slots of a layer as one stack, for rows of this type."""
        ...

    def num_experts(self, layer: int) -> int:
        """Experts of the layer."""
        ...

    def stack(self, layer: int, slots: Slots, into: torch.Tensor | None = None) -> Any:
        """All slots, and for each expert of the layer the one that it lies in, below 0 for none.

        For work that is queued on the caller's current stream.

        Args:
            layer: of the experts.
            slots: of each expert of the layer.
            into: memory of the device for them, ``[E]`` int32, over which a stack was made before
                and none is now; new memory if omitted.
        """
        ...

    def stack_over(self, layer: int, table: torch.Tensor) -> Any:
        """As ``stack``, with slots that are found in a table of the device: ``[E]`` int32."""
        ...


class Residents:
    """The experts of a layer that are in slots of a device.

    Attributes:
        slots: of each expert of the layer, below 0 for those that are not there.
        experts: who is there.
        are_all: whether they are the whole layer, kept by the policy.
        stream: on whose stream kernels may take them.
    """

    def __init__(
        self, layer: int, slots: Slots, stacks: SlotStacks, stream: int, *, are_kept: bool
    ) -> None:
        """Takes what the attributes are made of."""
        self.slots, self.stream = slots, stream
        self.experts = frozenset(np.flatnonzero(slots >= 0).tolist())
        self.are_all = are_kept and len(self.experts) == len(slots)
        self._make_stack = partial(stacks.stack, layer, slots)

    @cached_property
    def stack(self) -> Any:
        """What kernels take; None where there is nobody."""
        return self._make_stack() if self.experts else None
