"""Updates of some experts on the device that computes, while the CPU updates others.

The device makes one of every `k` updates. It holds one record at a time: state and gradient go to
the device, are updated, and return when the next record is ready. Transfers run in both directions
at once. The busiest of the four resources decides the time of a period of `k` updates. A period is
also at least one record's round trip divided by the records that fit.

Source: Maurya et al., "Deep Optimizer States" (2024). The equations of its performance model are
not public as text; these are our own, for its schedule.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.training.offload.adamw import AdamW, UpdateStep, take_steps
from moe_runtime.training.offload.records import ExpertTensor, RecordLayout, Sections


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSpeeds:
    """Measured rates, and bytes of a parameter.

    Attributes:
        downcast_params_per_s: conversion of updated parameters on the CPU; infinite without one.
        bytes_in: of the state of a parameter that is updated on the GPU.
        host_bytes_in: of a parameter updated on the CPU, in the dtype of the GPU's products.
        buffers: subgroups that fit on the GPU at once.
    """

    cpu_params_per_s: float
    device_params_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    downcast_params_per_s: float = math.inf
    bytes_in: int = 12
    bytes_out: int = 12
    host_bytes_in: int = 2
    buffers: int = 2


def params_per_s(stride: int | None, speeds: UpdateSpeeds) -> float:
    """Updates a second if the GPU updates every `stride`-th subgroup; none for None."""
    on_cpu_s = 1 / speeds.cpu_params_per_s + 1 / speeds.downcast_params_per_s
    back_s = speeds.host_bytes_in / speeds.to_device_bytes_per_s
    if stride is None:
        return 1 / max(on_cpu_s, back_s)
    there_s = speeds.bytes_in / speeds.to_device_bytes_per_s
    to_host_s = speeds.bytes_out / speeds.to_host_bytes_per_s
    update_s = 1 / speeds.device_params_per_s
    others = stride - 1
    period_s = max(
        others * on_cpu_s,
        there_s + others * back_s,
        to_host_s,
        update_s,
        (there_s + update_s + to_host_s) / speeds.buffers,
    )
    return stride / period_s


def best_stride(speeds: UpdateSpeeds, *, largest: int = 64) -> int | None:
    """The stride with the most updates a second; None if the CPU alone is as fast."""
    best = max(range(1, largest + 1), key=lambda stride: params_per_s(stride, speeds))
    return best if params_per_s(best, speeds) > params_per_s(None, speeds) else None


def takes_turns(stride: int | None) -> Iterator[bool]:
    """Whether the GPU updates each of the subgroups in turn."""
    return (stride is not None and number % stride == 0 for number in itertools.count(1))


_STATE_BYTES = 12
_GRADIENT_BYTES = 4
_TRIAL = RecordLayout([ExpertTensor("trial", (2**20,), True)], torch.float32)


@dataclass(slots=True)
class _Away:
    record: Tensor
    copy: Tensor
    num_bytes: int
    finish: Callable[[], None]


class DeviceUpdates:
    """Takes every `stride`-th update to a device; None takes none.

    Attributes:
        moved_bytes: in both directions so far.
    """

    def __init__(self, device: torch.device, stride: int | None) -> None:
        self.stride = stride
        self.num_updates = self.moved_bytes = 0
        self._device = device
        self._turns = takes_turns(stride)
        self._away: _Away | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def takes(
        self,
        layout: RecordLayout,
        record: Tensor,
        settings: AdamW,
        step: UpdateStep,
        *,
        refreshes: bool,
        finish: Callable[[], None],
    ) -> bool:
        """Begins the update of a record with its own scaled gradient, if it is the device's turn.

        Args:
            record: not to be used until `finish` is called.
            finish: called once the record is updated, by a later call of this or of `wait`.
        """
        if not next(self._turns):
            return False
        self.wait()
        with torch.cuda.stream(self._stream):
            copy = record[: layout.record_bytes].to(self._device, non_blocking=True, copy=True)
            gradient = layout.flat(copy, Sections.GRADIENT)
            take_steps(layout, copy, settings, [step], gradient, refreshes=refreshes)
        self._away = _Away(record, copy, layout.state_bytes, finish)
        self.num_updates += 1
        self.moved_bytes += layout.record_bytes + layout.state_bytes
        return True

    def wait(self) -> None:
        """Copies the record on the device back to its tier."""
        away, self._away = self._away, None
        if away is None:
            return
        with torch.cuda.stream(self._stream):
            away.record[: away.num_bytes].copy_(away.copy[: away.num_bytes])
        away.finish()


def measure_speeds(device: torch.device) -> UpdateSpeeds:
    record = torch.zeros(_TRIAL.record_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        record = record.pin_memory()
    away = record.to(device)

    def seconds(work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - started)
        return max(best, 1e-9)

    def update(target: Tensor) -> None:
        gradient = _TRIAL.flat(target, Sections.GRADIENT)
        take_steps(_TRIAL, target, AdamW(), [UpdateStep(1, 0.0)], gradient)

    size = _TRIAL.record_bytes
    return UpdateSpeeds(
        cpu_params_per_s=_TRIAL.used / seconds(lambda: update(record)),
        device_params_per_s=_TRIAL.used / seconds(lambda: update(away)),
        to_device_bytes_per_s=size / seconds(lambda: away.copy_(record, non_blocking=True)),
        to_host_bytes_per_s=size / seconds(lambda: record.copy_(away, non_blocking=True)),
        bytes_in=_STATE_BYTES + _GRADIENT_BYTES,
        bytes_out=_STATE_BYTES,
        # the next forward pass copies the weights, wherever they were updated
        host_bytes_in=0,
        buffers=1,
    )


def planned_updates(device: torch.device) -> DeviceUpdates:
    return DeviceUpdates(device, best_stride(measure_speeds(device)))
