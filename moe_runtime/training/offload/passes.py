"""Forward and backward passes of layers with offloaded experts, and the modules in their place.

A window is the micro-batches of one `backward` call. An expert is fetched once for all of them, in
either direction (Li et al., "Harmony", 2022). The backward pass needs the experts of the forward
pass in the reverse order of layers, so its prefetch is exact.

Each micro-batch of a window has a thread; one runs at a time, in turn. At a layer's experts a
thread waits until all have come; then the experts are computed for all of them. Turns are fixed, so
gradients of shared parameters are summed in the order of the micro-batches.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from moe_runtime.checkpoints.absent import AbsentParameters, TrainedElsewhere
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.streamed import StreamedExperts
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.layer import MoELayer
from moe_runtime.layer.experts import compute_dtype
from moe_runtime.training.offload.activations import ActivationPolicy, Pass
from moe_runtime.training.offload.compute_copies import ComputeCopies, crosses
from moe_runtime.training.offload.device_link import DeviceLink, add_up
from moe_runtime.training.offload.optimizer import ExpertOptimizer
from moe_runtime.training.offload.record_store import Need
from moe_runtime.training.offload.records import Sections
from moe_runtime.training.offload.site import ExpertsSite
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
        num_forwards: how many forward passes a layer had.
        rate: learning rate, where the gradients of this backward pass are final; else None.
        went_back: whether a backward pass went through a layer.
        is_reduced: gradients around the experts are sums over several processes already.
    """

    layers: list[tuple[int, list[ExpertKey]]] = field(default_factory=list)
    num_forwards: Counter[int] = field(default_factory=Counter)
    rate: float | None = None
    went_back: bool = False
    is_reduced: bool = False

    def require_own_gradients(self) -> None:
        """Refuses gradients that would be added to the sums of all processes, and stay apart."""
        if self.is_reduced:
            raise UnsupportedUseError(
                "the gradients were summed over the processes already, for their norm: ask for it "
                "after the last backward pass of a step"
            )


