"""The two stores of a model on a device: experts in its memory, and in the host's below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.inference.device.device_stacks import DeviceStacks
from moe_runtime.inference.expert_weights import bind_slots
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.memory.device.device import Device
from moe_runtime.memory.device.device_layout import CopyPart, copy_parts, lay_out_on_device
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.memory.device.host_tables import has_room
from moe_runtime.memory.entries import StoreListener
from moe_runtime.memory.slab import Slab
from moe_runtime.memory.source import ExpertSource
from moe_runtime.memory.store import ExpertStore
from moe_runtime.memory.tiers import LowerStore, ReturningSource, TierFetcher
from moe_runtime.policies.eviction import LayerShares
from moe_runtime.types import ExpertKey

W = TypeVar("W")

STREAM_BYTES = 2**28
"""Bytes of experts on their way to a device while a prompt streams through a layer: half of them
take a link of 55 GB/s 2.4 ms, and the host queues them and what computes them in 1 ms."""

WORKSPACE_BYTES = 2 * 2**25
"""Set aside for what cuBLAS keeps: 32 MiB on Hopper for each stream that it was used on, which are
the caller's and that of recordings."""


def experts_on_device(experts: ExpertMap) -> ExpertMap:
    """The same experts, those of a layer alike in their slots."""
    layouts = {
        key: lay_out_on_device(layout, experts.matrices[key.layer])
        for key, layout in experts.layouts.items()
    }
    return replace(experts, layouts=layouts)


def plan_device(experts: ExpertMap) -> tuple[ExpertMap, int]:
    """Experts as they lie on a device, and bytes to set aside there for what libraries keep."""
    return experts_on_device(experts), WORKSPACE_BYTES


def policy_of_device(plans: dict[str, MemoryPlan], experts: ExpertMap) -> str:
    """What the policy `auto` is on a device.

    Returns:
        ``lru`` where steps may read experts that the device lacks where they lie in the host's
        memory: who comes to stay there is not up to a policy, and to choose one by what is routed
        somebody would have to hear of it within a step; else ``auto``.
    """
    num_layers = len({key.layer for key in experts.layouts})
    is_read_there = has_room(
        plans["device"].num_slots, plans["host"].num_slots, num_experts=len(experts.layouts),
        num_layers=num_layers, num_choices=experts.top_k,
    )  # fmt: skip
    return "lru" if is_read_there else "auto"


def open_device_stores(
    source: ExpertSource,
    slab: Slab,
    plans: dict[str, MemoryPlan],
    new_policy: Callable[[MemoryPlan], LayerShares],
    experts: dict[str, ExpertMap],
    listeners: Sequence[StoreListener | None],
    device: Device,
) -> tuple[ExpertStore[ExpertWeights], ExpertStore[Tensor]]:
    """The store that experts are computed from, and that of the host's memory below it.

    Args:
        source: the files.
        slab: slots in the host's memory, which are locked there.
        plans: of the device and of the host.
        new_policy: makes the policy of a tier.
        experts: where they lie in slots of the device and of the host.
        listeners: of the two stores.
        device: whose slots experts are computed from.

    Raises:
        CapacityError: memory cannot be had, or not be locked.
    """
    slots = Slab(plans["device"].num_slots, plans["device"].slot_bytes, allocate=device.allocate)
    above, below = open_tiers(
        source, slab, slots, plans, new_policy, experts, listeners, device,
        bind_slots(experts["device"]),
    )  # fmt: skip
    above.stacks = DeviceStacks(device, slots, experts["device"])
    return above, below


def open_tiers(
    source: ExpertSource,
    slab: Slab,
    slots: Slab,
    plans: dict[str, MemoryPlan],
    new_policy: Callable[[MemoryPlan], LayerShares],
    experts: dict[str, ExpertMap],
    listeners: Sequence[StoreListener | None],
    device: Device,
    bind: Callable[[ExpertKey, Tensor], W],
) -> tuple[DeviceStore[W], ExpertStore[Tensor]]:
    """A store of experts in slots of a device, and that of the host's memory below it.

    Args:
        source, slab, plans, new_policy, experts, listeners, device: as of `open_device_stores`.
        slots: of the device.
        bind: a filled slot of it as what leases yield.

    Raises:
        CapacityError: the host's memory cannot be locked.
    """
    there, here = plans["device"], plans["host"]
    found: dict[ExpertKey, tuple[CopyPart, ...]] = {}

    def moves_of(key: ExpertKey) -> tuple[CopyPart, ...]:
        if key not in found:
            found[key] = copy_parts(experts["host"].layouts[key], experts["device"].layouts[key])
        return found[key]

    device.pin(slab.bytes, slab.slot_bytes)
    below = LowerStore(
        ReturningSource(source, device),
        slab,
        new_policy(here),
        lambda _, slot: slot,
        stream_slots=here.stream_slots(),
        listener=listeners[1],
    )
    above = DeviceStore(
        device,
        TierFetcher(below, device, moves_of),
        slots,
        new_policy(there),
        bind,
        stream_slots=there.stream_slots(STREAM_BYTES),
        listener=listeners[0],
    )
    return above, below
