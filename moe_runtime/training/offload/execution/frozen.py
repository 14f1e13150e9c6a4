"""Forward and backward passes through experts that are read from a checkpoint and never change.

What is trained lies around them, and, if wanted, beside each of their matrices: adapters of low
rank (LoRA). Experts have no optimizer states, and no file is written. Where a device computes,
experts cross to its slots as they lie in the files, quantised ones packed; their values are written
out there, and adapters are added there.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

Shape suffixes: T tokens, K top-k, E experts, D model, F hidden.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.expert_tensors import fill_matrices
from moe_runtime.errors import MoERuntimeError
from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.streamed import StreamedExperts
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.memory.store import ExpertStore
from moe_runtime.training.offload.execution.passes import LayerInput, Visits, visited
from moe_runtime.training.offload.execution.slotted import SlottedPasses
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.low_rank import LowRank

ADAPTED = ("gate_up_proj", "up_proj", "down_proj")


class ExpertAdapters(nn.Module):
    """Adapters of low rank for the matrices of a layer's experts: `W + scale * B @ A`.

    `A` is drawn as `nn.Linear` draws, `B` begins with zeros, so the model is what it was at first.

    Args:
        shapes: of one expert's part of each matrix, by its parameter's name, as they lie.
        num_experts: `E`.
        is_transposed: the summed dimension of the matrices comes first.
        rank: of every adapter.
        scale: factor of the product.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        num_experts: int,
        *,
        is_transposed: bool,
        rank: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.scale = scale
        self._is_transposed = is_transposed
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            out_dim, in_dim = reversed(shape) if is_transposed else shape
            first = nn.Parameter(torch.empty(num_experts, rank, in_dim))
            for expert in range(num_experts):
                nn.init.kaiming_uniform_(first[expert], a=math.sqrt(5))
            self.register_parameter(f"{name}_A", first)
            self.register_parameter(
                f"{name}_B", nn.Parameter(torch.zeros(num_experts, out_dim, rank))
            )

    def add_to(self, expert: int, named: Mapping[str, Tensor]) -> None:
        """Adds an expert's adapters to a copy of its matrices."""
        for name in self.names:
            first, second = self._pair(name, expert)
            self._by_rows(named[name]).addmm_(second, first, alpha=self.scale)

    def accept(self, expert: int, gradients: Mapping[str, Tensor]) -> None:
        """Takes gradients of the adapted matrices; adds to those of the adapters."""
        for name in self.names:
            first, second = self._pair(name, expert)
            grad = self._by_rows(gradients[name]).to(first)
            for parameter, found in (
                (self.get_parameter(f"{name}_A"), second.T @ grad),
                (self.get_parameter(f"{name}_B"), grad @ first.T),
            ):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad[expert].add_(found, alpha=self.scale)

    def low_rank(self, x: Tensor) -> tuple[LowRank, LowRank]:
        """The adapters of the first product and of the second, for all experts at once.

        Args:
            x: whose dtype products have.
        """
        from moe_runtime.kernels.expert_mlp.low_rank import LowRank

        first, down = (
            LowRank(*(self.get_parameter(f"{name}_{part}") for part in "AB"), scale=self.scale, x=x)
            for name in self.names
        )
        return first, down

    def _pair(self, name: str, expert: int) -> tuple[Tensor, Tensor]:
        first, second = self.get_parameter(f"{name}_A"), self.get_parameter(f"{name}_B")
        return first.detach()[expert], second.detach()[expert]

    def _by_rows(self, matrix: Tensor) -> Tensor:
        return matrix.T if self._is_transposed else matrix