class ExpertsExecutor(abc.ABC):
    """Computes layers whose experts are not in the model."""

    def __init__(self, sites: Sequence[ExpertsSite]) -> None:
        self._sites = list(sites)
        self._last_visited: dict[int, list[ExpertKey]] = {}

    @abc.abstractmethod
    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters as they are after the steps so far, by name."""

    def stacked(self, layer: int, only: str | None = None) -> dict[str, Tensor]:
        """Copies of a layer's parameters as its module had them, this process's experts first.

        Args:
            only: name of the one parameter that is wanted.
        """
        found: dict[str, Tensor] = {}
        experts = self._sites[layer].experts_here
        for place, number in enumerate(experts):
            for name, tensor in self.expert(ExpertKey(layer, number)).items():
                if only in (None, name):
                    if not place:
                        found[name] = tensor.new_empty(len(experts), *tensor.shape)
                    found[name][place] = tensor
        return found


class LayerExecutor(ExpertsExecutor):
    """Forward and backward passes of layers with experts that are trained, or frozen in a store.

    A `call` is one micro-batch in one layer, which its backward pass needs: it has the
    `give_up_tensors` and `take_tensors` of `StreamedExperts`.
    """

    def __init__(self, sites: Sequence[ExpertsSite]) -> None:
        super().__init__(sites)
        self.visits = Visits()

    @abc.abstractmethod
    def forward(
        self, layer: int, inputs: Sequence[LayerInput], *, keeps: bool, is_visit: bool
    ) -> tuple[list[Any], list[Tensor]]:
        """One layer for all micro-batches that are there.

        Args:
            is_visit: a backward pass will follow; False where activations are only computed again.

        Returns:
            The calls, and the outputs `[T, D]`.
        """

    @abc.abstractmethod
    def backward(
        self, layer: int, calls: Sequence[Any], grads_TD: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """The gradients of `x_TD` and `weights_TK` (empty without) of each micro-batch."""

    def begin(self, rate: float | None = None) -> None:
        """Forgets the visits; what follows is a new window.

        Args:
            rate: learning rate if gradients are final after this window; None if more windows add
                to them.
        """
        self.visits = Visits(rate=rate)

    def _note_visit(self, layer: int, keys: list[ExpertKey]) -> None:
        self.visits.layers.append((layer, keys))
        self.visits.num_forwards[layer] += 1
        self._last_visited[layer] = keys

    def _turns_back(self, layer: int, *, keeps: bool, is_visit: bool) -> bool:
        """Whether the backward pass of this layer comes next."""
        return keeps and (not is_visit or layer + 1 == len(self._sites))

    def _go_back(self, layer: int) -> None:
        """Drops the visits from a layer on, whose backward pass begins."""
        self.visits.require_own_gradients()
        self.visits.went_back = True
        while self.visits.layers and self.visits.layers[-1][0] >= layer:
            self.visits.layers.pop()


class TrainedExpertsExecutor(LayerExecutor):
    """Computes layers whose experts are trained, expert by expert.

    Args:
        copy_bytes: for experts' weights that stay where products are computed.
        link: to the device that computes; None where that is the CPU.
    """

    def __init__(
        self,
        sites: Sequence[ExpertsSite],
        optimizer: ExpertOptimizer,
        activations: ActivationPolicy,
        copy_bytes: int,
        link: DeviceLink | None,
    ) -> None:
        super().__init__(sites)
        self.activations = activations
        self._optimizer = optimizer
        self._records = optimizer.records
        self.copies = ComputeCopies(optimizer.records.experts, copy_bytes, link)
        self._widths = [site.dim_preactivation for site in sites]

    def expect_first_layer(self) -> None:
        """Begins to read what the next forward pass will probably want first."""
        self._records.expect(self._optimizer.needs(self._last_visited.get(0, [])))

    def forward(
        self, layer: int, inputs: Sequence[LayerInput], *, keeps: bool, is_visit: bool
    ) -> tuple[list[StreamedExperts], list[Tensor]]:
        calls = streamed(self._sites[layer], inputs)
        keys = visited(layer, calls)
        turns_back = self._turns_back(layer, keeps=keeps, is_visit=is_visit)
        self._records.expect(self._ahead_of_forward(layer, keys, turns_back=turns_back))
        if is_visit:
            self._note_visit(layer, keys)
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
                self.copies.release(partial(self._records.release, key))
            self.copies.finish()
        return calls, [call.output() for call in calls]

    def backward(
        self, layer: int, calls: Sequence[StreamedExperts], grads_TD: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """As of all executors; gradients of the experts go to the optimizer."""
        keys = visited(layer, calls)
        is_only_forward = self.visits.num_forwards[layer] == 1
        self._go_back(layer)
        self._records.expect(self._ahead_of_backward(keys))
        for call, grad_TD in zip(calls, grads_TD, strict=True):
            call.begin_backward(grad_TD)
        with self._observed("backward", layer, ()):
            for key in keys:
                self._backward_expert(key, calls, self.visits.rate if is_only_forward else None)
            self.copies.finish()
        return [call.input_gradients() for call in calls]

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        named = self._records.experts[key].layout.views(
            self._optimizer.fetch(key), Sections.PARAMETERS
        )
        try:
            return {name: tensor.clone() for name, tensor in named.items()}
        finally:
            self._records.release(key)

    def _backward_expert(
        self, key: ExpertKey, calls: Sequence[StreamedExperts], rate: float | None
    ) -> None:
        layout = self._records.experts[key].layout
        trains = bool(layout.trained)
        record = self._optimizer.fetch(key, self._backward_sections(key), writes=trains)
        here = [call for call in calls if call.num_rows(key.expert)]
        weights = self._weights(key, record, here[0].x_TD)
        if not trains:
            for call in here:
                call.backward(key.expert, weights, None)
            self.copies.release(partial(self._records.release, key))
            return
        has_gradient = self._records.experts[key].has_gradient
        gradients = [*layout.views(record, Sections.GRADIENT).values()]
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
        before, started = dataclasses.replace(self._records.traffic), time.perf_counter()
        yield
        if direction is None:
            return
        after, width = self._records.traffic, self._widths[layer]
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
        if not self._records.experts[key].layout.trained:
            return Sections.NONE
        sections = Sections.NONE
        if self._records.experts[key].has_gradient:
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
                yield key, self._optimizer.sections_needed(key) | self._backward_sections(key)

    def _weights(self, key: ExpertKey, record: Tensor, x_TD: Tensor) -> StackedExperts:
        named = self._records.experts[key].layout.views(record, Sections.PARAMETERS)
        step, views = self._records.content_step(key), [*named.values()]
        views = self.copies.weights(key, step, views, x_TD)
        return self._sites[key.layer].stacked([*named], views)

    def _in_slot(self, key: ExpertKey, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Gradients in the order of kernels; None where a tensor is frozen or missing."""
        names = [tensor.name for tensor in self._records.experts[key].layout.trained]
        return self._sites[key.layer].gradients(names, tensors)


def streamed(site: ExpertsSite, inputs: Sequence[LayerInput]) -> list[StreamedExperts]:
    """A layer's experts, to be given one after another, for each micro-batch."""
    return [
        StreamedExperts(x, ids, weights, site.num_experts, site.activation, site.impl)
        for x, ids, weights in inputs
    ]


