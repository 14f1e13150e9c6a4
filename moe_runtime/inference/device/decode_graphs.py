"""Decode steps on a GPU as CUDA graphs, recorded once and replayed.

A step of one token has about fifty launches per layer; the host needs longer for them than the GPU.
With a static cache every step is the same work on the same memory.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import operator
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.cuda import CUDAGraph

from moe_runtime.checkpoints.transformers_private import (
    CACHE_NAMES,
    attention_name,
    cache_name,
)
from moe_runtime.config import PrefetchMode
from moe_runtime.inference.budget import bytes_for_recordings, most_recorded_bytes, recorded_bytes
from moe_runtime.inference.device.device_experts import DeviceExperts, Routed
from moe_runtime.inference.device.recorded_layers import CrossedLayer, RecordedLayer
from moe_runtime.inference.device.static_caches import StaticCaches, is_filled, tensors_of
from moe_runtime.inference.kv_cache import cache_of
from moe_runtime.kernels.expert_fetch import fetch_experts
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS
from moe_runtime.memory.device.cuda_device import CudaRecorder
from moe_runtime.memory.device.device_store import DeviceStore, Residents
from moe_runtime.memory.device.host_tables import (
    HostTables,
    open_host_tables,
    read_rest,
    tiers_have_room,
)
from moe_runtime.types import ExpertKey

Forward = Callable[..., Any]


class RecordedStep:
    """One recorded step of a model, for replays with other tokens.

    Attributes:
        key: of the calls that it replaces.
        others: further recordings by cache. A server has one per number of sequences.
        num_bytes: estimated memory of the device that it keeps.
        most_bytes: all recordings may keep so much.
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
        """Records a call without computing it; ``keeps_cache`` keeps its cache alive. Raises
        RuntimeError: a graph cannot hold an operation of the model."""
        store = modules[0].store
        assert isinstance(store, DeviceStore)
        self.key, self.others = call.key, WeakKeyDictionary[Any, Any]()
        self._store = store
        self._stores: Any = [*dict.fromkeys(module.store for module in modules)]
        self._cache = weakref.ref(call.cache)
        self._kept = call.cache if keeps_cache else None
        self._inputs = {name: tensor.clone() for name, tensor in call.tensors.items()}
        prefetcher = model.moe.prefetcher
        signature, num_tokens = model.moe.facts.signature, len(call.tensors["input_ids"])
        self._experts = experts_of_step(
            store,
            modules,
            signature.top_k,
            num_tokens,
            reads_ahead=prefetcher is not None and prefetcher.mode is not PrefetchMode.OBSERVE,
        )
        given = {**call.arguments(self._inputs), cache_name(forward): call.cache}
        with store.device.record() as recorder:
            for module in modules:
                module.recording = partial(self._experts.record, recorder=recorder)
            try:
                output = forward(**given)
                self._experts.end()
                self._last = recorder.end()
            finally:
                for module in modules:
                    module.recording = None
        kind = model.config, model.dtype, signature
        in_parts = isinstance(self._experts, ExpertsInParts)
        self.num_bytes = recorded_bytes(*kind, num_tokens, in_parts=in_parts)
        self.most_bytes = most_recorded_bytes(*kind)
        for each in self._stores:
            each.recorded_reserve_bytes = bytes_for_recordings(*kind)
            each.recorded_bytes = each.device.recorded_bytes()
        self._structure = Structure(model)
        self._memory = memory_of(call.cache)
        self._kind = type(output)
        # the recording must not keep the cache alive
        self._has_cache = [name for name, value in output.items() if value is call.cache]
        self._output = {n: value for n, value in output.items() if n not in self._has_cache}
        if not all(isinstance(v, (torch.Tensor, type(None))) for v in self._output.values()):
            raise RuntimeError(f"{self._kind.__name__} holds more than tensors")

    @property
    def is_one_graph(self) -> bool:
        """Whether a replay never waits for the host."""
        return self._experts.is_one_graph

    def matches(self, call: StepCall, *, looks: bool) -> bool:
        """Whether the call differs only in its tokens; ``looks`` also compares model and cache."""
        if call.key != self.key or self.cache is not call.cache:
            return False
        return not looks or (memory_of(call.cache) == self._memory and self._structure.holds())

    def keeps_other(self, cache: Any, caches: StaticCaches) -> bool:
        """Whether only this recording keeps another cache alive."""
        return self._kept not in (None, cache) and self._kept not in caches.in_use

    @property
    def cache(self) -> Any:
        return self._cache()

    def replay(self, call: StepCall) -> Any:
        """The output of the step for the tokens of a call, in new memory. None, with nothing
        computed, if experts are not where the recording needs them."""
        with contextlib.ExitStack() as stack:
            for store in self._stores:
                stack.enter_context(store.device.replaying())
            _copy([*self._inputs.values()], [call.tensors[name] for name in self._inputs])
            is_queued = self._experts.replay(self._last)
            if self._experts.is_over:
                self._store.recorded = None
            if not is_queued:
                return None
            self._store.count_step(self._experts.way)
            there = {name: value for name, value in self._output.items() if value is not None}
            found = {name: torch.empty_like(value) for name, value in there.items()}
            _copy([*found.values()], [*there.values()])
        empty = dict.fromkeys(self._output.keys() - there.keys())
        return self._kind(**found, **empty, **dict.fromkeys(self._has_cache, call.cache))


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies tensors by a kernel; the copy engine is slower between kernels."""
    torch._foreach_copy_(into, values, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


class DecodeGraphs:
    """A model's ``forward`` that replays repeated steps.

    The first step of a kind compiles kernels; the second is recorded. Prompts, other caches, more
    than 16 tokens, layers without a stack and observed models run as usual.

    The recorded cache of `generate` is kept until a call with another cache. Up to sixteen
    recordings of other caches live as long as their caches.
    """

    def __init__(self, model: Any, modules: Sequence[DeviceExperts], caches: StaticCaches) -> None:
        self._model, self._modules = model, modules
        self._forward: Forward = model.forward
        self.__wrapped__ = self._forward  # for its signature
        self._names = [*inspect.signature(self._forward).parameters]
        self._seen: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the last call by cache
        self._refused, self._is_recording = 0.0, False  # calls without recording
        self._caches = caches
        self._trusted: RecordedStep | None = None
        self._was_compared = False  # the last call compared the recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(self._names, args, strict=False))
        for module in self._modules if self._is_recording else ():  # an interrupted recording
            module.recording = None
        self._is_recording = False
        store = self.store
        recorded = recording_of(store, cache_of(kwargs), self._caches)
        is_trusted = recorded is self._trusted
        self._trusted, self._was_compared = None, False
        call = None if self._refused else read_step(self._model, kwargs)
        self._refused = max(0.0, self._refused - 1)
        if call is None:
            return self._forward(**kwargs)
        if recorded is not None and not recorded.matches(call, looks=not is_trusted):
            store.recorded = recorded = None
        if recorded is None:
            is_repeated = self._seen.get(call.cache) == call.key
            if not is_repeated or not all(m.has_stack(self._model.dtype) for m in self._modules):
                found = self._forward(**kwargs)
                self._seen[call.cache] = call.key
                return found
            try:
                self._is_recording = True  # until the recording is complete
                recorded = RecordedStep(
                    self._model,
                    self._forward,
                    call,
                    self._modules,
                    keeps_cache=self._caches.is_own(call.cache),
                )
                self._is_recording = False
            except RuntimeError as error:
                # memory may be free later; an unsupported operation stays unsupported
                self._refused = _STEPS_WITHOUT if _is_lack_of_memory(error) else math.inf
                store.recorded = None
                warnings.warn(
                    f"decode steps of this model are not recorded as CUDA graphs: {error}",
                    stacklevel=2,
                )
                return self._forward(**kwargs)
            put_first(store, recorded)
        else:
            self._was_compared = True
        found = recorded.replay(call)
        return self._forward(**kwargs) if found is None else found

    def replayed_for(self, cache: Any) -> RecordedStep | None:
        """The recording that the last call replayed, if it is of this cache; None after a new
        recording, since an observed model is recorded at every call."""
        recorded = self.store.recorded
        is_ours = self._was_compared and recorded is not None and recorded.cache is cache
        return recorded if is_ours else None

    def trust(self, recorded: RecordedStep | None) -> None:
        """Skips the comparison of the model in the next call of this recording. For callers that
        ran no foreign code since the last call, hooks of the model included."""
        hooks = *self._model._forward_pre_hooks.values(), *self._model._forward_hooks.values()
        if all(map(is_own, hooks)):
            self._trusted = recorded

    @property
    def is_one_graph(self) -> bool:
        """Whether the next step probably never waits for the host."""
        return self.store.recorded is not None and self.store.recorded.is_one_graph

    @property
    def store(self) -> DeviceStore[Any]:
        store = self._modules[0].store
        assert isinstance(store, DeviceStore)
        return store


_STEPS_WITHOUT = 256
"""Calls until recording is tried again after a lack of memory."""


def _is_lack_of_memory(error: RuntimeError) -> bool:
    """Whether memory was lacking: torch, CUDA, Triton and cuBLAS have errors of their own."""
    text = str(error).lower()
    names = "out of memory", "memoryallocation", "alloc_failed"
    return isinstance(error, torch.OutOfMemoryError) or any(name in text for name in names)


_ASKS_FOR_MORE = ("labels", "output_attentions", "output_hidden_states", "output_router_logits")


class CallKey(NamedTuple):
    """The common part of calls of one recording."""

    values: tuple[tuple[str, Any], ...]
    tensors: tuple[Any, ...]
    is_inference: bool


class StepCall(NamedTuple):
    """A call of a model with a static cache; ``tensors`` are the other tensors by name."""

    key: CallKey
    tensors: dict[str, torch.Tensor]
    cache: Any

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The model's arguments with these tensors, without the cache. A name of two parts is an
        entry of a dictionary."""
        found: dict[str, Any] = {}
        for name, value in (*self.key.values, *tensors.items()):
            outer, _, inner = name.partition(".")
            if inner:
                found.setdefault(outer, {})[inner] = value
            else:
                found[name] = value
        return found


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
        elif isinstance(value, dict) and all(
            part is None or isinstance(part, torch.Tensor) for part in value.values()
        ):
            parts = {f"{name}.{inner}": part for inner, part in value.items()}
            tensors |= {each: part for each, part in parts.items() if part is not None}
            values += [(each, None) for each, part in parts.items() if part is None]
        elif value is None or isinstance(value, (bool, int)):
            values.append((name, value))
        else:
            return None
    kinds = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
    key = CallKey(tuple(values), kinds, torch.is_inference_mode_enabled())
    return StepCall(key, tensors, cache)


