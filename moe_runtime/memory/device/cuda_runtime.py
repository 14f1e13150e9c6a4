"""Calls of CUDA's runtime that torch has none for, or takes long for."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError

PAGE_BYTES = 4096
_ANY_WAY = 4
"""`cudaMemcpyDefault`: addresses say which way it goes."""
_MAPPED = 2
"""`cudaHostRegisterMapped`: kernels may read the memory."""
PIN_BYTES = 2**30
"""Host memory is registered in parts of about this size, which fail early and name a limit."""


def find_runtime() -> Any:
    """The runtime of CUDA that torch has loaded; None where it has another one."""
    try:
        # its calls here do not wait, so other threads need not have their turn meanwhile
        runtime = ctypes.PyDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        copy, _ = runtime.cudaMemcpyAsync, runtime.cudaGetLastError
    except (OSError, AttributeError):
        return None
    address = ctypes.c_void_p
    copy.argtypes = [address, address, ctypes.c_size_t, ctypes.c_int, address]
    return runtime


def queue_copies(
    runtime: Any, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: int
) -> None:
    """Queues copies of contiguous bytes.

    Torch's own copies look for what a tensor may be, which takes the host longer than the call.

    Args:
        runtime: of CUDA.
        parts: sources and targets.
        stream: its handle.

    Raises:
        RuntimeError: the runtime refuses one.
    """
    for source, target in parts:
        addresses = target.data_ptr(), source.data_ptr()
        if status := runtime.cudaMemcpyAsync(*addresses, source.numel(), _ANY_WAY, stream):
            runtime.cudaGetLastError()  # else this thread's next launch of a kernel tells of it
            raise RuntimeError(f"cudaMemcpyAsync failed with error {status}")


def is_mapped(runtime: Any, memory: torch.Tensor) -> bool:
    """Whether a GPU has registered host memory at its address on the host.

    Args:
        runtime: of CUDA.
        memory: which was registered.
    """
    found, address = ctypes.c_void_p(), memory.data_ptr()
    if runtime.cudaHostGetDevicePointer(ctypes.byref(found), ctypes.c_void_p(address), 0):
        runtime.cudaGetLastError()  # else this thread's next launch of a kernel tells of it
        return False
    return found.value == address


def pin_in_parts(
    runtime: Any, memory: torch.Tensor, slot_bytes: int, *, part_bytes: int = PIN_BYTES
) -> None:
    """Registers host memory with CUDA until the tensor goes, and then gives it back.

    A copy must not cross two registrations, nor may these share a page: a part is a number of whole
    slots that ends with a page.

    Args:
        runtime: ``torch.cuda.cudart()``, or what has its functions.
        memory: page-aligned, ``uint8``.
        slot_bytes: copies begin and end in one slot.
        part_bytes: how much is registered at once, about.

    Raises:
        CapacityError: the system does not allow so much; nothing is registered then.
    """
    unit = math.lcm(slot_bytes, PAGE_BYTES)
    parts = memory.split(max(1, part_bytes // unit) * unit)
    held: list[int] = []
    # the tensor itself must not be held: its memory goes with it
    weakref.finalize(memory.untyped_storage(), _unregister, runtime, held)
    for part in parts:
        if int(runtime.cudaHostRegister(part.data_ptr(), part.numel(), _MAPPED)) != 0:
            _unregister(runtime, held)
            size = format_bytes(memory.numel())
            raise CapacityError(
                f"cannot lock {size} of host memory for the GPU; raise the limit of locked memory "
                "(ulimit -l) or lower host_memory"
            )
        held.append(part.data_ptr())


def _unregister(runtime: Any, held: list[int]) -> None:
    if held and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # kernels may read there
    while held:
        runtime.cudaHostUnregister(held.pop())