def visited(layer: int, calls: Sequence[Any]) -> list[ExpertKey]:
    """Experts that any micro-batch visits, in ascending order."""
    return [ExpertKey(layer, e) for e in sorted({e for call in calls for e in call.experts})]


T = TypeVar("T")


class _Aborted(BaseException):
    """Unwinds a micro-batch after another one failed; not for users' handlers."""


class _Part(Generic[T]):
    """One micro-batch: its thread and what it waits with."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.turn = threading.Semaphore(0)
        self.place: Any = None
        self.entry: Any = None
        self.together: Callable[[list[Any]], list[Any]] | None = None
        self.answer: Any = None
        self.future: Future[T] = Future()
        self.is_done = False
        self.aux: list[Any] = []


class MicroBatchWindow(Generic[T]):
    """Runs the micro-batches of a window until all are done.

    Args:
        model: the `aux` of its `MoELayer`s belongs to the part that runs.
        parts: one function for each micro-batch: its forward and backward pass.
        on_turn: called with a part's number whenever it goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Callable[[], T]],
        *,
        on_turn: Callable[[int], None] | None = None,
    ) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
        self._parts = [_Part(work) for work in parts]
        self._on_turn = on_turn
        self._running = self._parts[0]
        self._back = threading.Semaphore(0)
        self._is_aborted = False

    def run(self) -> list[T]:
        """The results in the order of the parts.

        Raises:
            RuntimeError: the parts did not visit the same layers in the same order.
            Exception: what the first part that failed raised.
        """
        with ThreadPoolExecutor(len(self._parts), "micro-batch") as threads:
            for part in self._parts:
                context = contextvars.copy_context()
                part.future = threads.submit(context.run, self._work, part)
            try:
                while not all(part.is_done for part in self._parts):
                    for part in self._parts:
                        self._give_turn(part)
                    for part in self._parts:
                        if part.is_done:
                            part.future.result()  # raises what the work raised
                    self._compute_together()
            finally:
                self._is_aborted = True
                for part in self._parts:
                    part.turn.release()
        return [part.future.result() for part in self._parts]

    def meet(self, place: Any, entry: Any, together: Callable[[list[Any]], list[Any]]) -> Any:
        """Called by a part: waits for the others, and returns what `together` made for it.

        Args:
            place: must be equal for all parts.
            together: called once with the entries of all.
        """
        part = self._running
        part.place, part.entry, part.together = place, entry, together
        self._yield_turn(part)
        return part.answer

    def _work(self, part: _Part[T]) -> T:
        part.turn.acquire()
        try:
            if self._is_aborted:
                raise _Aborted
            # nodes of a GPU would otherwise wait for one another in the thread of the device
            with torch.autograd.set_multithreading_enabled(False):
                return part.work()
        finally:
            part.is_done = True
            part.place = None
            self._back.release()

    def _give_turn(self, part: _Part[T]) -> None:
        if part.is_done:
            return
        self._running = part
        if self._on_turn is not None:
            self._on_turn(self._parts.index(part))
        if part.aux:
            for layer, aux in zip(self._layers, part.aux, strict=True):
                layer.aux = aux
        part.turn.release()
        self._back.acquire()

    def _yield_turn(self, part: _Part[T]) -> None:
        part.aux = [layer.aux for layer in self._layers]
        self._back.release()
        part.turn.acquire()
        if self._is_aborted:
            raise _Aborted

    def _compute_together(self) -> None:
        places = {part.place for part in self._parts}
        if len(places) > 1:
            raise RuntimeError(
                "the micro-batches of a window must visit the same layers in the same order; "
                f"one is at {self._parts[0].place}, another elsewhere"
            )
        together = self._parts[0].together
        if None in places or together is None:
            return
        answers = together([part.entry for part in self._parts])
        for part, answer in zip(self._parts, answers, strict=True):
            part.entry, part.answer = None, answer


def run_window(
    model: nn.Module, work: Sequence[Callable[[], T]], modules: Sequence[AbsentExperts]
) -> list[T]:
    """Runs micro-batches: one alone as it is, several in a window that the experts know of."""
    try:
        if len(work) == 1:
            return [work[0]()]
        window = MicroBatchWindow(model, work)
        for module in modules:
            module.window = window
        return window.run()
    finally:
        for module in modules:
            module.window = None


