"""Experts in slots of a device: residents in one launch, arrivals in separate launches.

Shape suffixes: T tokens, K top-k, E experts, D model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.inference.device.misses import HostPart, Misses
from moe_runtime.inference.expert_layer import OffloadedExperts, bind_slots, has_kernel
from moe_runtime.inference.steps import LayerRouting
from moe_runtime.kernels.expert_mlp import ExpertWeights, QuantizedExperts, StackedExperts
from moe_runtime.kernels.expert_mlp.slotted import SlottedProducts
from moe_runtime.kernels.linear.gpu import reads_packed
from moe_runtime.kernels.quantized import QuantizedMatrix, QuantizedStack
from moe_runtime.memory.device.cuda_device import CudaDevice, CudaTold, Event
from moe_runtime.memory.device.device_layout import (
    CopyPart,
    copy_parts,
    lay_out_on_device,
    stack_slots,
)
from moe_runtime.memory.device.device_store import DeviceStore, Residents, Slots, use_arriving
from moe_runtime.memory.device.host_tables import has_room
from moe_runtime.memory.source import ExpertSource, Slab
from moe_runtime.memory.store import ExpertStore, StoreListener
from moe_runtime.memory.tiers import LowerStore, ReturningSource, TierFetcher
from moe_runtime.policies.eviction import LayerShares
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.checkpoints.formats import Weight

_FEW_CHOICES = 64
"""Most choices for which lists of rows are faster than arrays."""


class Routed(NamedTuple):
    """The inputs of a layer of experts."""

    hidden_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


class Found(NamedTuple):
    """Host copies of a layer's inputs, valid after the event ``copied``.

    Attributes:
        values_TD: inputs of the experts; None if the CPU computes none.
        used: the chosen experts, for later counting; the tensors may be reused by then.
    """

    ids_TK: torch.Tensor
    values_TD: torch.Tensor | None
    copied: Event
    used: Callable[[], Sequence[ExpertKey]]


class DeviceExperts(OffloadedExperts):
    """As `OffloadedExperts`, for a store of slots that kernels take as one stack.

    Residents are launched before the host knows the choices: kernels look up slots in a table on
    the device. A fully resident layer waits for nothing; any other waits for a copy of the choices
    and then computes misses as they arrive. Rows are summed once, in the order of the choices: the
    bits do not depend on residency.

    With `misses`, the CPU may compute experts of a few tokens in host memory; this changes the last
    bits. While a step is recorded, `recording` returns the sums ``[T, D]``.

    `OffloadedExperts` computes experts with norms, gates, dtypes or formats that the kernels do not
    support.
    """

    misses: Misses | None = None
    card: torch.device | None = None  # that has the experts, if the model is on another
    recording: Callable[[DeviceExperts, Routed], torch.Tensor] | None = None

    def _make_step_kernel(self, weights: ExpertWeights) -> None:
        """None: the host's kernel cannot read device memory."""

    def _forward_general(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed, forward = (hidden_states, top_k_index, top_k_weights), super()._forward_general
        if self.card is None or self.recording is not None:
            return forward(*routed)
        there = (tensor.to(self.card, non_blocking=True) for tensor in routed)
        return forward(*there).to(hidden_states.device, non_blocking=True)

    def forward_without_grad(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed = Routed(hidden_states, top_k_index, top_k_weights)
        if not self.has_stack(hidden_states.dtype) or not top_k_index.numel():
            return super().forward_without_grad(*routed)
        if self.recording is not None:
            return self.recording(self, routed)
        assert isinstance(self.store, DeviceStore)
        ids_TK, copied = self.store.device.download(top_k_index)
        products, values_TD = self.products(routed), None
        if self._plans(products, hidden_states, top_k_weights):
            values_TD, copied = self.store.device.download(hidden_states)
        found = Found(ids_TK, values_TD, copied, partial(self.keys_of_rows, ids_TK))
        launch = partial(self.store.launch_residents, self.layer, products.add)
        self.complete(products, routed, lambda: (launch(), found))
        return products.sums()

    def has_stack(self, dtype: torch.dtype) -> bool:
        """Whether kernels take this layer's slots as one stack, for rows of ``dtype``."""
        return (
            isinstance(self.store, DeviceStore)
            and self.partition is None
            and not self._norms_outputs
            and has_kernel(self._activation_now())
            and self.store.has_stack(self.layer, dtype)
        )

    def products(self, routed: Routed) -> SlottedProducts:
        """The products and weighted sums of these tokens."""
        activation = self._activation_now()
        assert has_kernel(activation)
        return SlottedProducts(*routed, self.num_experts, activation)

    def found(
        self, products: Any, routed: Routed, told: CudaTold, used: Callable[[], Sequence[ExpertKey]]
    ) -> Found:
        """Host copies from a recorded step."""
        plans = self._plans(products, routed.hidden_TD, routed.weights_TK)
        return Found(told.numbers, told.values[0] if plans else None, told, used)

    def complete(
        self, products: Any, routed: Routed, launch: Callable[[], tuple[Residents, Found]]
    ) -> None:
        """Queues residents by ``launch`` and then all missing experts."""
        store = self.store
        assert isinstance(store, DeviceStore)
        residents, found = launch()
        if self.misses is not None:
            self.misses.reached(self.layer)
        listens = self.listeners.routing_listeners or self.listeners.demand_listeners
        if residents.are_all and not listens and store.listener is None:
            store.count_later(found.copied, found.used)
            return
        while not found.copied.query() and store.count_one():
            """The host counts past steps while it waits."""
        found.copied.synchronize()
        if self.listeners.routing_listeners:
            kept = routed._replace(ids_TK=found.ids_TK.clone())  # listeners may keep it
            self._announce(self.experts_of(found.ids_TK), *kept)
        if not self.listeners.demand_listeners and found.ids_TK.numel() <= _FEW_CHOICES:
            ids = found.ids_TK.flatten().tolist()
            if self.misses is not None:
                self.misses.uses.count(self.layer, ids)
            if store.count_residents(residents, ids, found.copied, found.used):
                return
        experts = self.experts_of(found.ids_TK)
        keys: Sequence[ExpertKey] = [self._keys[expert] for expert in experts]
        routing = LayerRouting(self.layer, keys, *routed)
        if found.values_TD is not None:
            rows = self.rows_of(found.ids_TK)
            self._compute_planned(routing, rows, residents.experts, products, found.values_TD)
        elif keys:
            if self.misses is not None and not residents.experts.issuperset(experts):
                self.misses.speeds.rested()
            if not self.listeners.demand_listeners and (
                len(found.ids_TK) == 1 or len(keys) <= store.slots_of(self.layer)
            ):
                queue = partial(self._launch_arrived, store, products)
                keys = use_arriving(store, keys, residents, queue)
            if keys:
                add = partial(self._add, store, products, residents.experts)
                self._lease_and_run(routing._replace(keys=keys), add)

    def keys_of_rows(self, ids_TK: torch.Tensor) -> list[ExpertKey]:
        """The experts of a step, those with most rows last."""
        return [self._keys[expert] for expert in self.experts_of(ids_TK)]

    def experts_of(self, ids_TK: torch.Tensor) -> list[int]:
        """The experts of a step in the order of `rows_of`, whose lists are slow for prompts."""
        if ids_TK.numel() <= _FEW_CHOICES:
            return [*self.rows_of(ids_TK)]
        ids_N = ids_TK.flatten().numpy()
        ids_N = ids_N[(ids_N >= 0) & (ids_N < self.num_experts)]
        counts_E = np.bincount(ids_N, minlength=self.num_experts)
        last_E = np.zeros(self.num_experts, np.int64)
        np.maximum.at(last_E, ids_N, np.arange(len(ids_N)))
        visited = np.flatnonzero(counts_E)
        order = np.lexsort((last_E[visited], counts_E[visited]))
        return visited[order].tolist()

    def keys_of(self, experts: Iterable[int]) -> list[ExpertKey]:
        return [self._keys[expert] for expert in experts if 0 <= expert < self.num_experts]

    def _plans(self, products: Any, *differentiated: torch.Tensor) -> bool:
        """Whether the CPU may compute a part: not for long prompts or gradients."""
        return (
            self.misses is not None
            and products.takes_rows
            and not self._wants_gradient(*differentiated)
            and not self.misses.speeds.rests()
        )

    def _add(
        self,
        store: DeviceStore[ExpertWeights],
        products: Any,
        residents: frozenset[int],
        group: Sequence[tuple[ExpertKey, Any]],
    ) -> None:
        arrived = [key for key, _ in group if key.expert not in residents]
        if arrived:
            self._launch_arrived(store, products, arrived)

    def _launch_arrived(
        self, store: DeviceStore[ExpertWeights], products: Any, arrived: Sequence[ExpertKey]
    ) -> None:
        products.add(store.stack_of(arrived, products.arrived_E))

    def _compute_planned(
        self,
        routing: LayerRouting,
        rows: dict[int, list[int]],
        residents: frozenset[int],
        products: Any,
        values_TD: torch.Tensor,
    ) -> None:
        misses, activation = self.misses, self._activation_now()
        assert misses is not None
        assert has_kernel(activation)
        plan, begun_s = misses.plan(self.layer, rows, residents), misses.clock()
        keys = [self._keys[expert] for expert in plan.computed]
        num_choices = routing.ids_TK.shape[1]
        part = HostPart(misses, self.layer, keys, rows, values_TD, num_choices, activation)
        others = [key for key in routing.keys if key.expert not in plan.computed]
        kept = [self._keys[expert] for expert in plan.kept]
        asked_s, is_asked = misses.clock(), not plan.copied or len(others) == len(plan.copied)

        def add(group: Sequence[tuple[ExpertKey, Any]]) -> None:
            nonlocal is_asked
            before_s = misses.clock()
            if not is_asked:  # all copies are queued before residents come, first and unwaited
                misses.speeds.queue.add((before_s - asked_s) / len(plan.copied))
                is_asked = True
            if kept:  # after the others are leased
                misses.keep(kept)
                kept.clear()
            self._add(misses.store, products, residents, group)
            num_arrived = sum(key.expert not in residents for key, _ in group)
            if num_arrived:
                misses.speeds.launch.add((misses.clock() - before_s) / num_arrived)
            part.compute()  # while others are copied, or read

        if others:
            self._lease_and_run(routing._replace(keys=others), add)
        else:
            misses.keep(kept)
            for listener in self.listeners.demand_listeners:
                listener.demanded(routing)
        if keys:
            part.finish(products.give)
        if keys or plan.seconds:
            copied = [self._keys[expert] for expert in plan.copied]
            misses.store.count_misses(copied, len(keys), plan.seconds, begun_s, misses.clock())


W = TypeVar("W")

STREAM_BYTES = 2**28
"""Experts in flight while a prompt streams through a layer. A link of 55 GB/s takes 2.4 ms for
half; the host queues them in 1 ms."""

WORKSPACE_BYTES = 2 * 2**25
"""cuBLAS: 32 MiB on Hopper per stream, for the caller's stream and that of recordings."""


def experts_on_device(experts: ExpertMap) -> ExpertMap:
    layouts = {
        key: lay_out_on_device(layout, experts.matrices[key.layer])
        for key, layout in experts.layouts.items()
    }
    return replace(experts, layouts=layouts)


def keep_readable(packed: dict[str, str], entries: Mapping[str, Weight]) -> None:
    """Keeps only dense weights that a GPU multiplies without unpacking in ``packed``."""
    for name in [*packed]:
        weight = entries[name]
        if isinstance(weight, TensorEntry) or not reads_packed(weight.format):
            del packed[name]


def policy_of_device(plans: dict[str, MemoryPlan], experts: ExpertMap) -> str:
    """The policy for `auto` on a device.

    ``lru`` if steps may read misses from host memory: the policy then does not decide residency,
    and choosing one would need a listener in each step.
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
    device: CudaDevice,
) -> tuple[ExpertStore[ExpertWeights], ExpertStore[Tensor]]:
    """The device store and the host store below it. Raises CapacityError: memory cannot be
    allocated or pinned."""
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
    device: CudaDevice,
    bind: Callable[[ExpertKey, Tensor], W],
) -> tuple[DeviceStore[W], ExpertStore[Tensor]]:
    """As `open_device_stores`, for given slots. Raises CapacityError: host memory cannot be
    pinned."""
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
    """The slots of a device as stacks of experts, by layer. Layers without a stack are computed
    expert by expert."""

    def __init__(self, device: CudaDevice, slab: Slab, experts: ExpertMap) -> None:
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
        """Whether kernels take a layer's slots as one stack, for rows of ``dtype``."""
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
        """All slots with the slot of each expert, for work on the current stream.

        With ``into`` (``[E]`` int32 on the device) it only writes the slots there, for an existing
        stack over it, and returns None.
        """
        table = self._device.upload(slots, into)
        return self.stack_over(layer, table) if into is None else None

    def stack_over(self, layer: int, table: Tensor) -> StackedExperts | QuantizedExperts:
        return replace(self._stacks[layer], slot_of_expert=table)


def _stack(
    slab: Slab, experts: ExpertMap, key: ExpertKey
) -> StackedExperts | QuantizedExperts | None:
    """All slots as experts with the layout of ``key``; None if no kernel supports it."""
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
    """A view of the first slot, extended to all slots."""
    memory = slab.bytes.view(view.dtype)
    assert memory.untyped_storage().data_ptr() == view.untyped_storage().data_ptr(), "no view"
    shape = (slab.num_slots, *view.shape)
    stride = (slab.slot_bytes // view.element_size(), *view.stride())
    return memory.as_strided(shape, stride, view.storage_offset())
