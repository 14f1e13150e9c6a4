"""Updates of some experts on the device that computes, while the CPU updates others.

One record at a time is away: its state and gradient go to the device, are updated there, and come
back when the next record of the device is ready to go, or when it is asked for. On a GPU the copies
and the update are queued on a stream of their own, so that the CPU goes on with other records.

Source: Maurya et al., "Deep Optimizer States" (2024).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.planning.update_stride import UpdateSpeeds, best_stride, takes_turns
from moe_runtime.training.offload.optimizers.adamw import AdamW
from moe_runtime.training.offload.optimizers.updates import UpdateStep, take_steps
from moe_runtime.training.offload.states.records import ExpertTensor, RecordLayout, Sections

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
    """Takes every `stride`-th update to a device.

    Args:
        device: where the model computes; any that torch knows.
        stride: of how many updates one is the device's; None for none.

    Attributes:
        stride: as given.
        num_updates: made on the device so far.
        moved_bytes: to the device and back so far.
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
        """Begins the update of a record with its own gradient, if it is the device's turn.

        Args:
            layout: of the record.
            record: with state and gradient, which is scaled already; not to be touched until
                `finish` is called.
            settings: of AdamW.
            step: to be taken.
            refreshes: as in `take_steps`.
            finish: called once the record is updated, by a later call of this or of `wait`.

        Returns:
            Whether it was begun.
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
        """Brings the record that is on the device back to its tier."""
        away, self._away = self._away, None
        if away is None:
            return
        with torch.cuda.stream(self._stream):
            away.record[: away.num_bytes].copy_(away.copy[: away.num_bytes])
        away.finish()


def measure_speeds(device: torch.device) -> UpdateSpeeds:
    """Rates of updates and copies, by short trials with a million parameters."""
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
        # what the device computes with is brought by the next forward pass, whoever updated it
        host_bytes_in=0,
        buffers=1,
    )


def planned_updates(device: torch.device) -> DeviceUpdates:
    """Updates with the stride that measured speeds make the fastest."""
    return DeviceUpdates(device, best_stride(measure_speeds(device)))
