"""Which share of the optimizer's updates a GPU takes over from the CPU: every k-th subgroup.

In the update phase a GPU has nothing to do. Of every `k` consecutive subgroups of parameters, one
is brought to it, updated there and brought back, while the CPU updates the others. Transfers run in
both directions at once, and each of the four resources takes its part of a period of `k`
subgroups; the one with most to do decides. Because only so many subgroups fit on the device, a
period also cannot be shorter than one subgroup's way there and back, divided by their number.

Source: Maurya et al., "Deep Optimizer States" (2024). The equations of its performance model are
not public in text form; these are our own, for its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSpeeds:
    """Measured rates, and bytes of a parameter.

    Attributes:
        cpu_params_per_s: updates on the CPU.
        device_params_per_s: updates on the GPU.
        to_device_bytes_per_s: of the link.
        to_host_bytes_per_s: of the link.
        downcast_params_per_s: conversion of updated parameters on the CPU; infinite without any.
        bytes_in: of a parameter that is updated on the GPU: its state.
        bytes_out: of it, back.
        host_bytes_in: of a parameter that was updated on the CPU: what the GPU computes with.
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

    def __post_init__(self) -> None:
        rates = ("cpu", "device", "downcast")
        names = [f"{rate}_params_per_s" for rate in rates]
        for name in (*names, "to_device_bytes_per_s", "to_host_bytes_per_s", "buffers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def params_per_s(stride: int | None, speeds: UpdateSpeeds) -> float:
    """Updates a second when every `stride`-th subgroup is the GPU's; None leaves it none."""
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
    """The stride with most updates a second; None when the CPU alone is as fast.

    Args:
        speeds: measured.
        largest: stride beyond which the GPU is not worth its memory.
    """
    best = max(range(1, largest + 1), key=lambda stride: params_per_s(stride, speeds))
    return best if params_per_s(best, speeds) > params_per_s(None, speeds) else None


def takes_turns(stride: int | None) -> Iterator[bool]:
    """For one subgroup after another: whether the GPU updates it."""
    number = 0
    while True:
        number += 1
        yield stride is not None and number % stride == 0
