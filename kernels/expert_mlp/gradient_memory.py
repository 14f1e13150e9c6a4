"""Memory of large gradients, which a parameter keeps from one backward pass to the next.

A layer's gradient is as large as the layer, and the first touch of fresh memory costs as much as
filling it. Where nobody holds the last gradient of a parameter any more, as after
`zero_grad(set_to_none=True)`, the next one is written over it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from moe_runtime.kernels.native.pages import clear, is_large, untouched_zeros


@dataclass(frozen=True, slots=True)
class _Kept:
    """The memory of a gradient, and who holds that gradient."""

    bytes: Any
    holder: StorageWeakRef


class GradientMemory:
    """The memory of one gradient for each large parameter; it goes when the parameter does."""

    def __init__(self) -> None:
        self._kept: MutableMapping[Tensor, _Kept] = WeakTensorKeyDictionary()
        self._lock = threading.Lock()

    def take(self, parameter: Tensor, written: Collection[int]) -> Tensor:
        """A gradient of a parameter ``[E, ...]``: zero but for the experts that will be written.

        Args:
            parameter: of all experts; where it is a view, what it is a view of keeps the memory.
            written: experts whose whole gradient the caller writes; it may be anything now.
        """
        if not is_large(parameter):
            return untouched_zeros(parameter)
        owner = parameter if parameter._base is None else parameter._base
        with self._lock:
            last = self._kept.get(owner)
            if last is not None and not last.holder.expired():
                return untouched_zeros(parameter)  # the last gradient is still in use
            if last is not None and last.bytes.nbytes == parameter.nbytes:
                memory, is_stale = last.bytes, True
            else:
                memory, is_stale = untouched_zeros(parameter).view(torch.uint8).numpy(), False
            gradient = torch.from_numpy(memory).view(parameter.dtype).view(parameter.shape)
            self._kept[owner] = _Kept(memory, StorageWeakRef(gradient.untyped_storage()))
        if is_stale:
            for is_written, run in groupby(range(len(gradient)), key=set(written).__contains__):
                first, *others = run
                if not is_written:
                    clear(gradient[first : first + 1 + len(others)])
        return gradient


@functools.cache
def gradient_memory() -> GradientMemory:
    """That of this process."""
    return GradientMemory()