_OF_MODULES = frozenset(vars(torch.nn.Module()))


class Structure:
    """The modules of a model, their parameters and their settings."""

    def __init__(self, model: torch.nn.Module) -> None:
        every = [*model.modules()]
        members = [part for m in every for part in (m._parameters, m._buffers, m._modules)]
        # hooks of the model itself run around a recording
        hooks = [part for m in every[1:] for part in (m._forward_hooks, m._forward_pre_hooks)]
        self._members = [part for part in members if part]
        self._empty = [part for part in members if not part] + hooks
        self._model: Any = model
        self._attention = attention_name(self._model)
        # holding them keeps their ids unique
        self._held = [*self._now()]
        self._weights = [p for p in self._held if type(p) is torch.nn.Parameter]
        self._addresses = [*map(torch.Tensor.data_ptr, self._weights)]
        # settings are part of a recording, such as top-k or an adapter's scale
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
        """Whether all modules, parameters and settings are the same, and none is observed."""
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
    """The addresses of a static cache's tensors; beam search, for one, changes them."""
    return [tensor.data_ptr() for tensor in tensors_of(cache)]


def is_own(code: Any) -> bool:
    """Whether code is of this package or transformers; neither changes a model during
    generation."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in ("moe_runtime", "transformers")


_MOST_OTHERS = 16


def recording_of(store: DeviceStore[Any], cache: Any, caches: StaticCaches) -> Any:
    """The recording of a cache, or None. Drops recordings of freed or unneeded caches."""
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
    """Makes a recording the store's current one; the previous one joins its others."""
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
    while len(recorded.others) > _MOST_OTHERS or (
        recorded.others and _kept_bytes(recorded) > recorded.most_bytes
    ):
        del recorded.others[next(iter(recorded.others))]  # the next recording takes its memory


