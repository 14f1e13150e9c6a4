"""Decode steps on a GPU as CUDA graphs: recorded once, replayed without a launch of theirs.

A step of one token a sequence is some fifty launches a layer, which take the host longer than the
GPU computes. With a static cache every step is the same work on the same memory, in one graph or
in several (`step_experts`).
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from moe_runtime.checkpoints.transformers_private import cache_name, cache_of
from moe_runtime.config import PrefetchMode
from moe_runtime.inference.device.device_experts import DeviceExperts, Routed
from moe_runtime.inference.device.recordings import put_first, recording_of
from moe_runtime.inference.device.static_caches import StaticCaches
from moe_runtime.inference.device.step_calls import StepCall, read_step
from moe_runtime.inference.device.step_experts import experts_of_step
from moe_runtime.inference.device.structure import Structure, is_own, memory_of
from moe_runtime.memory.device.device import Device, GraphRecorder
from moe_runtime.memory.device.device_store import DeviceStore

Forward = Callable[..., Any]


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
        self._store = store
        self._cache = weakref.ref(call.cache)
        self._kept = call.cache if keeps_cache else None
        self._inputs = {name: tensor.clone() for name, tensor in call.tensors.items()}
        prefetcher = model.moe.prefetcher
        self._experts = experts_of_step(
            store,
            modules,
            model.moe.facts.signature.top_k,
            len(call.tensors["input_ids"]),
            reads_ahead=prefetcher is not None and prefetcher.mode is not PrefetchMode.OBSERVE,
        )
        given = {**call.arguments(self._inputs), cache_name(forward): call.cache}
        with store.device.record() as recorder:
            self._recorder: GraphRecorder | None = recorder
            for module in modules:
                module.recording = self
            try:
                output = forward(**given)
                self._experts.end()
                self._last = recorder.end()
            finally:
                self._recorder = None
                for module in modules:
                    module.recording = None
        self._structure = Structure(model)
        self._memory = memory_of(call.cache)
        self._kind = type(output)
        # its memory goes with the request, and no other one waits for that
        self._has_cache = [name for name, value in output.items() if value is call.cache]
        self._output = {n: value for n, value in output.items() if n not in self._has_cache}
        if not all(isinstance(v, (torch.Tensor, type(None))) for v in self._output.values()):
            raise RuntimeError(f"{self._kind.__name__} holds more than tensors")

    def record_layer(self, experts: DeviceExperts, routed: Routed) -> torch.Tensor:
        """As ``Recording.record_layer``."""
        assert self._recorder is not None
        return self._experts.record(experts, routed, self._recorder)

    @property
    def is_one_graph(self) -> bool:
        """Whether nobody waits for the host in the midst of it."""
        return self._experts.is_one_graph

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
            What ``forward`` returns, in memory of its own; None where experts are not where they
            have to be, and nothing was computed.
        """
        _copy([*self._inputs.values()], [call.tensors[name] for name in self._inputs])
        is_queued = self._experts.replay(self._last)
        if self._experts.is_over:
            self._store.recorded = None
        if not is_queued:
            return None
        there = {name: value for name, value in self._output.items() if value is not None}
        found = {name: torch.empty_like(value) for name, value in there.items()}
        _copy([*found.values()], [*there.values()])
        empty = dict.fromkeys(self._output.keys() - there.keys())
        return self._kind(**found, **empty, **dict.fromkeys(self._has_cache, call.cache))


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies tensors on the device by a kernel: between kernels its copy engine takes longer."""
    torch._foreach_copy_(into, values, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


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
        return self._forward(**kwargs) if found is None else found

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
        return self._store.count_one()

    @property
    def device(self) -> Device:
        """Where steps are computed."""
        return self._store.device

    @property
    def is_one_graph(self) -> bool:
        """Whether the next step is probably one graph, for which nobody waits."""
        return self._store.recorded is not None and self._store.recorded.is_one_graph

    @property
    def _store(self) -> DeviceStore[Any]:
        store = self._modules[0].store
        assert isinstance(store, DeviceStore)
        return store
