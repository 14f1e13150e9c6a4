"""Training around experts that are read from a checkpoint and never change.

Other parameters are trained and, optionally, adapters of low rank (LoRA) for each expert matrix. If
a device computes, experts cross to its slots as they are in the files, quantised ones packed. Their
values are unpacked there, and adapters are added. Plain experts are computed from the slots.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

Shape suffixes: T tokens, K top-k, E experts, D model, F hidden.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from moe_runtime.allocator import return_freed_blocks
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.expert_tensors import fill_matrices
from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.budget import peak_resident_bytes
from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.operators import resolve_path
from moe_runtime.kernels.expert_mlp.products import Adapter
from moe_runtime.kernels.expert_mlp.streamed import StreamedExperts
from moe_runtime.kernels.operands import ActivationSpec
from moe_runtime.memory.device.device_layout import stack_slots
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.memory.store import ExpertStore
from moe_runtime.parallel import LayoutGroups
from moe_runtime.training.offload.adamw import AdamW
from moe_runtime.training.offload.compute_copies import LinkTraffic
from moe_runtime.training.offload.memory import FrozenMemory
from moe_runtime.training.offload.offloaded_training import OffloadStats
from moe_runtime.training.offload.passes import (
    LayerExecutor,
    LayerInput,
    OffloadedTrainingExperts,
    Visits,
    run_window,
    streamed,
    visited,
)
from moe_runtime.training.offload.records import Traffic
from moe_runtime.training.offload.site import ExpertsSite
from moe_runtime.training.optimizer import S, StepOptimizer, StepOutcome
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.slotted import LowRank, SlottedTraining


class ExpertAdapters(nn.Module):
    """Adapters of low rank for the matrices of a layer's experts: `W + scale * B @ A`.

    `A` is initialised like `nn.Linear`, `B` with zeros.

    Args:
        shapes: of one expert's part of each stack, by the name of its parameter.
        is_transposed: the summed dimension of the matrices comes first.
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
        """Adds an expert's adapters to its matrices."""
        for name in self.names:
            matrix = named[name].T if self._is_transposed else named[name]
            first, second = (p.detach()[expert] for p in self._pair(name))
            matrix.addmm_(second, first, alpha=self.scale)

    def of_expert(self, expert: int, *, learns: bool = False) -> list[Adapter]:
        """The adapters of one expert's first and second matrix, on a CPU."""
        found = []
        for name in self.names:
            pair, gradients = self._pair(name), None
            if learns:
                for parameter in pair:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                first, second = (cast(Tensor, parameter.grad)[expert] for parameter in pair)
                gradients = first, second
            first, second = (parameter.detach()[expert] for parameter in pair)
            found.append(Adapter(first, second, self.scale, gradients))
        return found

    def low_rank(self, x: Tensor) -> tuple[LowRank, LowRank]:
        """The adapters of the first and the second product, in the dtype of `x`."""
        from moe_runtime.kernels.expert_mlp.slotted import LowRank

        first, down = (LowRank(*self._pair(n), scale=self.scale, x=x) for n in self.names)
        return first, down

    def _pair(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        return self.get_parameter(f"{name}_A"), self.get_parameter(f"{name}_B")


class SlottedExecutor:
    """Layers that kernels compute from the slots of a store.

    Resident experts are launched before the host knows which experts have rows; missing ones as
    they arrive.
    """

    def __init__(
        self,
        sites: Sequence[ExpertsSite],
        store: DeviceStore,
        adapters: Sequence[ExpertAdapters],
    ) -> None:
        self._sites = list(sites)
        self._store = store
        self._adapters = list(adapters)
        self._fits: dict[tuple[int, torch.dtype], bool] = {}

    def takes(self, layer: int, inputs: Sequence[LayerInput]) -> bool:
        """Whether this computes a layer: by Triton kernels, plain experts in the dtype of x."""
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
        if store.stacks is None or not store.has_stack(layer, dtype):
            return False
        stack = store.stacks.stack(layer, np.full(site.num_experts, -1, np.int32))
        return (
            isinstance(stack, StackedExperts)
            and isinstance(site.activation, ActivationSpec)
            # rows of adapters are in the order of the module's parameters
            and (stack.has_gate, stack.is_concatenated) == (site.has_gate, site.is_concatenated)
        )

    def forward(
        self,
        layer: int,
        inputs: Sequence[LayerInput],
        then: Sequence[ExpertKey] | None,
        *,
        keeps: bool,
    ) -> tuple[list[Any], list[Tensor]]:
        """As `LayerExecutor.forward`; `then` are the next experts, None for the same again."""
        from moe_runtime.kernels.expert_mlp.slotted import SlottedTraining

        site = self._sites[layer]
        assert isinstance(site.activation, ActivationSpec), "the layer has a stack"
        calls = list[SlottedTraining]()
        for x_TD, ids_TK, weights_TK in inputs:
            assert weights_TK is not None, "rows are not sorted"
            calls.append(
                SlottedTraining(x_TD, ids_TK, weights_TK, site.num_experts, site.activation)
            )
        copies = [self._store.device.download(call.offsets_E1) for call in calls]
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
        """Gives every expert that has rows once, and reads ahead as slots become free."""
        store = self._store
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


ADAPTED = ("gate_up_proj", "up_proj", "down_proj")


class FrozenExpertsExecutor(LayerExecutor):
    """Computes layers whose experts come out of a store, in ascending order in either direction.

    Args:
        experts: layout of the experts in the slots of the store.
        store: fetches experts to the device that computes; it binds each to its filled slot.
        adapters: of each layer, on the device that computes; empty if the experts have none.
    """

    def __init__(
        self,
        sites: Sequence[ExpertsSite],
        experts: ExpertMap,
        store: ExpertStore[Tensor],
        adapters: Sequence[ExpertAdapters],
    ) -> None:
        super().__init__(sites)
        self._experts = experts
        self._store = store
        self._adapters = list(adapters)
        self._slotted = None
        if isinstance(store, DeviceStore):
            self._slotted = SlottedExecutor(sites, store, adapters)
        self._scratch: dict[tuple[object, ...], dict[str, Tensor]] = {}

    def forward(
        self, layer: int, inputs: Sequence[LayerInput], *, keeps: bool, is_visit: bool
    ) -> tuple[list[Any], list[Tensor]]:
        turns_back = self._turns_back(layer, keeps=keeps, is_visit=is_visit)
        then = None if turns_back else self._last_visited.get(layer + 1, [])
        compute = self._forward
        if self._slotted is not None and self._slotted.takes(layer, inputs):
            compute = self._slotted.forward
        calls, outputs = compute(layer, inputs, then, keeps=keeps)
        if is_visit:
            self._note_visit(layer, visited(layer, calls))
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
    ) -> tuple[list[Any], list[Tensor]]:
        """Expert by expert; `then` as in `SlottedExecutor.forward`."""
        site = self._sites[layer]
        calls = streamed(site, inputs)
        for call in calls:
            call.begin_forward(site.dim_preactivation, keeps=keeps)
        with contextlib.closing(self._each(visited(layer, calls), then, calls)) as experts:
            for key, weights in experts:
                adapters = self._adapters_of(key)
                for call in calls:
                    if call.num_rows(key.expert):
                        call.forward(key.expert, weights, adapters)
        return calls, [call.output() for call in calls]

    def backward(
        self, layer: int, calls: Sequence[Any], grads_TD: Sequence[Tensor], *, learns: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """As `LayerExecutor.backward`; the adapters accumulate their gradients."""
        assert learns, "`AdapterTraining.backward` calls `backward` of losses"
        self._go_back(layer)
        # the next window begins with the last layer of this backward pass
        before = self.visits.layers[-1][1] if self.visits.layers else None
        if self._slotted is not None and not isinstance(calls[0], StreamedExperts):
            return self._slotted.backward(layer, calls, grads_TD, before)
        for call, grad_TD in zip(calls, grads_TD, strict=True):
            call.begin_backward(grad_TD)
        with contextlib.closing(self._each(visited(layer, calls), before, calls)) as experts:
            for key, weights in experts:
                adapters = self._adapters_of(key, learns=True)
                for call in calls:
                    if call.num_rows(key.expert):
                        call.backward(key.expert, weights, None, adapters)
        return [call.input_gradients() for call in calls]

    def _adapters_of(self, key: ExpertKey, *, learns: bool = False) -> Sequence[Adapter]:
        return (
            self._adapters[key.layer].of_expert(key.expert, learns=learns) if self._adapters else ()
        )

    def finish(self) -> None:
        """Waits for copies whose products are queued; raises if a copy failed."""
        if isinstance(self._store, DeviceStore):
            self._store.fetcher.finish_used()

    def abandon(self) -> None:
        """After an exception: later calls do not report copies that failed."""
        with contextlib.suppress(MoERuntimeError):
            self.finish()

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters on the host in fp32, adapters included, by name."""
        with self._store.lease([key], streaming=True) as lease:
            ((_, slot),) = next(iter(lease))
            named = self._filled(key, slot, torch.float32)
            if self._adapters:
                self._adapters[key.layer].add_to(key.expert, named)
            found = {name: tensor.to("cpu", copy=True) for name, tensor in named.items()}
        self.finish()
        return found

    def _each(
        self,
        keys: Sequence[ExpertKey],
        then: Sequence[ExpertKey] | None,
        calls: Sequence[StreamedExperts],
    ) -> Generator[tuple[ExpertKey, StackedExperts], None, None]:
        """Experts in order, while the next ones are read."""
        then = keys if then is None else then
        for place, key in enumerate(keys):
            with self._store.lease([key], streaming=True) as lease:
                self._store.read_ahead([*keys[place + 1 :], *then])
                for group in lease:
                    for _, slot in group:
                        yield key, self._weights(key, slot, calls[0].x_TD)

    def _weights(self, key: ExpertKey, slot: Tensor, x_TD: Tensor) -> StackedExperts:
        """An expert in the dtype of its rows; in its slot, if it has the module's layout there."""
        site, layout = self._sites[key.layer], self._experts.layouts[key]
        if slot.is_cpu and x_TD.is_cpu:
            own = stack_slots(slot, slot.numel(), layout, self._experts.matrices[key.layer])
            form = (x_TD.dtype, site.has_gate, site.is_concatenated)
            if own and (own.down.dtype, own.has_gate, own.is_concatenated) == form:
                return StackedExperts(**own._asdict())
        named = self._filled(key, slot, x_TD.dtype)
        tensors = [tensor.to(x_TD.device) for tensor in named.values()]
        return site.stacked(list(named), tensors)

    def _filled(self, key: ExpertKey, slot: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """An expert's tensors in the module's layout, in memory that the next expert reuses."""
        site = self._sites[key.layer]
        shapes = {n: site.module.get_parameter(n).shape[1:] for n in site.parameter_names}
        place = (dtype, str(slot.device), tuple(shapes.items()))
        if place not in self._scratch:
            self._scratch[place] = {
                name: _matrix(shape, dtype, slot.device, is_transposed=site.is_transposed)
                for name, shape in shapes.items()
            }
        fill_matrices(self._experts, key, slot, self._scratch[place])
        return self._scratch[place]


def _matrix(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, *, is_transposed: bool
) -> Tensor:
    """An empty tensor whose rows in memory are a matrix's outputs, as in checkpoints: to transpose
    each expert takes longer than its products."""
    if is_transposed and len(shape) == 2:
        return torch.empty(shape[::-1], dtype=dtype, device=device).T
    return torch.empty(shape, dtype=dtype, device=device)


def adapters_for(sites: Sequence[ExpertsSite], rank: int, scale: float) -> list[ExpertAdapters]:
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


class AdapterTraining(StepOptimizer):
    """Trains the parameters around frozen experts, which stay in the checkpoint's files.

    Used like `OffloadedTraining`; experts are read once for all micro-batches of a step in either
    direction.

    Args:
        model: its parameters that require gradients are trained; its experts are replaced.
        adapters: of the experts, by layer; empty if they have none.
        stores: the store that experts are computed from, and the host's, if a device computes.
        groups: processes that train the same on micro-batches of their own; None for one process.

    Raises:
        ValueError: there is nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsSite],
        executor: FrozenExpertsExecutor,
        adapters: Sequence[ExpertAdapters],
        stores: Sequence[ExpertStore[Tensor]],
        settings: AdamW,
        memory: FrozenMemory,
        groups: LayoutGroups | None = None,
    ) -> None:
        super().__init__()
        return_freed_blocks()
        self._groups = groups
        self.model, self.memory = model, memory
        self._stores, self._executor, self._settings = [*stores], executor, settings
        self._steps = self._skipped = 0
        self._num_experts = sum(site.num_experts for site in sites)
        self._modules: list[OffloadedTrainingExperts] = []
        for layer, site in enumerate(sites):
            module = OffloadedTrainingExperts(site, layer, executor)
            if adapters:
                module.add_module("adapters", adapters[layer])
            model.set_submodule(site.name, module)
            self._modules.append(module)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("there is nothing to train: no parameter requires gradients")
        self.dense = settings.dense(named)

    def backward(
        self, parts: Sequence[Callable[[], Tensor]], *, rate: float | None = None
    ) -> list[Tensor]:
        del rate  # for optimizers that update inside the backward pass
        self._executor.visits = Visits()
        with contextlib.ExitStack() as failed:
            failed.callback(self._executor.abandon)
            failed.callback(self.dense.forget)
            losses = run_window(self.model, [partial(_part, p) for p in parts], self._modules)
            self._executor.finish()
            failed.pop_all()
        return losses

    def step(self, rate: float | None = None) -> StepOutcome:
        rate = self._settings.lr if rate is None else rate
        if self._groups is not None:
            self._groups.reduce_dense_gradients(self.dense.parameters())
        outcome = self.dense.clipped_step(rate, self._settings.clip_norm)
        self._skipped += bool(outcome.bad_parameters)
        self._steps += not outcome.bad_parameters
        return outcome

    def write(
        self, state: S, own: Callable[[S], Mapping[str, Any]], job: Callable[[S], object]
    ) -> None:
        """Writes at once, in the first process: all have the same adapters."""
        del own
        if self._groups is None or self._groups.rank == 0:
            job(state)

    def stats(self) -> OffloadStats:
        fast, last = self._stores[0].stats(), self._stores[-1].stats()
        link = LinkTraffic()
        if len(self._stores) > 1:
            kept = (fast.hits + fast.late_hits) * fast.slot_bytes
            link = LinkTraffic(to_device_bytes=fast.bytes_read, kept_bytes=kept)
        return OffloadStats(
            steps=self._steps,
            skipped_steps=self._skipped,
            traffic=Traffic(read_bytes=last.bytes_read, stall_s=fast.stall_s),
            link=link,
            num_experts=self._num_experts,
            resident_experts=self.memory.host.num_slots,
            budget_bytes=self.memory.host.budget_bytes,
            disk_bytes=0,
            peak_rss_bytes=peak_resident_bytes(),
        )

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        return self._executor.expert(key)

    def report(self) -> dict[str, Any]:
        return self.stats().report()

    def transfers(self) -> dict[str, Any]:
        fast, last = self._stores[0].stats(), self._stores[-1].stats()
        return {
            "stall_s": fast.stall_s,
            "memory_bytes": (last.hits + last.late_hits) * last.slot_bytes,
            "read_bytes": last.bytes_read,
            "written_bytes": 0,
        }

    def check(self) -> None:
        for store in self._stores:
            store.check()

    def close(self) -> None:
        super().close()
        self._stores[0].close()


def _part(part: Callable[[], Tensor]) -> Tensor:
    loss = part()
    loss.backward()
    return loss.detach()
