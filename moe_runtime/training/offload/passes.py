"""Forward and backward passes of layers with offloaded experts, and the modules in their place.

A window is the micro-batches of one `backward` call. An expert is fetched once for all of them, in
either direction (Li et al., "Harmony", 2022). The backward pass needs the experts of the forward
pass in the reverse order of layers, so its prefetch is exact.

Each micro-batch of a window has a thread; one runs at a time, in turn. At a layer's experts a
thread waits for the others; then the experts are computed for all of them. Turns are fixed, so
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
from concurrent.futures import ThreadPoolExecutor, wait
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
from moe_runtime.training.offload.compute_copies import ComputeCopies, DeviceLink, add_up, crosses
from moe_runtime.training.offload.optimizer import ExpertOptimizer
from moe_runtime.training.offload.record_store import Need
from moe_runtime.training.offload.records import Sections
from moe_runtime.training.offload.site import ExpertsSite
from moe_runtime.types import ExpertKey


class LayerInput(NamedTuple):
    """One micro-batch at a layer: `[T, D]`, `[T, K]` ids, `[T, K]` gate weights.

    Without weights, rows are sorted by expert with one choice each, and outputs are row by row.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor | None


@dataclass
class Visits:
    """The experts that the forward passes since the last step visited, in order.

    Attributes:
        layers: layer and its experts for every forward pass whose backward pass will follow.
        num_forwards: forward passes of each layer.
        rate: learning rate if the gradients of this backward pass are final; else None.
        went_back: layers whose experts got gradients since the last step.
        is_reduced: gradients around the experts are sums over all processes already.
        is_final: experts on the disk were updated with the gradients of this step.
    """

    layers: list[tuple[int, list[ExpertKey]]] = field(default_factory=list)
    num_forwards: Counter[int] = field(default_factory=Counter)
    rate: float | None = None
    went_back: set[int] = field(default_factory=set)
    is_reduced: bool = False
    is_final: bool = False

    def require_open(self) -> None:
        """Refuses gradients that come after the step's last ones."""
        if self.is_final:
            raise UnsupportedUseError(
                "experts were updated by the last `backward` of this step already: call `step` "
                "before further gradients, or give is_last=False to all but the last one"
            )
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
        """A copy of one expert's parameters after the steps so far, by name."""

    def stacked(self, layer: int, only: str | None = None) -> dict[str, Tensor]:
        """Copies of a layer's parameters as its module had them, this process's experts first.

        Args:
            only: name of the one parameter to copy.
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

    A `call` is one micro-batch in one layer, kept for its backward pass; it has the
    `give_up_tensors` and `take_tensors` of `StreamedExperts`.
    """

    def __init__(self, sites: Sequence[ExpertsSite]) -> None:
        super().__init__(sites)
        self.visits = Visits()

    @abc.abstractmethod
    def forward(
        self, layer: int, inputs: Sequence[LayerInput], *, keeps: bool, is_visit: bool
    ) -> tuple[list[Any], list[Tensor]]:
        """Calls and outputs `[T, D]` of one layer for all micro-batches.

        Args:
            is_visit: a backward pass will follow; False where activations are only recomputed.
        """

    @abc.abstractmethod
    def backward(
        self, layer: int, calls: Sequence[Any], grads_TD: Sequence[Tensor], *, learns: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """The gradients of `x_TD` and `weights_TK` (empty without) of each micro-batch.

        Args:
            learns: parameters get gradients; False under `torch.autograd.grad` of other tensors.
        """

    def _note_visit(self, layer: int, keys: list[ExpertKey]) -> None:
        self.visits.layers.append((layer, keys))
        self.visits.num_forwards[layer] += 1
        self._last_visited[layer] = keys

    def _turns_back(self, layer: int, *, keeps: bool, is_visit: bool) -> bool:
        """Whether the backward pass of this layer comes next."""
        return keeps and (not is_visit or layer + 1 == len(self._sites))

    def _go_back(self, layer: int) -> None:
        """Drops the visits of this and later layers; the layer's backward pass begins."""
        self.visits.require_open()
        self.visits.went_back.add(layer)
        while self.visits.layers and self.visits.layers[-1][0] >= layer:
            self.visits.layers.pop()


class TrainedExpertsExecutor(LayerExecutor):
    """Computes layers whose experts are trained, expert by expert.

    Args:
        copy_bytes: for experts' weights that stay where products are computed.
        link: to the device that computes; None for the CPU.
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
        self._activations = activations
        self._optimizer = optimizer
        self._records = optimizer.records
        self.copies = ComputeCopies(optimizer.records.experts, copy_bytes, link)
        self._widths = [site.dim_preactivation for site in sites]

    def expect_first_layer(self) -> None:
        """Reads ahead the experts that the next forward pass will probably need first."""
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
        keeps = keeps and self._activations.choices[layer] != "recompute"
        for call in calls:
            call.begin_forward(self._widths[layer], keeps=keeps)
        with self._observed("forward" if is_visit else None, layer, inputs):
            for key in keys:
                record = self._optimizer.fetch(key)
                here = [call for call in calls if call.num_rows(key.expert)]
                weights = self._weights(key, record, here[0].x_TD)
                for call in here:
                    call.forward(key.expert, weights)
                self.copies.link.release(partial(self._records.release, key))
            self.copies.link.finish()
        return calls, [call.output() for call in calls]

    def backward(
        self,
        layer: int,
        calls: Sequence[StreamedExperts],
        grads_TD: Sequence[Tensor],
        *,
        learns: bool,
    ) -> list[tuple[Tensor, Tensor]]:
        """As `LayerExecutor.backward`; gradients of the experts go to the optimizer."""
        keys = visited(layer, calls)
        rate = self.visits.rate if self.visits.num_forwards[layer] == 1 else None
        if learns:
            self._go_back(layer)
        self._records.expect(self._ahead_of_backward(keys))
        for call, grad_TD in zip(calls, grads_TD, strict=True):
            call.begin_backward(grad_TD)
        with self._observed("backward", layer, ()):
            for key in keys:
                here = [call for call in calls if call.num_rows(key.expert)]
                self.copies.link.release(self._backward_expert(key, here, rate, learns=learns))
            self.copies.link.finish()
        return [call.input_gradients() for call in calls]

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        record = self._optimizer.fetch(key)
        named = self._records.experts[key].layout.views(record, Sections.PARAMETERS)
        try:
            return {name: tensor.clone() for name, tensor in named.items()}
        finally:
            self._records.release(key)

    def _backward_expert(
        self,
        key: ExpertKey,
        here: Sequence[StreamedExperts],
        rate: float | None,
        *,
        learns: bool,
    ) -> Callable[[], object]:
        """Queues an expert's backward pass; the result releases the record afterwards."""
        layout = self._records.experts[key].layout
        learns = learns and bool(layout.trained)
        record = self._optimizer.fetch(key, self._backward_sections(key), writes=learns)
        weights = self._weights(key, record, here[0].x_TD)
        if not learns:
            for call in here:
                call.backward(key.expert, weights, None)
            return partial(self._records.release, key)
        adds = self._records.experts[key].has_gradient
        gradients = [*layout.views(record, Sections.GRADIENT).values()]
        if not adds:
            layout.clear_padding(record)
        names = [tensor.name for tensor in layout.trained]
        link, site = self.copies.link, self._sites[key.layer]
        is_crossing = crosses(gradients[0], here[0].x_TD)
        # gradients of several micro-batches are summed before they cross
        sums = is_crossing and len(here) > 1 and not adds
        totals = link.gradients(gradients, gradients[0].dtype) if sums else gradients
        for number, call in enumerate(here):
            is_first = number == 0 and not (adds or is_crossing)
            found = gradients
            if not is_first:
                found = link.gradients(gradients, weights.dtype, is_part=sums)
            call.backward(key.expert, weights, site.gradients(names, found))
            if is_crossing and not sums:
                self.copies.send_back(found, gradients, adds=adds)
            elif not is_first:
                add_up(totals, found, adds=not sums or number > 0)
        if sums:
            self.copies.send_back(totals, gradients, adds=False)
        return partial(self._optimizer.accept, key, record, rate)

    @contextlib.contextmanager
    def _observed(
        self, direction: Literal["forward", "backward"] | None, layer: int,
        inputs: Sequence[LayerInput],
    ) -> Iterator[None]:  # fmt: skip
        """Reports the cost of a pass to the plan of activations."""
        before, started = dataclasses.replace(self._records.traffic), time.perf_counter()
        yield
        if direction is None:
            return
        after, width = self._records.traffic, self._widths[layer]
        hidden = width // (2 if self._sites[layer].has_gate else 1)
        found = Pass(
            seconds=time.perf_counter() - started - (after.stall_s - before.stall_s),
            saved_bytes=sum(x.ids_TK.numel() * width * x.x_TD.element_size() for x in inputs),
            recompute_share=width / (width + hidden),
            read_bytes=after.read_bytes - before.read_bytes,
            written_bytes=after.written_bytes - before.written_bytes,
        )
        self._activations.observe(direction, layer, found)

    def _backward_sections(self, key: ExpertKey) -> Sections:
        sections = Sections.NONE
        if self._records.experts[key].layout.trained:
            if self._records.experts[key].has_gradient:
                sections |= Sections.GRADIENT
            if self.visits.rate is not None and self._optimizer.updates_in_backward(key):
                sections |= Sections.STATE
        return sections

    def _ahead_of_forward(
        self, layer: int, keys: Sequence[ExpertKey], *, turns_back: bool
    ) -> Iterator[Need]:
        """This layer's experts, then those of the next layer as the last pass had them."""
        yield from self._optimizer.needs(keys)
        if turns_back:
            yield from self._ahead_of_backward(keys)
        else:
            yield from self._optimizer.needs(self._last_visited.get(layer + 1, []))

    def _ahead_of_backward(self, keys: Sequence[ExpertKey]) -> Iterator[Need]:
        for layer_keys in [keys, *(keys for _, keys in reversed(self.visits.layers))]:
            for key in layer_keys:
                yield key, self._optimizer.sections_needed(key) | self._backward_sections(key)

    def _weights(self, key: ExpertKey, record: Tensor, x_TD: Tensor) -> StackedExperts:
        named = self._records.experts[key].layout.views(record, Sections.PARAMETERS)
        step = self._records.content_step(key)
        views = self.copies.weights(key, step, [*named.values()], x_TD)
        return self._sites[key.layer].stacked([*named], views)


def streamed(site: ExpertsSite, inputs: Sequence[LayerInput]) -> list[StreamedExperts]:
    """One call of a layer for each micro-batch; experts are given one after another."""
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


class MicroBatchWindow(Generic[T]):
    """Runs the micro-batches of a window in turn until all are done.

    Args:
        model: while a part runs, the `aux` of the model's `MoELayer`s is that of the part.
        parts: one function for each micro-batch: its forward and backward pass.
        on_turn: called with a part's number whenever it continues.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Callable[[], T]],
        *,
        on_turn: Callable[[int], None] | None = None,
    ) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
        self._parts = list(parts)
        self._on_turn = on_turn
        self._turns = [threading.Semaphore(0) for _ in self._parts]
        self._places: list[Any] = [None] * len(self._parts)
        self._entries: list[Any] = [None] * len(self._parts)
        self._answers: list[Any] = []
        self._running = 0
        self._failure: BaseException | None = None
        # a new thread would use the first GPU
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

    def run(self) -> list[T]:
        """The results in the order of the parts.

        Raises:
            RuntimeError: the parts did not visit the same layers in the same order.
            Exception: the first error of a part.
        """
        with ThreadPoolExecutor(len(self._parts), "micro-batch") as threads:
            try:
                futures = [
                    threads.submit(contextvars.copy_context().run, self._work, number)
                    for number in range(len(self._parts))
                ]
                self._turns[0].release()
                wait(futures)
            except BaseException as error:
                self._abort(error)
                raise
        if self._failure is not None:
            raise self._failure
        return [future.result() for future in futures]

    def meet(self, place: Any, entry: Any, together: Callable[[list[Any]], list[Any]]) -> Any:
        """Called by a part: waits for the others, and returns its share of `together`.

        Args:
            place: must be equal for all parts.
            together: called once with the entries of all.
        """
        number = self._running
        aux = [layer.aux for layer in self._layers]
        self._places[number], self._entries[number] = place, entry
        self._pass_turn(number, together)
        self._await_turn(number)
        for layer, own in zip(self._layers, aux, strict=True):
            layer.aux = own
        return self._answers[number]

    def _work(self, number: int) -> T:
        try:
            self._await_turn(number)
            # nodes of a GPU would otherwise wait for one another in the thread of the device
            with torch.autograd.set_multithreading_enabled(False), torch.cuda.device(self._gpu):
                result = self._parts[number]()
            self._places[number] = None
            self._pass_turn(number, None)
            return result
        except BaseException as error:
            self._abort(error)
            raise

    def _await_turn(self, number: int) -> None:
        self._turns[number].acquire()
        if self._failure is not None:
            raise _Aborted
        self._running = number
        if self._on_turn is not None:
            self._on_turn(number)

    def _pass_turn(self, number: int, together: Callable[[list[Any]], list[Any]] | None) -> None:
        """Gives the turn to the next part; after the last one, computes for all of them."""
        if number + 1 < len(self._parts):
            self._turns[number + 1].release()
            return
        try:
            if len(set(self._places)) > 1:
                raise RuntimeError(
                    "the micro-batches of a window must visit the same layers in the same order; "
                    f"one is at {self._places[0]}, another elsewhere"
                )
            if together is None:
                return
            self._answers = together(self._entries)
        except BaseException as error:  # of all parts: no handler in this one may hide it
            self._abort(error)
            raise _Aborted from None
        self._entries = [None] * len(self._parts)
        self._turns[0].release()

    def _abort(self, error: BaseException) -> None:
        self._failure = error if self._failure is None else self._failure
        for turn in self._turns:
            turn.release()


def run_window(
    model: nn.Module, work: Sequence[Callable[[], T]], modules: Sequence[AbsentExperts]
) -> list[T]:
    """Runs one micro-batch by itself, and several in a window that the modules meet in."""
    if len(work) == 1:
        return [work[0]()]
    window = MicroBatchWindow(model, work)
    try:
        for module in modules:
            module.window = window
        return window.run()
    finally:
        for module in modules:
            module.window = None


class AbsentExperts(AbsentParameters):
    """Routed experts held by the optimizer; parameters are listed, and refuse to be read."""

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
        activations: for the tensors that autograd saves; they are kept when omitted.
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
            top_k_index: `[T, K]`; ids of no expert are skipped.
            top_k_weights: `[T, K]` gate weights; None for rows sorted by expert, with one choice
                of weight one each.
        """
        dtype = compute_dtype(hidden_states)
        # a copy inside the function would hide its source from autograd
        x_TD = hidden_states.to(dtype).contiguous()
        if torch.is_grad_enabled():
            policy = self._activations
            with policy.saving(self.layer) if policy else contextlib.nullcontext():
                out = _OffloadedLayer.apply(self._anchor, x_TD, top_k_weights, top_k_index, self)
            out_TD = cast(Tensor, out)
        else:
            entry = LayerInput(x_TD, top_k_index, top_k_weights)
            with _plainly(x_TD):
                _, (out_TD,) = self._executor.forward(
                    self.layer, [entry], keeps=False, is_visit=False
                )
        return out_TD.to(hidden_states.dtype) if self._keeps_dtype else out_TD

    def forward_layer(self, entry: LayerInput) -> tuple[Any, Tensor]:
        """The forward pass, together with the other micro-batches of a window."""
        # inside a backward pass, activations are only recomputed
        is_visit = torch._C._current_graph_task_id() == -1

        def compute(entries: list[LayerInput]) -> list[tuple[Any, Tensor]]:
            found = self._executor.forward(self.layer, entries, keeps=True, is_visit=is_visit)
            return list(zip(*found, strict=True))

        return self._meet("forward", entry.x_TD, entry, compute)

    def backward_layer(self, call: Any, grad_TD: Tensor, *, learns: bool) -> tuple[Tensor, Tensor]:
        """The backward pass, together with the other micro-batches of a window."""

        def compute(entries: list[tuple[Any, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            calls, grads_TD = zip(*entries, strict=True)
            return self._executor.backward(self.layer, calls, grads_TD, learns=learns)

        kind = "backward" if learns else "gradients of inputs"
        return self._meet(kind, grad_TD, (call, grad_TD), compute)

    def _meet(
        self, kind: str, like: Tensor, entry: Any, compute: Callable[[list[Any]], list[Any]]
    ) -> Any:
        def together(entries: list[Any]) -> list[Any]:
            with _plainly(like):
                return compute(entries)

        if self.window is None:
            return together([entry])[0]
        return self.window.meet((kind, self.layer), entry, together)

    def get_parameter(self, target: str) -> nn.Parameter:
        """A copy of a parameter as the module had it, for exporters; no part of the module."""
        return nn.Parameter(self._executor.stacked(self.layer, target)[target], requires_grad=False)


@contextlib.contextmanager
def _plainly(x: Tensor) -> Iterator[None]:
    """Turns autograd and autocast off, which are settings of a thread."""
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
        # torch.autograd.grad of other tensors does not execute the node of the anchor's gradient
        learns = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        grad_TD, grad_weights_TK = ctx.module.backward_layer(ctx.call, grad, learns=learns)
        ctx.call.give_up_tensors()
        return None, grad_TD, grad_weights_TK if ctx.has_weights else None, None, None
