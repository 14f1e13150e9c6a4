"""The stores that frozen experts are computed from: those that serve inference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.inference.device.device_stores import DeviceStacks, experts_on_device, open_tiers
from moe_runtime.memory.device.cuda_device import open_device
from moe_runtime.memory.slab import Slab
from moe_runtime.memory.source import ExpertSource
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LayerShares, Setting, make_policy
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.training.offload.memory import FrozenMemory
from moe_runtime.types import ExpertKey, ModelSignature


def open_frozen(
    experts: ExpertMap, signature: ModelSignature, memory: FrozenMemory, place: torch.device
) -> tuple[ExpertMap, list[ExpertStore[Tensor]]]:
    """How experts lie in the slots that they are computed from, and the stores.

    Args:
        experts: where they lie in the checkpoint.
        signature: of the model.
        memory: how the budgets are divided.
        place: what computes.

    Returns:
        The stores: the one that experts are computed from, and below it, where that is a device,
        the one of the host.

    Raises:
        CapacityError: memory cannot be had, or not be locked.
        ValueError: the device is none that experts can be computed on.
    """
    host, there = memory.host, memory.device
    policy_of = _policies(signature)
    with contextlib.ExitStack() as opened:
        source = ExpertSource(experts.layouts)
        opened.callback(source.close)
        slab = Slab(host.num_slots, host.slot_bytes)
        if there is None:
            store = ExpertStore(
                source, slab, policy_of(host), _filled, stream_slots=host.stream_slots()
            )
            opened.pop_all()
            return experts, [store]
        device = open_device(place)
        slots = Slab(there.num_slots, there.slot_bytes, allocate=device.allocate)
        on_device = experts_on_device(experts)
        stores = open_tiers(
            source, slab, slots, {"device": there, "host": host}, policy_of,
            {"device": on_device, "host": experts}, (None, None), device, _filled,
        )  # fmt: skip
        if not any(on_device.packings):  # kernels have no gradients through codes
            stores[0].stacks = DeviceStacks(device, slots, on_device)
        opened.pop_all()
        return on_device, [*stores]


def _filled(_: ExpertKey, slot: Tensor) -> Tensor:
    """The slot as it is: values are written out anew whenever an expert is used."""
    return slot


def _policies(signature: ModelSignature) -> Callable[[MemoryPlan], LayerShares]:
    def of(plan: MemoryPlan) -> LayerShares:
        return make_policy(
            "lru",
            num_slots=plan.num_slots,
            setting=Setting(shape=shape_of(signature)),
            adaptive=False,
            reserve=plan.stream_slots(),
        )

    return of
