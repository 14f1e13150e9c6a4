"""Forward and backward passes of layers whose experts come and go.

An expert is fetched once for all micro-batches of a window, in either direction (Li et al.,
"Harmony", 2022). The backward pass needs the experts of the forward pass in the reverse order of
layers, so its prefetch is exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.streamed import StreamedExperts
from moe_runtime.training.offload.activations import ActivationPolicy, Pass
from moe_runtime.training.offload.device_link import ComputeCopies, DeviceLink, add_up, crosses
from moe_runtime.training.offload.optimizer import ExpertOptimizer
from moe_runtime.training.offload.records import Sections
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.offload.states import Need
from moe_runtime.types import ExpertKey


class LayerInput(NamedTuple):
    """What one micro-batch brings to a layer: `[T, D]`, `[T, K]` ids, `[T, K]` gate weights.

    Without weights, rows are sorted by expert and one each, and outputs are wanted row by row.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor | None


@dataclass
class Visits:
    """Which experts the forward passes since the last step visited, in order.

    Attributes:
        layers: layer and its experts for every forward pass that a backward pass will follow.
        calls: how many forward passes a layer had.
        rate: learning rate, where the gradients of this backward pass are final; else None.
        went_back: whether a backward pass went through a layer.
    """

    layers: list[tuple[int, list[ExpertKey]]] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)
    rate: float | None = None
    went_back: bool = False


