"""Decode steps on a GPU as CUDA graphs, recorded once and replayed.

A step of one token is some fifty launches a layer, which take the host longer than the GPU
computes. With a static cache every step is the same work on the same memory.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from moe_runtime.checkpoints.transformers_private import (
    CACHE_NAMES,
    attention_name,
    cache_name,
    cache_of,
)
from moe_runtime.config import PrefetchMode
from moe_runtime.inference.device.device_experts import DeviceExperts, Routed
from moe_runtime.inference.device.static_caches import StaticCaches, is_filled
from moe_runtime.inference.device.step_experts import experts_of_step
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS
from moe_runtime.memory.device.device import Device, GraphRecorder
from moe_runtime.memory.device.device_store import DeviceStore

Forward = Callable[..., Any]


class RecordedStep:
    """One step of a model, to be replayed with other tokens.

    Attributes:
        key: of the calls that it replaces.
        others: further recordings, by their caches. A server has one for each number of sequences.
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
        """Records a call without computing it; ``keeps_cache`` keeps its cache alive.

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
                module.recording = self._record_layer
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

    def _record_layer(self, experts: DeviceExperts, routed: Routed) -> torch.Tensor:
        assert self._recorder is not None
        return self._experts.record(experts, routed, self._recorder)

    @property
    def is_one_graph(self) -> bool:
        """Whether it never waits for the host."""
        return self._experts.is_one_graph

    def stands_for(self, call: StepCall, *, looks: bool) -> bool:
        """Whether it is this call with other tokens; ``looks`` compares the model and the cache
        too."""
        if call.key != self.key or self.cache is not call.cache:
            return False
        return not looks or (memory_of(call.cache) == self._memory and self._structure.holds())

    def keeps_other(self, cache: Any, caches: StaticCaches) -> bool:
        """Whether it alone holds the memory of another cache than this one."""
        return self._kept not in (None, cache) and not caches.is_in_use(self._kept)

    @property
    def cache(self) -> Any:
        return self._cache()

    def replay(self, call: StepCall) -> Any:
        """Computes the step for the tokens of a call, as ``forward`` returns it, in new memory.

        None where experts are not where they have to be, and nothing was computed.
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
    """A model's ``forward``, which replays repeated steps.

    The first step of a kind compiles kernels; the second one is recorded. Prompts, other caches,
    more than 16 tokens, layers without a stack and observed models are computed as usual.

    A recorded cache of `generate` is kept until the model is called with another one. Up to sixteen
    recordings of other caches stay as long as these.
    """

    def __init__(self, model: Any, modules: Sequence[DeviceExperts], caches: StaticCaches) -> None:
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
        """The recording of the last call, if it was of this cache and not just recorded.

        An observed model is recorded at every call.
        """
        recorded = self._store.recorded
        is_ours = self._is_looked_at and recorded is not None and recorded.cache is cache
        return recorded if is_ours else None

    def trust(self, recorded: RecordedStep | None) -> None:
        """Lets the next call of this recording go without a comparison of the model.

        For callers that have run no foreign code since the last call, hooks of the model included.
        """
        hooks = *self._model._forward_pre_hooks.values(), *self._model._forward_hooks.values()
        if all(map(is_own, hooks)):
            self._trusted = recorded

    def count_one(self) -> bool:
        return self._store.count_one()

    @property
    def device(self) -> Device:
        return self._store.device

    @property
    def is_one_graph(self) -> bool:
        """Whether the next step probably never waits for the host."""
        return self._store.recorded is not None and self._store.recorded.is_one_graph

    @property
    def _store(self) -> DeviceStore[Any]:
        store = self._modules[0].store
        assert isinstance(store, DeviceStore)
        return store


_ASKS_FOR_MORE = ("labels", "output_attentions", "output_hidden_states", "output_router_logits")


class CallKey(NamedTuple):
    """What calls of one recording have in common."""

    values: tuple[tuple[str, Any], ...]
    tensors: tuple[Any, ...]
    is_inference: bool


