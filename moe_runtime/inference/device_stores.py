"""The two stores of a model on a device: experts in its memory, and in the host's below it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.memory.device import CudaDevice
from moe_runtime.memory.entries import StoreListener
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.memory.slab import Slab
from moe_runtime.memory.source import ExpertSource
from moe_runtime.memory.tiers import DeviceStore, TierFetcher
from moe_runtime.policies.eviction import LayerShares
from moe_runtime.types import ExpertKey


def open_device_stores(
    source: ExpertSource,
    slab: Slab,
    plans: dict[str, MemoryPlan],
    new_policy: Callable[[MemoryPlan], LayerShares],
    bind: Callable[[ExpertKey, Tensor], ExpertWeights],
    listeners: tuple[StoreListener | None, StoreListener | None],
    place: torch.device,
) -> tuple[ExpertStore[ExpertWeights], ExpertStore[Tensor]]:
    """The store that experts are computed from, and that of the host's memory below it.

    Args:
        source: the files.
        slab: slots in the host's memory, which are locked there.
        plans: of the device and of the host.
        new_policy: makes the policy of a tier.
        bind: turns a slot of the device into an expert's weights.
        listeners: of the two stores.
        place: the device.

    Raises:
        CapacityError: memory cannot be had, or not be locked.
    """
    device, there, here = CudaDevice(place), plans["device"], plans["host"]
    device.pin(slab.bytes, slab.slot_bytes)
    below: ExpertStore[Tensor] = ExpertStore(
        source,
        slab,
        new_policy(here),
        lambda _, slot: slot,
        stream_slots=here.stream_slots,
        listener=listeners[1],
    )
    above = DeviceStore(
        device,
        TierFetcher(below, device),
        Slab(there.num_slots, there.slot_bytes, allocate=device.allocate),
        new_policy(there),
        bind,
        stream_slots=there.stream_slots,
        listener=listeners[0],
    )
    return above, below