def _kept_bytes(recorded: RecordedStep) -> int:
    return sum(each.num_bytes for each in (recorded, *recorded.others.values()))


MOST_REFUSED = 8
"""Steps in a row with experts in neither memory until the step is recorded in parts. Also the steps
in parts between two checks whether all experts are in memory."""


def experts_of_step(
    store: DeviceStore[Any],
    modules: Sequence[DeviceExperts],
    num_choices: int,
    num_tokens: int,
    *,
    reads_ahead: bool,
) -> ResidentExperts | FetchedExperts | ExpertsInParts:
    """The way to record a step now."""
    # makes the stacks outside the recording
    stores: Any = {module.layer: module.store for module in modules}
    found = {n: each.with_residents(n, lambda r: r.stack) for n, each in stores.items()}
    if any(each is not store for each in stores.values()):
        return ExpertsInParts(store, modules, num_choices, reads_ahead=False)
    if all(map(_is_quiet, modules)) and all(each.are_all for each in found.values()):
        return ResidentExperts(store, modules, found)
    tables = _tables(store, modules, num_choices)
    if tables is not None:
        _load_kernels(tables, num_tokens, num_choices)
        if tables.is_slow is None:
            tables.measure(partial(_fetch, tables), num_tokens, num_choices)
        if not tables.is_slow:
            return FetchedExperts(store, modules, tables, reads_ahead=reads_ahead)
    return ExpertsInParts(store, modules, num_choices, reads_ahead=reads_ahead)