class StepCall(NamedTuple):
    """A call of a model with a static cache; ``tensors`` are all others, by name."""

    key: CallKey
    tensors: dict[str, torch.Tensor]
    cache: Any

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the model is called with, but for the cache, with these tensors."""
        return {**_nested(tensors), **dict(self.key.values)}


def read_step(model: Any, kwargs: Mapping[str, Any]) -> StepCall | None:
    """A call that can be recorded, or None."""
    ids_B1, config = kwargs.get("input_ids"), model.config
    cache = cache_of(kwargs)
    if (
        not isinstance(ids_B1, torch.Tensor)
        or ids_B1.shape[1:] != (1,)
        or not 0 < len(ids_B1) <= MAX_TOKENS
        or not is_filled(cache)
        or any(kwargs.get(name) for name in _ASKS_FOR_MORE)
        or any(getattr(config, name, False) for name in _ASKS_FOR_MORE)
        or not (config.return_dict if (kind := kwargs.get("return_dict")) is None else kind)
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(ids_B1.device.type)
        or model.training
    ):
        return None
    tensors, values = {}, []
    for name, value in kwargs.items():
        if name in CACHE_NAMES:
            continue
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, dict) and all(isinstance(v, torch.Tensor) for v in value.values()):
            tensors |= {f"{name}.{part}": tensor for part, tensor in value.items()}
        elif value is None or isinstance(value, (bool, int)):
            values.append((name, value))
        else:
            return None
    kinds = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
    key = CallKey(tuple(values), kinds, torch.is_inference_mode_enabled())
    return StepCall(key, tensors, cache)


def _nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments by name; those whose name has two parts are in a dictionary of the first."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        outer, _, inner = name.partition(".")
        if inner:
            found.setdefault(outer, {})[inner] = tensor
        else:
            found[name] = tensor
    return found


_OF_MODULES = frozenset(vars(torch.nn.Module()))


class Structure:
    """The modules of a model, their parameters and their settings."""

    def __init__(self, model: torch.nn.Module) -> None:
        every = [*model.modules()]
        members = [part for m in every for part in (m._parameters, m._buffers, m._modules)]
        # those of the model itself are called around a recording
        hooks = [part for m in every[1:] for part in (m._forward_hooks, m._forward_pre_hooks)]
        self._members = [part for part in members if part]
        self._empty = [part for part in members if not part] + hooks
        self._model: Any = model
        self._attention = attention_name(self._model)
        # held, so that nothing else gets their names
        self._held = [*self._now()]
        self._weights = [p for p in self._held if type(p) is torch.nn.Parameter]
        self._addresses = [*map(torch.Tensor.data_ptr, self._weights)]
        # numbers that are part of a recording: how many are chosen, the scale of an adapter
        inner = [m for m in every[1:] if not type(m).__module__.startswith("torch.nn.")]
        own = [(vars(m), name) for m in inner for name in vars(m) if name not in _OF_MODULES]
        parts = [owner[name] for owner, name in own]
        own += [(part, name) for part in parts if type(part) is dict for name in part]
        self._owners = [owner for owner, _ in own]
        self._settings = [name for _, name in own]
        self._values = [*map(dict.get, self._owners, self._settings)]
        self._sized = [
            *self._members,
            *map(vars, every[1:]),
            *(part for part in parts if isinstance(part, (dict, list))),
        ]
        self._sizes = [*map(len, self._sized)]

    def holds(self) -> bool:
        """Whether all are the same, where they were, and no module is observed."""
        return (
            not any(self._empty)
            and not torch.nn.modules.module._has_any_global_hook()
            and [*map(len, self._sized)] == self._sizes
            and all(map(operator.is_, self._now(), self._held))
            and [*map(torch.Tensor.data_ptr, self._weights)] == self._addresses
            and attention_name(self._model) == self._attention
            and all(map(operator.is_, map(dict.get, self._owners, self._settings), self._values))
        )

    def _now(self) -> itertools.chain[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._members))


def memory_of(cache: Any) -> list[int]:
    """Where a static cache has its tensors: beams, for one, move them."""
    return [
        tensor.data_ptr()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values, layer.cumulative_length)
    ]


def is_own(code: Any) -> bool:
    """Whether code is of this package or of transformers, which do not change a model while it
    generates."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in ("moe_runtime", "transformers")


_MOST_OTHERS = 16


def recording_of(store: DeviceStore[Any], cache: Any, caches: StaticCaches) -> Any:
    """The recording of a cache, or None; drops those whose cache is gone or not needed."""
    first: RecordedStep | None = store.recorded
    if first is None or (not first.others and first.cache is cache):
        return first
    there = [*first.others.values(), first]
    left = [one for one in there if one.cache is not None and not one.keeps_other(cache, caches)]
    if len(left) < len(there):
        store.recorded = None
        for recorded in left:
            put_first(store, recorded)
    for recorded in left:
        if recorded.cache is cache:
            put_first(store, recorded)
            return recorded
    return None


def put_first(store: DeviceStore[Any], recorded: RecordedStep) -> None:
    """Makes a recording the store's; the one before becomes one of its others."""
    before: RecordedStep | None = store.recorded
    if before is recorded:
        return
    store.recorded, recorded.others = recorded, WeakKeyDictionary()
    if before is None:
        return
    recorded.others, before.others = before.others, recorded.others
    recorded.others.pop(recorded.cache, None)
    if (cache := before.cache) is not None:
        recorded.others[cache] = before
    while len(recorded.others) > _MOST_OTHERS:
        del recorded.others[next(iter(recorded.others))]
