"""Training on a device: the streams of an emulated one beside torch's emulated accelerator."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from accelerator import CROSSINGS, NAME, Crossings, DeviceTensor, accelerator, place_of
from emulated_device import POISON
from emulated_models import EagerDevice
from torch import Tensor

from moe_runtime.training.finetune import finetune_run
from moe_runtime.training.offload import memory as offload_memory


class ForeignDevice(EagerDevice):
    """Slots are tensors of the accelerator, and its products take virtual time.

    Args:
        bytes_per_s: of the link, in either direction.
        flops_per_s: of products; infinite for none that take time.
    """

    def __init__(self, *, bytes_per_s: float = 1e9, flops_per_s: float = float("inf")) -> None:
        super().__init__(bytes_per_s=bytes_per_s, latency_s=0.0)
        self.compute_s = 0.0
        self._flops_per_s = flops_per_s

    def allocate(self, num_bytes: int) -> Tensor:
        return DeviceTensor(super().allocate(num_bytes))

    def copy(self, parts: Any, after: Any, priority: Any) -> Any:
        """What a failing copy was to bring is never there."""
        fails = bool(self.late_faults) and not self.faults
        event = super().copy(parts, after, priority)
        if fails:
            with self._lock:
                self._at(event.event.time_s, lambda: [part.fill_(POISON) for _, part in parts])
        return event

    def work(self, name: str, tensors: list[Tensor]) -> None:
        """Products begin when their stream is ready, and take the time of their operations."""
        if name not in ("aten::mm", "aten::addmm", "aten::addmm_"):
            return
        left, right = tensors[-2:]
        duration_s = 2 * left.numel() * right.shape[-1] / self._flops_per_s
        self.compute_s += duration_s
        self.compute(lambda: None, duration_s)


class DeviceMemory:
    """What tensors of the emulated device take, views of one memory once.

    Attributes:
        peak_bytes: the most so far.
    """

    def __init__(self) -> None:
        self.peak_bytes = self._bytes = 0
        self._sizes: dict[int, int] = {}  # by address

    def made(self, host: Tensor) -> None:
        """A tensor came to be."""
        memory = host.untyped_storage()
        address = memory.data_ptr()
        if address in self._sizes or not memory.nbytes():
            return
        self._sizes[address] = memory.nbytes()
        self._bytes += memory.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(memory, self._gone, address)

    def _gone(self, address: int) -> None:
        self._bytes -= self._sizes.pop(address)


@contextlib.contextmanager
def computing_on(name: str, device: ForeignDevice | None = None) -> Iterator[torch.device]:
    """The place of a name of `accelerator.PLACES`; on the emulated one, this device's streams."""
    if name != NAME:
        yield place_of(name)
        return
    place = accelerator()
    device = device or ForeignDevice()
    before = vars(CROSSINGS).copy()
    vars(CROSSINGS).update(vars(Crossings()), on_work=device.work)
    with (
        # torch counts its threads of backward passes once, perhaps before there was this device
        torch.autograd.set_multithreading_enabled(False),
        patch.object(offload_memory, "open_device", lambda place: device),
        patch.object(offload_memory, "available_device_bytes", lambda place: 2**34),
        patch.object(finetune_run, "open_device", lambda place: device),
        patch.object(finetune_run, "available_device_bytes", lambda place: 2**34),
    ):
        yield place
    vars(CROSSINGS).update(before)
