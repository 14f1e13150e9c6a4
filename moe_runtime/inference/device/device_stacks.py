"""The slots of a device as Triton kernels take the experts of each layer, quantised ones packed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.kernels.expert_mlp import QuantizedExperts, StackedExperts
from moe_runtime.kernels.quantized import QuantizedMatrix, QuantizedStack
from moe_runtime.memory.device.device import Device
from moe_runtime.memory.device.device_layout import stack_slots
from moe_runtime.memory.device.device_store import Slots
from moe_runtime.memory.slab import Slab
from moe_runtime.types import ExpertKey


class DeviceStacks:
    """As `memory.device.device_store.SlotStacks`; layers without a stack are computed by expert."""

    def __init__(self, device: Device, slab: Slab, experts: ExpertMap) -> None:
        """Takes the slots and how experts lie in them."""
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
        """As ``SlotStacks.takes``."""
        if (layer, dtype) not in self._taken:
            self._taken[layer, dtype] = self._can_take(layer, dtype)
        return self._taken[layer, dtype]

    def _can_take(self, layer: int, dtype: torch.dtype) -> bool:
        stack = self._stacks.get(layer)
        if stack is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        if isinstance(stack, StackedExperts):
            return stack.dtype == dtype
        from moe_runtime.kernels.expert_mlp.quantized.quantized_triton import problem

        return problem(torch.empty(0, dtype=dtype, device=stack.device), stack) is None

    def num_experts(self, layer: int) -> int:
        """As ``SlotStacks.num_experts``."""
        return self._num_experts[layer]

    def stack(
        self, layer: int, slots: Slots, into: Tensor | None = None
    ) -> StackedExperts | QuantizedExperts | None:
        """As ``SlotStacks.stack``."""
        table = self._device.upload(slots, into)
        return self.stack_over(layer, table) if into is None else None

    def stack_over(self, layer: int, table: Tensor) -> StackedExperts | QuantizedExperts:
        """As ``SlotStacks.stack_over``."""
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
