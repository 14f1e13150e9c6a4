"""Experts in slots of a device: residents in one launch, arrivals in launches of their own.

Shape suffixes: T tokens, K top-k, E experts, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from moe_runtime.inference.cpu_misses.computing import HostPart, Misses
from moe_runtime.inference.expert_layer import OffloadedExperts, is_kernels
from moe_runtime.inference.steps import LayerRouting
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.kernels.expert_mlp.implementations.slotted import SlottedProducts
from moe_runtime.memory.device_store import DeviceStore
from moe_runtime.types import ExpertKey


class DeviceExperts(OffloadedExperts):
    """As `OffloadedExperts`, for a store of slots that kernels take as one stack.

    What is resident is launched before the host knows which experts were chosen: kernels find the
    slot of an expert in a table on the device. The choices are copied to the host beside that. A
    layer that is resident as a whole waits for nothing; any other for this copy, which was queued
    before the products. Then only what was not resident is computed, as it arrives, and the sums
    are made once, in the order of the choices: the same bits whoever was resident.

    With `misses`, the CPU may compute experts of a few tokens that are not resident, where they lie
    in the host's memory. Its rows join the same sums, but are not the bits of the device.

    Experts that are normed, have a gate of their own, compute in another dtype, or are quantised in
    a format that the kernels do not read go the way of `OffloadedExperts`.
    """

    misses: Misses | None = None

    def _make_step(self, weights: ExpertWeights) -> None:
        """That step is the host's."""

    def compute(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As `OffloadedExperts.compute`."""
        store, activation = self.store, self._activation_now()
        if (
            not isinstance(store, DeviceStore)
            or self.share is not None
            or self._norms_outputs
            or not is_kernels(activation)
            or not store.has_stack(self.layer, hidden_states.dtype)
            or not top_k_index.numel()
        ):
            return super().compute(hidden_states, top_k_index, top_k_weights)
        found, copied = store.device.download(top_k_index)
        products = SlottedProducts(
            hidden_states, top_k_index, top_k_weights, self.num_experts, activation
        )
        values, plans = None, self._plans(products, hidden_states, top_k_weights)
        if plans:
            values, copied = store.device.download(hidden_states)
        residents, is_done = None, False
        try:
            residents = store.launch_residents(self.layer, products.add)
            listens = self.listeners.routed or self.listeners.demanded
            if residents.are_all and not listens and store.listener is None:
                store.count_later(copied, lambda: [self._keys[e] for e in self.rows_of(found)])
                is_done = True
                return products.sums()
            is_done = True
        finally:
            if not is_done:
                store.let_go()
        copied.synchronize()
        rows = self.rows_of(found)
        self._announce(rows, hidden_states, top_k_index, top_k_weights)

        keys = [self._keys[expert] for expert in rows]
        routing = LayerRouting(self.layer, keys, hidden_states, top_k_index, top_k_weights)
        if plans and values is not None:
            self._compute_planned(routing, rows, residents.experts, products, values)
        elif rows:
            self._compute(routing, partial(self._add, store, products, residents.experts))
        return products.sums()

    def _plans(self, products: SlottedProducts, *differentiated: torch.Tensor) -> bool:
        """Whether the CPU may compute a part: not of long prompts, nor where there are gradients,
        which are of what the device computes."""
        return (
            self.misses is not None
            and products.takes_rows
            and not self._wants_gradient(*differentiated)
        )

    def _add(
        self,
        store: DeviceStore[ExpertWeights],
        products: SlottedProducts,
        residents: frozenset[int],
        group: Sequence[tuple[ExpertKey, Any]],
    ) -> None:
        arrived = [key for key, _ in group if key.expert not in residents]
        if arrived:
            products.add(store.stack_of(arrived))

    def _compute_planned(
        self,
        routing: LayerRouting,
        rows: dict[int, list[int]],
        residents: frozenset[int],
        products: SlottedProducts,
        values_TD: torch.Tensor,
    ) -> None:
        """Computes what is not resident, the CPU its part while the others are copied."""
        misses, activation = self.misses, self._activation_now()
        assert misses is not None
        assert is_kernels(activation)
        plan, begun_s = misses.plan(self.layer, rows, residents), misses.clock()
        keys = [self._keys[expert] for expert in plan.computed]
        num_choices = routing.ids_TK.shape[1]
        part = HostPart(misses, keys, rows, values_TD, num_choices, activation)
        others = [key for key in routing.keys if key.expert not in plan.computed]
        kept = [self._keys[expert] for expert in plan.kept]

        def add(group: Sequence[tuple[ExpertKey, Any]]) -> None:
            before_s = misses.clock()
            if kept:  # now that the others are held
                misses.store.bring(kept)
                kept.clear()
            self._add(misses.store, products, residents, group)
            if any(key.expert not in residents for key, _ in group):
                misses.speeds.launch.add(misses.clock() - before_s)
            part.compute_next()  # while the next one is copied

        if others:
            self._compute(routing._replace(keys=others), add)
        else:
            misses.store.bring(kept)
            for listener in self.listeners.demanded:
                listener.demanded(routing)
        if keys:
            part.finish(products)
        if keys or plan.seconds:
            copied = [self._keys[expert] for expert in plan.copied]
            misses.store.count_misses(copied, len(keys), plan.seconds, begun_s, misses.clock())
