"""Frozen experts in slots of a GPU: residents in one launch, arrivals in launches of their own.

Shape suffixes: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.implementations.paths import resolve_path
from moe_runtime.kernels.operands.activation import ActivationSpec
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.memory.store import ExpertStore
from moe_runtime.training.offload.execution.passes import LayerInput, visited
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.low_rank import LowRank
    from moe_runtime.kernels.expert_mlp.slotted_training import SlottedTraining


class LowRankSource(Protocol):
    """Adapters of a layer."""

    def low_rank(self, x: Tensor) -> tuple[LowRank, LowRank]:
        """Those of the first product and of the second, for rows like these."""
        ...


class SlottedPasses:
    """Layers that kernels compute from the slots of a store, as many experts in a launch as are in
    their slots.

    What is resident is launched before the host knows which experts have rows; that is copied
    beside it. Then what is missing is computed as it arrives.

    Args:
        sites: the layers' experts.
        store: the slots.
        adapters: of each layer; empty if the experts have none.
    """

    def __init__(
        self,
        sites: Sequence[ExpertsModuleSpec],
        store: ExpertStore[Tensor],
        adapters: Sequence[LowRankSource],
    ) -> None:
        self._sites = list(sites)
        self._store = store
        self._adapters = list(adapters)
        self._fits: dict[tuple[int, torch.dtype], bool] = {}

    def takes(self, layer: int, inputs: Sequence[LayerInput]) -> bool:
        """Whether a layer is computed so: by Triton kernels, experts as plain as their rows."""
        x_TD = inputs[0].x_TD
        has_weights = all(entry.weights_TK is not None for entry in inputs)
        if not has_weights or resolve_path(self._sites[layer].impl, x_TD) != "triton":
            return False
        place = (layer, x_TD.dtype)
        if place not in self._fits:
            self._fits[place] = self._do_fit(*place)
        return self._fits[place]

    def _do_fit(self, layer: int, dtype: torch.dtype) -> bool:
        store, site = self._store, self._sites[layer]
        if not isinstance(store, DeviceStore) or not store.has_stack(layer, dtype):
            return False
        assert store.stacks is not None, "the layer has a stack"
        stack = store.stacks.stack(layer, np.full(site.num_experts, -1, np.int32))
        return (
            isinstance(stack, StackedExperts)
            and isinstance(site.activation, ActivationSpec)
            # rows of adapters lie as those of the module's parameters
            and (stack.has_gate, stack.is_concatenated) == (site.has_gate, site.is_concatenated)
        )

    def forward(
        self,
        layer: int,
        inputs: Sequence[LayerInput],
        then: Sequence[ExpertKey] | None,
        *,
        keeps: bool,
    ) -> tuple[list[SlottedTraining], list[Tensor]]:
        """As `LayerExecutor.forward`; `then` are experts that will be wanted next, None for those
        of this pass once more."""
        from moe_runtime.kernels.expert_mlp.slotted_training import SlottedTraining

        store, site = self._store, self._sites[layer]
        assert isinstance(store, DeviceStore), "the layer has a stack"
        assert isinstance(site.activation, ActivationSpec), "the layer has a stack"
        calls = list[SlottedTraining]()
        for x_TD, ids_TK, weights_TK in inputs:
            assert weights_TK is not None, "rows are not sorted"
            calls.append(
                SlottedTraining(x_TD, ids_TK, weights_TK, site.num_experts, site.activation)
            )
        copies = [store.device.download(call.offsets_E1) for call in calls]
        low = self._low_rank(layer, calls[0].x_TD)
        for call in calls:
            call.begin_forward(site.dim_preactivation, low, keeps=keeps)

        def keys() -> list[ExpertKey]:
            for call, (offsets_E1, copied) in zip(calls, copies, strict=True):
                copied.synchronize()
                call.set_bounds(offsets_E1.tolist())
            return visited(layer, calls)

        def add(experts: StackedExperts) -> None:
            for call in calls:
                call.forward(experts)

        self._each(layer, keys, then, add)
        return calls, [call.output() for call in calls]

    def backward(
        self,
        layer: int,
        calls: Sequence[SlottedTraining],
        grads_TD: Sequence[Tensor],
        then: Sequence[ExpertKey] | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """As `LayerExecutor.backward`; `then` as of `forward`."""
        low = self._low_rank(layer, calls[0].x_TD)
        for call, grad_TD in zip(calls, grads_TD, strict=True):
            call.begin_backward(grad_TD, low)

        def add(experts: StackedExperts) -> None:
            for call in calls:
                call.backward(experts)

        self._each(layer, lambda: visited(layer, calls), then, add)
        return [call.input_gradients() for call in calls]

    def _low_rank(self, layer: int, x_TD: Tensor) -> tuple[LowRank | None, LowRank | None]:
        return self._adapters[layer].low_rank(x_TD) if self._adapters else (None, None)

    def _each(
        self,
        layer: int,
        keys_of: Callable[[], list[ExpertKey]],
        then: Sequence[ExpertKey] | None,
        add: Callable[[StackedExperts], None],
    ) -> None:
        """Gives every expert that has rows once, and reads ahead what will be wanted next, as slots
        become free."""
        store = self._store
        assert isinstance(store, DeviceStore), "the layer has a stack"
        residents = store.launch_residents(layer, add).experts
        keys = keys_of()
        then = keys if then is None else then
        if not keys:
            return
        are_all = residents.issuperset(key.expert for key in keys)
        with store.lease(keys, streaming=not are_all) as lease:
            for group in lease:
                if lease.all_started:
                    store.read_ahead(then)
                arrived = [key for key, _ in group if key.expert not in residents]
                if arrived:
                    add(store.stack_of(arrived))
        store.read_ahead(then)