class FrozenPasses:
    """Computes layers whose experts come out of a store, expert by expert.

    In ascending order of experts in either direction, so sums do not depend on who was resident.
    On a GPU, experts that are plain are computed by kernels that take whoever is in a slot.

    Args:
        sites: the layers' experts.
        experts: how they lie in the slots of the store.
        store: fetches them to where they are computed; what it binds is the filled slot.
        adapters: of each layer, where experts are computed; empty if the experts have none.
    """

    def __init__(
        self,
        sites: Sequence[ExpertsModuleSpec],
        experts: ExpertMap,
        store: ExpertStore[Tensor],
        adapters: Sequence[ExpertAdapters],
    ) -> None:
        self._sites = list(sites)
        self._experts = experts
        self._store = store
        self._adapters = list(adapters)
        self._slotted = SlottedPasses(sites, store, adapters)
        self._scratch: dict[tuple[object, ...], dict[str, Tensor]] = {}
        self._last_visited: dict[int, list[ExpertKey]] = {}
        self.visits = Visits()

    def begin(self) -> None:
        """Forgets the visits; what follows is a new window."""
        self.visits = Visits()

    def forward(
        self, layer: int, inputs: Sequence[LayerInput], *, keeps: bool, is_visit: bool
    ) -> tuple[list[Any], list[Tensor]]:
        """One layer for all micro-batches that are there; as `LayerExecutor.forward`."""
        turns_back = keeps and (not is_visit or layer + 1 == len(self._sites))
        then = None if turns_back else self._last_visited.get(layer + 1, [])
        compute = self._slotted.forward if self._slotted.takes(layer, inputs) else self._forward
        calls, outputs = compute(layer, inputs, then, keeps=keeps)
        if is_visit:
            keys = visited(layer, calls)
            self.visits.layers.append((layer, keys))
            self._last_visited[layer] = keys
        if not keeps:
            self.finish()
        return calls, outputs

    def _forward(
        self,
        layer: int,
        inputs: Sequence[LayerInput],
        then: Sequence[ExpertKey] | None,
        *,
        keeps: bool,
    ) -> tuple[list[StreamedExperts], list[Tensor]]:
        """Expert by expert; `then` as of `SlottedPasses.forward`."""
        site = self._sites[layer]
        calls = [
            StreamedExperts(x, ids, weights, site.num_experts, site.activation, site.impl)
            for x, ids, weights in inputs
        ]
        for call in calls:
            call.begin_forward(site.dim_preactivation, keeps=keeps)
        with contextlib.closing(self._each(visited(layer, calls), then, calls)) as experts:
            for key, weights in experts:
                for call in calls:
                    if call.num_rows(key.expert):
                        call.forward(key.expert, weights)
        return calls, [call.output() for call in calls]

    def backward(
        self, layer: int, calls: Sequence[Any], grads_TD: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gradients of a layer's inputs and gate weights; the adapters take their own."""
        while self.visits.layers and self.visits.layers[-1][0] >= layer:
            self.visits.layers.pop()
        # the next window begins with the layer that this one ends with
        before = self.visits.layers[-1][1] if self.visits.layers else None
        if not isinstance(calls[0], StreamedExperts):
            return self._slotted.backward(layer, calls, grads_TD, before)
        for call, grad_TD in zip(calls, grads_TD, strict=True):
            call.begin_backward(grad_TD)
        with contextlib.closing(self._each(visited(layer, calls), before, calls)) as experts:
            for key, weights in experts:
                for call in calls:
                    if call.num_rows(key.expert):
                        self._step_back(key, call, weights)
        return [call.input_gradients() for call in calls]

    def _step_back(self, key: ExpertKey, call: StreamedExperts, weights: StackedExperts) -> None:
        """One expert's part of the gradients of one call."""
        if not self._adapters:
            call.backward(key.expert, weights, None)
            return
        named = self._tensors(key.layer, "gradient", weights.dtype, weights.device)
        found = self._sites[key.layer].stacked(list(named), list(named.values()))
        call.backward(key.expert, weights, found.tensors())
        self._adapters[key.layer].accept(key.expert, named)

    def finish(self) -> None:
        """Returns when no product is queued behind a copy to a device that may still fail.

        Raises:
            MoERuntimeError: one has failed, and what was computed with it is void.
        """
        if isinstance(self._store, DeviceStore):
            self._store.fetcher.finish_used()

    def abandon(self) -> None:
        """After an exception: all that was computed is void, and no copy of it is told of later."""
        with contextlib.suppress(MoERuntimeError):
            self.finish()

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters on the host in fp32, adapters included, by name."""
        found: dict[str, Tensor] = {}
        with self._store.lease([key], streaming=True) as lease:
            for group in lease:
                for _, slot in group:
                    named = self._adapted(key, slot)
                    found = {name: t.to("cpu", copy=True) for name, t in named.items()}
        self.finish()
        return found

    def stacked(self, layer: int, name: str) -> Tensor:
        """A copy of one parameter as the layer's module had it, experts first."""
        experts = range(self._sites[layer].num_experts)
        return torch.stack([self.expert(ExpertKey(layer, e))[name] for e in experts])

    def _each(
        self,
        keys: Sequence[ExpertKey],
        then: Sequence[ExpertKey] | None,
        calls: Sequence[StreamedExperts],
    ) -> Generator[tuple[ExpertKey, StackedExperts], None, None]:
        """Experts with their adapters, in order, while the next ones are read."""
        then = keys if then is None else then
        for place, key in enumerate(keys):
            with self._store.lease([key], streaming=True) as lease:
                self._store.read_ahead([*keys[place + 1 :], *then])
                for group in lease:
                    for _, slot in group:
                        yield key, self._weights(key, slot, calls[0].x_TD)

    def _weights(self, key: ExpertKey, slot: Tensor, x_TD: Tensor) -> StackedExperts:
        named = self._adapted(key, slot)
        tensors = [tensor.to(x_TD.device, x_TD.dtype) for tensor in named.values()]
        return self._sites[key.layer].stacked(list(named), tensors)

    def _adapted(self, key: ExpertKey, slot: Tensor) -> dict[str, Tensor]:
        named = self._tensors(key.layer, "weights", torch.float32, slot.device)
        fill_matrices(self._experts, key, slot, named)
        if self._adapters:
            self._adapters[key.layer].add_to(key.expert, named)
        return named

    def _tensors(
        self, layer: int, use: str, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Memory for one expert, used again for the next."""
        site = self._sites[layer]
        shapes = {n: site.module.get_parameter(n).shape[1:] for n in site.parameter_names}
        place = (use, dtype, str(device), tuple(shapes.items()))
        if place not in self._scratch:
            self._scratch[place] = {
                name: torch.empty(shape, dtype=dtype, device=device)
                for name, shape in shapes.items()
            }
        return self._scratch[place]


def adapters_for(
    sites: Sequence[ExpertsModuleSpec], rank: int, scale: float
) -> list[ExpertAdapters]:
    """Adapters for all matrices of all experts; biases have none."""
    return [
        ExpertAdapters(
            {
                name: tuple(site.module.get_parameter(name).shape[1:])
                for name in site.parameter_names
                if name in ADAPTED
            },
            site.num_experts,
            is_transposed=site.is_transposed,
            rank=rank,
            scale=scale,
        )
        for site in sites
    ]
