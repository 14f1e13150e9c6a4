"""Decode steps on a GPU as CUDA graphs: recorded once, replayed without a launch of theirs.

A step of one token a sequence is some fifty launches a layer, which take the host longer than the
GPU computes. With a static cache every step is the same work on the same memory. Where all experts
are resident, it is one graph. Otherwise it is recorded in parts: one ends with the experts of a
layer that are resident, and tells the host of its choices before them; the next begins with the
sums. What a layer lacks is queued in between, as without a recording, and joins the same sums: the
same bits.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from moe_runtime.checkpoints.transformers_private import cache_name, cache_of
from moe_runtime.inference.device.device_experts import DeviceExperts, Found, Routed
from moe_runtime.inference.device.recordings import put_first, recording_of
from moe_runtime.inference.device.static_caches import StaticCaches
from moe_runtime.inference.device.step_calls import StepCall, read_step
from moe_runtime.inference.device.structure import Structure, is_own, memory_of
from moe_runtime.memory.device.device import Device, GraphRecorder
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.memory.device.residents import Residents
from moe_runtime.types import ExpertKey

Forward = Callable[..., Any]


class RecordedLayer:
    """The experts of one layer in a recorded step, to which missing ones are added.

    Attributes:
        sums: queues the sums of all experts.
        takes_rows: as of `SlottedProducts`.
        arrived_E: where the slots are of those that arrived.
        following: the next layer, which is prepared while the device computes this one.
    """

    following: RecordedLayer | None = None

    def __init__(
        self,
        experts: DeviceExperts,
        routed: Routed,
        recorder: GraphRecorder,
        tables_2E: torch.Tensor,
    ) -> None:
        """Records the residents and those that arrive, whoever they will be.

        Args:
            experts: of the layer.
            routed: what the layer is called with.
            recorder: of the step; the part before the sums is ended.
            tables_2E: slots of residents and of those that arrived, filled before a replay.
        """
        assert isinstance(experts.store, DeviceStore)
        assert experts.store.stacks is not None, "the layer has a stack"
        self._experts, self._routed, self._store = experts, routed, experts.store
        self._residents_E, self.arrived_E = tables_2E
        self._listed: Residents | None = None
        self._products = experts.products(routed)
        self.sums, self.takes_rows = self._products.sums, self._products.takes_rows
        self.give = self._products.give
        stack_over = partial(experts.store.stacks.stack_over, experts.layer)
        may_plan = experts.misses is not None and self.takes_rows
        self._told = recorder.tell(routed.ids_TK, *[routed.hidden_TD][:may_plan])
        self._is_counted = True
        self._products.add(stack_over(self._residents_E))
        self._at_once = recorder.cut()
        self._products.add(stack_over(self.arrived_E))
        self._arrivals = recorder.cut()

    def add(self, experts: Any) -> None:
        """As `SlottedProducts.add`, for experts that have arrived, whose slots are in a table."""
        self._arrivals.replay()

    def replay(self) -> bool:
        """Replays the part with this layer's choices and residents, and queues what it lacks.

        Returns:
            Whether the whole layer was resident.
        """
        self._experts.complete(self, self._routed, self._launch)
        return self._listed is not None and self._listed.are_all

    def prepare(self) -> None:
        """To be called before each replay: forgets the choices of the step before."""
        self._told.settle()
        if not self._is_counted:
            self._store.count_behind(self._told)
        self._told.forget()
        self._is_counted = False

    def _launch(self) -> tuple[Residents, Found]:
        residents = self._store.with_residents(self._experts.layer, self._list_and_replay)
        if self.following is not None:
            self.following.prepare()
        return residents, self._experts.found(self, self._routed, self._told, self._used)

    def _used(self) -> list[ExpertKey]:
        self._is_counted = True
        return self._experts.keys_of_rows(self._told.numbers)

    def _list_and_replay(self, residents: Residents) -> None:
        if residents is not self._listed:
            self._store.device.upload(residents.slots, self._residents_E)
            self._listed = residents
        self._at_once.replay()


class RecordedStep:
    """One step of a model, to be replayed with other tokens.

    Attributes:
        key: of the calls that it stands for.
        others: as of `CacheRecording`.
    """

    def __init__(
        self,
        model: Any,
        forward: Forward,
        call: StepCall,
        modules: Sequence[DeviceExperts],
        *,
        keeps_cache: bool,
    ) -> None:
        """Records a call; nothing is computed.

        Its cache lives as long as the recording where that keeps it.

        Raises:
            RuntimeError: the model does what a graph cannot hold.
        """
        store = modules[0].store
        assert isinstance(store, DeviceStore)
        self.key, self.others = call.key, WeakKeyDictionary[Any, Any]()
        self._store, self._modules = store, modules
        self._cache = weakref.ref(call.cache)
        self._kept = call.cache if keeps_cache else None
        self._inputs = {name: tensor.clone() for name, tensor in call.tensors.items()}
        # their stacks are made now: not what is recorded
        found = {m.layer: store.with_residents(m.layer, lambda r: r.stack) for m in modules}
        is_whole = all(map(self._is_quiet, modules, found.values()))
        self._residents = found if is_whole else None
        self._tables = {
            m.layer: torch.full((2, m.num_experts), -1, dtype=torch.int32, device=model.device)
            for m in modules
            if not is_whole
        }
        self._ids: list[torch.Tensor] = []
        self._layers: list[RecordedLayer] = []
        given = {**call.arguments(self._inputs), cache_name(forward): call.cache}
        with store.device.record() as recorder:
            self._recorder: GraphRecorder | None = recorder
            for module in modules:
                module.recording = self
            try:
                output = forward(**given)
                self._ids_LTK = torch.stack(self._ids) if self._ids else None
                self._last = recorder.end()
            finally:
                self._recorder = None
                for module in modules:
                    module.recording = None
        for layer, following in itertools.pairwise(self._layers):
            layer.following = following
        self._structure = Structure(model)
        self._memory = memory_of(call.cache)
        self._kind = type(output)
        # its memory goes with the request, and no other one waits for that
        self._has_cache = [name for name, value in output.items() if value is call.cache]
        self._output = {n: value for n, value in output.items() if n not in self._has_cache}
        if not all(isinstance(v, (torch.Tensor, type(None))) for v in self._output.values()):
            raise RuntimeError(f"{self._kind.__name__} holds more than tensors")

    def _is_quiet(self, experts: DeviceExperts, residents: Residents) -> bool:
        """Whether nobody has to hear of a layer within a step."""
        listens = experts.listeners.routed or experts.listeners.demanded
        return residents.are_all and not listens and self._store.listener is None

    def record_layer(self, experts: DeviceExperts, routed: Routed) -> torch.Tensor:
        """As ``Recording.record_layer``."""
        assert self._recorder is not None
        if self._residents is not None:
            products = experts.products(routed)
            products.add(self._residents[experts.layer].stack)
            self._ids.append(routed.ids_TK)
            return products.sums()
        tables_2E = self._tables[experts.layer]
        self._layers.append(RecordedLayer(experts, routed, self._recorder, tables_2E))
        return self._layers[-1].sums()

    @property
    def is_whole(self) -> bool:
        """Whether it is one graph."""
        return self._residents is not None

    def stands_for(self, call: StepCall, *, looks: bool) -> bool:
        """Whether it is this call with other tokens.

        Args:
            call: what is asked for.
            looks: at the model and the cache: somebody may have changed them since the last call.
        """
        if call.key != self.key or self.cache is not call.cache:
            return False
        return not looks or (memory_of(call.cache) == self._memory and self._structure.holds())

    def keeps_other(self, cache: Any, caches: StaticCaches) -> bool:
        """Whether it alone holds the memory of another cache than this one, beside it."""
        return self._kept not in (None, cache) and not caches.is_in_use(self._kept)

    @property
    def cache(self) -> Any:
        """As of `CacheRecording`."""
        return self._cache()

    def replay(self, call: StepCall) -> Any:
        """Computes the step for the tokens of a call.

        Returns:
            What ``forward`` returns, in memory of its own; None where experts have left that had to
            be there, and nothing was computed.
        """
        _copy([*self._inputs.values()], [call.tensors[name] for name in self._inputs])
        if self._residents is None:
            self._layers[0].prepare()
            are_all = [layer.replay() for layer in self._layers]
            self._last.replay()
            if all(are_all) and all(map(self._is_quiet, self._modules, self._found())):
                self._store.recorded = None  # the next one is recorded as a whole
        elif not self._replay_whole():
            return None
        there = {name: value for name, value in self._output.items() if value is not None}
        found = {name: torch.empty_like(value) for name, value in there.items()}
        _copy([*found.values()], [*there.values()])
        empty = dict.fromkeys(self._output.keys() - there.keys())
        return self._kind(**found, **empty, **dict.fromkeys(self._has_cache, call.cache))

    def _found(self) -> list[Residents]:
        return [self._store.with_residents(m.layer, lambda _: None) for m in self._modules]

    def _replay_whole(self) -> bool:
        assert self._residents is not None
        if any(not self._is_quiet(m, self._residents[m.layer]) for m in self._modules):
            return False
        is_done = False
        try:
            was_there = self._store.with_same_residents(self._residents, self._last.replay)
            if was_there and self._ids_LTK is not None:
                ids_LTK = self._ids_LTK.to(torch.int32, copy=True)
                ids_LTK, copied = self._store.device.download(ids_LTK, is_kept=True)
                self._store.count_later(copied, partial(_used, self._modules, ids_LTK))
            is_done = True
        finally:
            if not is_done:
                self._store.let_go()
        return was_there


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies tensors on the device by a kernel: between kernels its copy engine takes longer."""
    torch._foreach_copy_(into, values, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


def _used(modules: Sequence[DeviceExperts], ids_LTK: torch.Tensor) -> list[ExpertKey]:
    """The experts of a step, without its recording, whose memory may be given up before."""
    if ids_LTK.shape[1] == 1:  # whose rows are its choices in their order
        layers = zip(modules, ids_LTK.tolist(), strict=True)
        return [key for m, (ids,) in layers for key in m.keys_of(dict.fromkeys(ids))]
    layers = zip(modules, ids_LTK, strict=True)
    return [key for m, ids_TK in layers for key in m.keys_of(m.rows_of(ids_TK))]


class DecodeGraphs:
    """Stands for a model's ``forward``, and replays the steps that repeat.

    The first step of a kind is computed as ever, so that kernels are compiled; the second one is
    recorded. Steps that cannot be recorded are computed as ever: prompts, other caches, more than
    16 tokens, layers without a stack, and models into which somebody looks.

    A cache of `generate` that a step was recorded for is kept with the recording, until the model
    is called with another one. Recordings of other caches stay as long as these, sixteen beside the
    last one: a server has one for each number of sequences.
    """

    def __init__(self, model: Any, modules: Sequence[DeviceExperts], caches: StaticCaches) -> None:
        """Takes a model, its experts and the caches of its `generate`."""
        self._model, self._modules = model, modules
        self._forward: Forward = model.forward
        self.__wrapped__ = self._forward  # whose signature it has
        self._names = [*inspect.signature(self._forward).parameters]
        self._seen: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the last call of a cache
        self._is_refused = self._is_torn = False
        self._caches = caches
        self._trusted: RecordedStep | None = None
        self._is_looked_at = False  # the recording, at the last call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``forward``."""
        kwargs.update(zip(self._names, args, strict=False))
        for module in self._modules if self._is_torn else ():  # a recording was not ended
            module.recording = None
        self._is_torn = False
        store = self._store
        recorded = recording_of(store, cache_of(kwargs), self._caches)
        is_trusted = recorded is self._trusted
        self._trusted, self._is_looked_at = None, False
        call = None if self._is_refused else read_step(self._model, kwargs)
        if call is None:
            return self._forward(**kwargs)
        if recorded is not None and not recorded.stands_for(call, looks=not is_trusted):
            store.recorded = recorded = None
        if recorded is None:
            is_repeated = self._seen.get(call.cache) == call.key
            if not is_repeated or not all(m.has_stack(self._model.dtype) for m in self._modules):
                found = self._forward(**kwargs)
                self._seen[call.cache] = call.key
                return found
            try:
                self._is_torn = True  # by what strikes until it is made
                recorded = RecordedStep(
                    self._model,
                    self._forward,
                    call,
                    self._modules,
                    keeps_cache=self._caches.is_own(call.cache),
                )
                self._is_torn = False
            except RuntimeError as error:
                self._is_refused, store.recorded = True, None
                warnings.warn(
                    f"decode steps of this model are not recorded as CUDA graphs: {error}",
                    stacklevel=2,
                )
                return self._forward(**kwargs)
            put_first(store, recorded)
        else:
            self._is_looked_at = True
        found = recorded.replay(call)
        if found is None:
            store.recorded = None
            return self._forward(**kwargs)
        return found

    def looked_at(self, cache: Any) -> RecordedStep | None:
        """What the last call was one of, if it was with this cache and not just recorded: a model
        into whose modules somebody looks is recorded at every call.
        """
        recorded = self._store.recorded
        is_ours = self._is_looked_at and recorded is not None and recorded.cache is cache
        return recorded if is_ours else None

    def trust(self, recorded: RecordedStep | None) -> None:
        """Lets the next call go without a look at the model, if it is of this recording.

        To be called by who has called the model with it and has had no foreign code run since.
        Hooks of the model itself are foreign, but those of its own.
        """
        hooks = *self._model._forward_pre_hooks.values(), *self._model._forward_hooks.values()
        if all(map(is_own, hooks)):
            self._trusted = recorded

    def count_one(self) -> bool:
        """As ``DeviceStore.count_one``, between calls of the model."""
        is_done = False
        try:
            was_told = self._store.count_one()
            is_done = True
            return was_told
        finally:
            if not is_done:
                self._store.let_go()

    @property
    def device(self) -> Device:
        """Where steps are computed."""
        return self._store.device

    @property
    def is_whole(self) -> bool:
        """Whether the next step is probably one graph, for which nobody waits."""
        return self._store.recorded is not None and self._store.recorded.is_whole

    @property
    def _store(self) -> DeviceStore[Any]:
        store = self._modules[0].store
        assert isinstance(store, DeviceStore)
        return store