class AbsentExperts(AbsentParameters):
    """Routed experts that the optimizer has; parameters are listed, and refuse to be read."""

    _misses_absent = False  # the optimizer's `load_state_dict` brings them

    def __init__(self, site: ExpertsSite, layer: int, has_gradient: Callable[[], bool]) -> None:
        super().__init__()
        self.num_experts = site.num_experts
        self.layer = layer
        self.window: MicroBatchWindow[Any] | None = None
        self._keeps_dtype = site.keeps_dtype
        self._site = site
        for name in site.parameter_names:
            parameter = site.module.get_parameter(name)
            self.register_parameter(name, TrainedElsewhere.parameter(parameter, has_gradient))

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts of {self._site.name}, not in this module"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with self._without_absent():
            return nn.Module._apply(self, fn, recurse)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        TrainedElsewhere.refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        TrainedElsewhere.refuse()


class OffloadedTrainingExperts(AbsentExperts):
    """Routed experts whose parameters are not here, for `MoELayer` and for transformers.

    Args:
        activations: what autograd's saved tensors become; kept when omitted.
        has_gradient: whether a gradient of any expert waits for the optimizer's step.
    """

    def __init__(
        self,
        site: ExpertsSite,
        layer: int,
        executor: LayerExecutor,
        activations: ActivationPolicy | None = None,
        has_gradient: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(site, layer, has_gradient)
        self._activations = activations
        self._executor = executor
        # gives every call a node in the graph, also where no input needs a gradient
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None
    ) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`.

        Args:
            hidden_states: `[T, D]`.
            top_k_index: `[T, K]`; choices with ids of no expert are passed over.
            top_k_weights: `[T, K]` gate weights; None for rows that are sorted by expert, of one
                choice each, which all weigh one.
        """
        dtype = compute_dtype(hidden_states)
        # a copy within would hide from autograd where it came from
        x_TD = hidden_states.to(dtype).contiguous()
        if torch.is_grad_enabled():
            saving = contextlib.nullcontext()
            if self._activations is not None:
                saving = self._activations.saving(self.layer)
            with saving:
                out_TD = cast(
                    Tensor,
                    _OffloadedLayer.apply(self._anchor, x_TD, top_k_weights, top_k_index, self),
                )
        else:
            entry = LayerInput(x_TD, top_k_index, top_k_weights)
            with _plainly(x_TD):
                _, (out_TD,) = self._executor.forward(
                    self.layer, [entry], keeps=False, is_visit=False
                )
        return out_TD.to(hidden_states.dtype) if self._keeps_dtype else out_TD

    def forward_layer(self, entry: LayerInput) -> tuple[Any, Tensor]:
        """The forward pass, together with the other micro-batches of a window."""
        # inside a backward pass, activations are only computed again
        is_visit = torch._C._current_graph_task_id() == -1

        def together(entries: list[LayerInput]) -> list[tuple[Any, Tensor]]:
            with _plainly(entry.x_TD):
                calls, outputs = self._executor.forward(
                    self.layer, entries, keeps=True, is_visit=is_visit
                )
            return list(zip(calls, outputs, strict=True))

        return self._meet(("forward", self.layer), entry, together)

    def backward_layer(self, call: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The backward pass, together with the other micro-batches of a window."""

        def together(entries: list[tuple[Any, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            calls, grads = zip(*entries, strict=True)
            with _plainly(grad_TD):
                return self._executor.backward(self.layer, calls, grads)

        return self._meet(("backward", self.layer), (call, grad_TD), together)

    def _meet(self, place: tuple[str, int], entry: Any, together: Any) -> Any:
        if self.window is None:
            return together([entry])[0]
        return self.window.meet(place, entry, together)

    def get_parameter(self, target: str) -> nn.Parameter:
        """A copy of a parameter as the module had it, for exporters; no part of the module."""
        return nn.Parameter(self._executor.stacked(self.layer, target)[target], requires_grad=False)


@contextlib.contextmanager
def _plainly(x: Tensor) -> Iterator[None]:
    """No graph, and products in the dtype of their inputs, in whichever thread this runs."""
    with torch.no_grad(), without_autocast(x.device.type):
        yield


class _OffloadedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        ids_TK: Tensor,
        module: OffloadedTrainingExperts,
    ) -> Tensor:
        call, out_TD = module.forward_layer(LayerInput(x_TD, ids_TK, weights_TK))
        ctx.module, ctx.call, ctx.has_weights = module, call, weights_TK is not None
        ctx.save_for_backward(*call.give_up_tensors())
        return out_TD

    @staticmethod
    @first_derivatives_only(
        "offloaded experts have no second derivatives: train the model without offloading"
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.take_tensors(*ctx.saved_tensors)
        grad_TD, grad_weights_TK = ctx.module.backward_layer(ctx.call, grad)
        ctx.call.give_up_tensors()
        return None, grad_TD, grad_weights_TK if ctx.has_weights else None, None, None