class LayerExecutor:
    """Computes layers, expert by expert.

    Args:
        copy_bytes: for experts' weights that stay where products are computed.
        link: to the device that computes; None where that is the CPU.
    """

    def __init__(
        self,
        sites: Sequence[ExpertsModuleSpec],
        optimizer: ExpertOptimizer,
        activations: ActivationPolicy,
        copy_bytes: int,
        link: DeviceLink | None,
    ) -> None:
        self.activations = activations
        self._sites = list(sites)
        self._optimizer = optimizer
        self._states = optimizer.states
        self.copies = ComputeCopies(optimizer.states.experts, copy_bytes, link)
        self._widths = [site.dim_preactivation for site in sites]
        self._last_visited: dict[int, list[ExpertKey]] = {}
        self.visits = Visits()

    def begin(self, rate: float | None = None) -> None:
        """Forgets the visits; what follows is a new window.

        Args:
            rate: learning rate if gradients are final after this window; None if more windows add
                to them.
        """
        self.visits = Visits(rate=rate)

    def expect_first_layer(self) -> None:
        """Begins to read what the next forward pass will probably want first."""
        self._states.expect(self._optimizer.needs(self._last_visited.get(0, [])))

    def forward(
        self, layer: int, inputs: Sequence[LayerInput], *, keeps: bool, is_visit: bool
    ) -> tuple[list[StreamedExperts], list[Tensor]]:
        """One layer for all micro-batches that are there.

        Args:
            is_visit: a backward pass will follow; False where activations are only computed again.

        Returns:
            What the backward pass needs, and the outputs `[T, D]`.
        """
        site = self._sites[layer]
        calls = streamed(site, inputs)
        keys = visited(layer, calls)
        turns_back = keeps and (not is_visit or layer + 1 == len(self._sites))
        self._states.expect(self._ahead_of_forward(layer, keys, turns_back=turns_back))
        if is_visit:
            self.visits.layers.append((layer, keys))
            self.visits.calls[layer] += 1
            self._last_visited[layer] = keys
        width = self._widths[layer]
        for call in calls:
            call.begin_forward(width, keeps=keeps and not self.activations.recomputes(layer))
        with self._observed("forward" if is_visit else None, layer, inputs):
            for key in keys:
                record = self._optimizer.fetch(key)
                here = [call for call in calls if call.num_rows(key.expert)]
                weights = self._weights(key, record, here[0].x_TD)
                for call in here:
                    call.forward(key.expert, weights)
                self.copies.release(partial(self._states.release, key))
            self.copies.finish()
        return calls, [call.output() for call in calls]

    def backward(
        self, layer: int, calls: Sequence[StreamedExperts], grads_TD: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """The gradients of `x_TD` and `weights_TK` (empty without) of each micro-batch.

        Those of the experts go to the optimizer.
        """
        self.visits.went_back = True
        keys = visited(layer, calls)
        is_only_call = self.visits.calls[layer] == 1
        while self.visits.layers and self.visits.layers[-1][0] >= layer:
            self.visits.layers.pop()
        self._states.expect(self._ahead_of_backward(keys))
        for call, grad_TD in zip(calls, grads_TD, strict=True):
            call.begin_backward(grad_TD)
        with self._observed("backward", layer, ()):
            for key in keys:
                self._step_back(key, calls, self.visits.rate if is_only_call else None)
            self.copies.finish()
        return [call.input_gradients() for call in calls]

    @contextlib.contextmanager
    def parameters(self, key: ExpertKey) -> Iterator[dict[str, Tensor]]:
        """An expert's parameters as they are after the steps so far, by name, while in use."""
        record = self._optimizer.fetch(key)
        layout = self._states.experts[key].layout
        views = layout.views(record, Sections.PARAMETERS)
        try:
            yield {tensor.name: view for tensor, view in zip(layout.tensors, views, strict=True)}
        finally:
            self._states.release(key)

    def stacked(self, layer: int, name: str) -> Tensor:
        """A copy of one parameter as the layer's module had it, this process's experts first."""
        parts = []
        for expert in self._sites[layer].experts_here:
            with self.parameters(ExpertKey(layer, expert)) as named:
                parts.append(named[name].clone())
        return torch.stack(parts)

    def _step_back(
        self, key: ExpertKey, calls: Sequence[StreamedExperts], rate: float | None
    ) -> None:
        layout = self._states.experts[key].layout
        trains = bool(layout.trained)
        record = self._optimizer.fetch(key, self._backward_sections(key), writes=trains)
        here = [call for call in calls if call.num_rows(key.expert)]
        weights = self._weights(key, record, here[0].x_TD)
        if not trains:
            for call in here:
                call.backward(key.expert, weights, None)
            self.copies.release(partial(self._states.release, key))
            return
        has_gradient = self._states.experts[key].has_gradient
        gradients = layout.views(record, Sections.GRADIENT)
        if not has_gradient:
            layout.clear_padding(record)
        accept = partial(self._optimizer.accept, key, record, rate)
        if crosses(gradients[0], here[0].x_TD):
            self._send_gradients(key, here, weights, gradients, adds=has_gradient)
        else:
            for number, call in enumerate(here):
                adds = has_gradient or number > 0
                found = self.copies.memory(gradients, weights) if adds else gradients
                call.backward(key.expert, weights, self._in_slot(key, found))
                if adds:
                    add_up(gradients, found, adds=True)
        self.copies.release(accept)

    def _send_gradients(
        self,
        key: ExpertKey,
        here: Sequence[StreamedExperts],
        weights: StackedExperts,
        gradients: Sequence[Tensor],
        *,
        adds: bool,
    ) -> None:
        """Queues the products of an expert's gradient elsewhere, and its way back."""
        copies = self.copies
        # several micro-batches' gradients are summed before they cross
        sums = len(here) > 1 and not adds
        totals = copies.memory(gradients, weights, dtype=gradients[0].dtype) if sums else None
        for number, call in enumerate(here):
            found = copies.memory(gradients, weights, is_part=sums)
            call.backward(key.expert, weights, self._in_slot(key, found))
            if totals is None:
                copies.send_back(found, gradients, adds=adds)
            else:
                add_up(totals, found, adds=number > 0)
        if totals is not None:
            copies.send_back(totals, gradients, adds=False)

    @contextlib.contextmanager
    def _observed(
        self, direction: Literal["forward", "backward"] | None, layer: int,
        inputs: Sequence[LayerInput],
    ) -> Iterator[None]:  # fmt: skip
        """Reports what a pass took to the plan of activations."""
        before, started = dataclasses.replace(self._states.traffic), time.perf_counter()
        yield
        if direction is None:
            return
        after, width = self._states.traffic, self._widths[layer]
        hidden = width // (2 if self._sites[layer].has_gate else 1)
        self.activations.observe(
            direction,
            layer,
            Pass(
                seconds=time.perf_counter() - started - (after.stall_s - before.stall_s),
                saved_bytes=sum(x.ids_TK.numel() * width * x.x_TD.element_size() for x in inputs),
                recompute_share=width / (width + hidden),
                read_bytes=after.read_bytes - before.read_bytes,
                written_bytes=after.written_bytes - before.written_bytes,
            ),
        )

    def _backward_sections(self, key: ExpertKey) -> Sections:
        if not self._states.experts[key].layout.trained:
            return Sections.NONE
        sections = Sections.NONE
        if self._states.experts[key].has_gradient:
            sections |= Sections.GRADIENT
        if self.visits.rate is not None and self._optimizer.updates_in_backward(key):
            sections |= Sections.STATE
        return sections

    def _ahead_of_forward(
        self, layer: int, keys: Sequence[ExpertKey], *, turns_back: bool
    ) -> Iterator[Need]:
        """This layer's experts; then those of the layer after it, as the last pass had them."""
        yield from self._optimizer.needs(keys)
        if turns_back:
            yield from self._ahead_of_backward(keys)
        else:
            yield from self._optimizer.needs(self._last_visited.get(layer + 1, []))

    def _ahead_of_backward(self, keys: Sequence[ExpertKey]) -> Iterator[Need]:
        remaining = [keys, *(keys for _, keys in reversed(self.visits.layers))]
        for layer_keys in remaining:
            for key in layer_keys:
                yield key, self._optimizer.need(key) | self._backward_sections(key)

    def _weights(self, key: ExpertKey, record: Tensor, x_TD: Tensor) -> StackedExperts:
        layout = self._states.experts[key].layout
        views = layout.views(record, Sections.PARAMETERS)
        names = [tensor.name for tensor in layout.tensors]
        views = self.copies.weights(key, self._states.content_step(key), views, x_TD)
        return self._sites[key.layer].stacked(names, views)

    def _in_slot(self, key: ExpertKey, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Gradients in the order of kernels; None where a tensor is frozen or missing."""
        names = [tensor.name for tensor in self._states.experts[key].layout.trained]
        return self._sites[key.layer].gradients(names, tensors)


def streamed(site: ExpertsModuleSpec, inputs: Sequence[LayerInput]) -> list[StreamedExperts]:
    """A layer's experts, to be given one after another, for each micro-batch."""
    return [
        StreamedExperts(x, ids, weights, site.num_experts, site.activation, site.impl)
        for x, ids, weights in inputs
    ]


def visited(layer: int, calls: Sequence[Any]) -> list[ExpertKey]:
    """Experts that any micro-batch visits, in ascending order."""
    return [ExpertKey(layer, e) for e in sorted({e for call in calls for e in call.experts})]
