"""The two stores of a model on a device: experts in its memory, and in the host's below it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.inference.expert_layer import bind_slots
from moe_runtime.kernels.expert_mlp import ExpertWeights, QuantizedExperts, StackedExperts
from moe_runtime.kernels.quantized import QuantizedMatrix, QuantizedStack
from moe_runtime.memory.device.device import Device
from moe_runtime.memory.device.device_layout import (
    CopyPart,
    copy_parts,
    lay_out_on_device,
    stack_slots,
)
from moe_runtime.memory.device.device_store import DeviceStore, Slots
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
"""Of experts in flight while a prompt streams through a layer: half take a link of 55 GB/s 2.4 ms,
and the host queues them in 1 ms."""

WORKSPACE_BYTES = 2 * 2**25
"""For cuBLAS: 32 MiB on Hopper for each stream, the caller's and that of recordings."""


def experts_on_device(experts: ExpertMap) -> ExpertMap:
    layouts = {
        key: lay_out_on_device(layout, experts.matrices[key.layer])
        for key, layout in experts.layouts.items()
    }
    return replace(experts, layouts=layouts)


def plan_device(experts: ExpertMap) -> tuple[ExpertMap, int]:
    """Experts as they lie on a device, and bytes to set aside there for libraries."""
    return experts_on_device(experts), WORKSPACE_BYTES


def policy_of_device(plans: dict[str, MemoryPlan], experts: ExpertMap) -> str:
    """What the policy `auto` is on a device.

    ``lru`` where steps may read misses in the host's memory: a policy has no part in who stays
    there, and choosing one would need a listener within each step.
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


class DeviceStacks:
    """As `SlotStacks`; layers without a stack are computed by expert."""

    def __init__(self, device: Device, slab: Slab, experts: ExpertMap) -> None:
        self._device = device
        self._stacks: dict[int, StackedExperts | QuantizedExperts] = {}
        self._taken: dict[tuple[int, torch.dtype], bool] = {}
        self._num_experts = [module.num_experts for module in experts.modules]
        if importlib.util.find_spec("triton") is None:
            return
        forms: list[dict[object, ExpertKey]] = [{} for _ in experts.modules]
        for key, layout in experts.layouts.items():
            forms[key.layer][layout.form] = key
        for layer, keys in enumerate(forms):
            if len(keys) == 1:
                (key,) = keys.values()
                stack = _stack(slab, experts, key)
                if stack is not None:
                    self._stacks[layer] = stack

    def takes(self, layer: int, dtype: torch.dtype) -> bool:
        if (layer, dtype) not in self._taken:
            self._taken[layer, dtype] = self._can_take(layer, dtype)
        return self._taken[layer, dtype]

    def _can_take(self, layer: int, dtype: torch.dtype) -> bool:
        stack = self._stacks.get(layer)
        if stack is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        if isinstance(stack, StackedExperts):
            return stack.dtype == dtype
        from moe_runtime.kernels.expert_mlp.triton_path import quantized_problem

        return quantized_problem(torch.empty(0, dtype=dtype, device=stack.device), stack) is None

    def num_experts(self, layer: int) -> int:
        return self._num_experts[layer]

    def stack(
        self, layer: int, slots: Slots, into: Tensor | None = None
    ) -> StackedExperts | QuantizedExperts | None:
        table = self._device.upload(slots, into)
        return self.stack_over(layer, table) if into is None else None

    def stack_over(self, layer: int, table: Tensor) -> StackedExperts | QuantizedExperts:
        return replace(self._stacks[layer], slot_of_expert=table)


def _stack(
    slab: Slab, experts: ExpertMap, key: ExpertKey
) -> StackedExperts | QuantizedExperts | None:
    """All slots as experts that lie as this one does; None where no kernel takes them so."""
    layout, names = experts.layouts[key], experts.matrices[key.layer]
    plain = stack_slots(slab.bytes, slab.slot_bytes, layout, names)
    if plain is not None:
        return StackedExperts(**plain._asdict())
    found: dict[str, Any] = experts.matrices_in(key, slab.slot(0))
    for name, part in found.items():
        if name.endswith("_bias"):
            found[name] = _every_slot(slab, part)
            continue
        if not isinstance(part, QuantizedMatrix):
            return None
        codes = _every_slot(slab, part.codes)
        factor = None if part.global_scale is None else part.global_scale.view(1)
        parts = (part.scales, part.zero_points, factor)
        every = (None if tensor is None else _every_slot(slab, tensor) for tensor in parts)
        found[name] = QuantizedStack(part.format, part.num_cols, codes, *every)
    return QuantizedExperts(gate=found.pop("gate", None), **found)


def _every_slot(slab: Slab, view: Tensor) -> Tensor:
    """A view of the first slot, as one of all slots."""
    memory = slab.bytes.view(view.dtype)
    assert memory.untyped_storage().data_ptr() == view.untyped_storage().data_ptr(), "no view"
    shape = (slab.num_slots, *view.shape)
    stride = (slab.slot_bytes // view.element_size(), *view.stride())
    return memory.as_strided(shape, stride, view.storage_offset())