def _load_kernels(tables: HostTables, num_tokens: int, num_choices: int) -> None:
    """Compiles and loads the kernels that fetch experts, before the recording."""
    nobody_TK = torch.full((num_tokens, num_choices), -1, device=tables.slots_E.device)
    kinds = {(p.tables.sources_EP.shape, p.word_bytes): n for n, p in tables.layers.items()}
    for layer in kinds.values():
        _fetch(tables, layer, nobody_TK)


def _fetch(tables: HostTables, layer: int, ids_TK: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Queues a fetch of chosen experts; returns the slots of the layer's experts after it."""
    places = tables.layers[layer]
    slots_E = tables.slots_E[: len(places.keys)]
    fetch_experts(
        ids_TK, places.tables, tables.slots, slots_E,
        first=first, word_bytes=places.word_bytes, impl="triton",
    )  # fmt: skip
    return slots_E


def _tables(
    store: DeviceStore[Any], modules: Sequence[DeviceExperts], num_choices: int
) -> HostTables | None:
    """The places of all experts. None if a listener needs each layer, experts are missing, or the
    link is slow."""
    if not all(map(_is_quiet, modules)) or any(m.misses is not None for m in modules):
        return None
    if store.host_tables is None:
        open_host_tables(store, _keys_of(modules), num_choices)
    tables: HostTables | None = store.host_tables
    if tables is None or tables.is_slow or tables.launch(lambda: None) is None:
        return None
    return tables


def _keys_of(modules: Sequence[DeviceExperts]) -> dict[int, list[ExpertKey]]:
    return {m.layer: m.keys_of(range(m.num_experts)) for m in modules}


def _all_keys(modules: Sequence[DeviceExperts]) -> list[ExpertKey]:
    return [*itertools.chain(*_keys_of(modules).values())]


def _is_quiet(experts: DeviceExperts) -> bool:
    """Whether no listener needs a layer's routing within a step."""
    listens = experts.listeners.routing_listeners or experts.listeners.demand_listeners
    return not listens and experts.store is not None and experts.store.listener is None


class _OneGraph(ABC):
    """A step that does not wait for the host; the host gets the choices afterwards."""

    is_over = False  # the next step must be recorded again
    is_one_graph = True  # the next step probably does not wait for the host

    def __init__(self, store: DeviceStore[Any], modules: Sequence[DeviceExperts]) -> None:
        self._store, self._modules = store, modules
        self._ids: list[torch.Tensor] = []
        self._ids_LTK: torch.Tensor | None = None

    def end(self) -> None:
        self._ids_LTK = torch.stack(self._ids) if self._ids else None

    def replay(self, last: CUDAGraph) -> bool:
        if not all(map(_is_quiet, self._modules)):
            self.is_over = True
            return False
        count = self._launch(last)
        if count is not None and self._ids_LTK is not None:
            ids_LTK = self._ids_LTK.to(torch.int32, copy=True)
            ids_LTK, copied = self._store.device.download(ids_LTK, is_kept=True)
            self._store.count_later(copied, partial(count, ids_LTK))
        return count is not None

    @abstractmethod
    def _launch(self, last: CUDAGraph) -> Callable[[torch.Tensor], Sequence[ExpertKey]] | None:
        """Queues the step; None if that is not possible.

        Otherwise a function for ``DeviceStore.count_later`` that takes the choices ``[L, T, K]``.
        It must not hold this recording, whose memory may be freed before.
        """


class ResidentExperts(_OneGraph):
    """A step with all experts in slots of the device."""

    way = "resident_steps"

    def __init__(
        self,
        store: DeviceStore[Any],
        modules: Sequence[DeviceExperts],
        residents: Mapping[int, Residents],
    ) -> None:
        super().__init__(store, modules)
        self._residents = residents

    def record(
        self, experts: DeviceExperts, routed: Routed, recorder: CudaRecorder
    ) -> torch.Tensor:
        products = experts.products(routed)
        products.add(self._residents[experts.layer].stack)
        self._ids.append(routed.ids_TK)
        return products.sums()

    def _launch(self, last: CUDAGraph) -> Callable[[torch.Tensor], Sequence[ExpertKey]] | None:
        self.is_over = not self._store.with_same_residents(self._residents, last.replay)
        return None if self.is_over else partial(_used, self._modules)


class FetchedExperts(_OneGraph):
    """A step in which the device fetches chosen experts from host memory."""

    way = "fetched_steps"

    def __init__(
        self,
        store: DeviceStore[Any],
        modules: Sequence[DeviceExperts],
        tables: HostTables,
        *,
        reads_ahead: bool,
    ) -> None:
        super().__init__(store, modules)
        self._tables, self._reads_ahead = tables, reads_ahead
        self._num_refused = 0

    def record(
        self, experts: DeviceExperts, routed: Routed, recorder: CudaRecorder
    ) -> torch.Tensor:
        assert self._store.stacks is not None, "the layer has a stack"
        layer, products = experts.layer, experts.products(routed)
        num_landing = len(self._tables.layers[layer].tables.landing_L)
        for first in range(0, routed.ids_TK.numel(), num_landing):
            slots_E = _fetch(self._tables, layer, routed.ids_TK, first)
            products.add(self._store.stacks.stack_over(layer, slots_E))
        self._ids.append(routed.ids_TK)
        return products.sums()

    def _launch(self, last: CUDAGraph) -> Callable[[torch.Tensor], Sequence[ExpertKey]] | None:
        found = self._tables.launch(last.replay)
        self._num_refused = 0 if found is not None else self._num_refused + 1
        self.is_one_graph = found is not None
        self.is_over = self._num_refused >= MOST_REFUSED
        if found is None and self._reads_ahead:
            read_rest(self._store, _all_keys(self._modules))
        return (
            None if found is None else partial(_count_fetched, self._tables, self._modules, found)
        )


class ExpertsInParts:
    """A step in several graphs; the host queues a layer's misses between two of them.

    Over several GPUs it stays so, and waits for no layer whose experts are all resident.
    """

    is_over = is_one_graph = False
    way = "cut_steps"

    def __init__(
        self,
        store: DeviceStore[Any],
        modules: Sequence[DeviceExperts],
        num_choices: int,
        *,
        reads_ahead: bool,
    ) -> None:
        self._store, self._modules, self._num_choices = store, modules, num_choices
        self._reads_ahead = reads_ahead and tiers_have_room(store, _keys_of(modules), num_choices)
        self._unread: list[ExpertKey] = []
        self._layers: list[RecordedLayer] = []
        self._num_replays = 0
        self._tables = dict[int, torch.Tensor]()
        for module in modules:
            assert isinstance(module.store, DeviceStore)
            upload = module.store.device.upload
            self._tables[module.layer] = upload(np.full((2, module.num_experts), -1, np.int32))
        self._may_be_one_graph = all(module.store is store for module in modules)

    def record(
        self, experts: DeviceExperts, routed: Routed, recorder: CudaRecorder
    ) -> torch.Tensor:
        tables_2E = self._tables[experts.layer]
        kind = RecordedLayer if experts.store is self._store else CrossedLayer
        self._layers.append(kind(experts, routed, recorder, tables_2E))
        return self._layers[-1].sums()

    def end(self) -> None:
        for layer, following in itertools.pairwise(self._layers):
            layer.following = following

    def replay(self, last: CUDAGraph) -> bool:
        self._layers[0].prepare()
        are_all = [layer.replay() for layer in self._layers]
        last.replay()
        if not self._may_be_one_graph:
            self.is_one_graph = all(are_all) and all(map(_is_quiet, self._modules))
            return True
        if all(are_all) and all(map(_is_quiet, self._modules)):
            self.is_over = all(each.are_all for each in self._found())
        elif self._num_replays % MOST_REFUSED == MOST_REFUSED - 1:
            self.is_over = _tables(self._store, self._modules, self._num_choices) is not None
        elif self._num_replays % MOST_REFUSED == 0 and self._reads_ahead:
            self._unread = _all_keys(self._modules)
        if self._unread:
            read_rest(self._store, self._unread)
        self._num_replays += 1
        return True

    def _found(self) -> list[Residents]:
        return [self._store.with_residents(m.layer, lambda _: None) for m in self._modules]


def _count_fetched(
    tables: HostTables,
    modules: Sequence[DeviceExperts],
    listed: Mapping[int, Residents],
    ids_LTK: torch.Tensor,
) -> Sequence[ExpertKey]:
    ids: dict[int, list[int]] = {}
    for key in _used(modules, ids_LTK):
        ids.setdefault(key.layer, []).append(key.expert)
    tables.count(listed, ids)
    return ()


def _used(modules: Sequence[DeviceExperts], ids_LTK: torch.Tensor) -> list[ExpertKey]:
    """The experts of a step. Does not hold its recording, whose memory may be freed before."""
    if ids_LTK.shape[1] == 1:  # rows are choices
        layers = zip(modules, ids_LTK.tolist(), strict=True)
        return [key for m, (ids,) in layers for key in m.keys_of(dict.fromkeys(ids))]
    layers = zip(modules, ids_LTK, strict=True)
    return [key for m, ids_TK in layers for key in m.keys_of(m.rows_of(ids_TK))]
