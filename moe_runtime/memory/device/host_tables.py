"""Misses that kernels read from host memory, without the host's help.

If every expert is in a slot of the device or in locked host memory, kernels find each in tables on
the device and read absent ones over the link. The host learns the choices afterwards. It copies an
expert to the device if its recent uses clearly exceed those of its victim (Einziger et al.,
"TinyLFU", ACM TOS 2017).

Shape suffixes: L layers, E experts, P parts of an expert, T tokens, K choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.errors import CLOSED, MoERuntimeError
from moe_runtime.kernels.expert_fetch import FetchTables
from moe_runtime.memory.device.cuda_device import Event
from moe_runtime.memory.device.device_layout import CopyPart, parts_alike
from moe_runtime.memory.device.device_store import DeviceStore, Residents
from moe_runtime.memory.device.recent_uses import RecentUses
from moe_runtime.memory.reads import Priority
from moe_runtime.memory.store import is_resident
from moe_runtime.types import ExpertKey

MARGIN = 2.0
"""An expert is copied if it has so many more recent uses than its victim; from replayed routes."""
MOST_OF_COPIES = 2.0
"""Longest fetch, in times of a copy: beyond it, cut steps are faster."""
_TIMES = 3
"""Measurements; the shortest counts."""
LANDING_SHARE = 4
"""Fetched experts may have one slot in so many."""


class LayerPlaces(NamedTuple):
    """The places of a layer's experts.

    Attributes:
        tables: on the device.
        offsets_EP: offsets of parts in a slot of the host.
        word_bytes: as in ``fetch_experts``.
        expert_bytes: bytes of one expert over the link.
    """

    keys: Sequence[ExpertKey]
    tables: FetchTables
    offsets_EP: npt.NDArray[np.int64]
    word_bytes: int
    expert_bytes: int


class HostTables:
    """Tables of the experts on a device and in the host memory below it.

    Attributes:
        is_slow: kernels read host memory clearly slower than copies do; None before ``measure``.
        slots_E: the slots of a layer's experts while kernels compute it.
        slots: ``[S, B]``, the memory of all slots.
    """

    def __init__(
        self, store: DeviceStore[Any], layers: Mapping[int, LayerPlaces], slots_E: torch.Tensor
    ) -> None:
        self.layers, self.slots_E = layers, slots_E
        self.is_slow: bool | None = None
        self.slots = store._slab.bytes.view(-1, store._slab.slot_bytes)
        self._store, self._lower = store, store.lower
        self._listed: dict[int, Residents] = {}
        self._stream: int | None = None
        self._kernels: Sequence[Event] = ()
        self._uses = RecentUses()

    def launch(self, queue: Callable[[], object]) -> Mapping[int, Residents] | None:
        """Queues work on all experts of the layers, if each can be read; ``queue`` must not wait.

        Returns the residents by layer; None if nothing was queued. Raises MoERuntimeError: a copy
        failed that earlier work was queued after, or the model was closed.
        """
        store, lower = self._store, self._lower
        store.fetcher.raise_failure()
        stream = store.device.compute_here()
        with store._monitor, lower._monitor:
            if store.is_closed:
                raise MoERuntimeError(CLOSED)
            if stream != self._stream:  # all streams share tables and landing slots
                for event in self._kernels:
                    event.synchronize()
                self._stream = stream
            if not all(self._list(layer, stream) for layer in self.layers):
                return None
            store._monitor.may_be_interrupted = lower._monitor.may_be_interrupted = True
            try:
                queue()
            finally:
                self._kernels = store.device.vacate()
                lower._fetcher.kernels = self._kernels
            return dict(self._listed)

    def measure(
        self, fetch: Callable[[int, torch.Tensor], object], num_tokens: int, num_choices: int
    ) -> None:
        """Measures ``is_slow``. ``fetch`` queues a fetch of a layer's experts from host memory, for
        choices ``[T, K]``."""
        if not self._listed:
            return
        layer, found = next(iter(self._listed.items()))
        experts = np.flatnonzero(found.slots < 0)[: len(self.layers[layer].tables.landing_L)]
        experts, waits = experts[: num_tokens * num_choices], list[Callable[[], float]]()
        if not len(experts):
            return
        ids_TK = np.full((num_tokens, num_choices), -1)
        ids_TK.flat[: len(experts)] = experts
        ids_TK = self._store.device.upload(ids_TK)

        def queue() -> None:
            for _ in range(_TIMES):
                waits.append(self._store.device.time(lambda: fetch(layer, ids_TK)))

        if self.launch(queue) is None:
            return
        copy_s = self._store.fetcher.speed.seconds_per_byte * self.layers[layer].expert_bytes
        fetch_s = min(wait() for wait in waits) / len(experts)
        self.is_slow = copy_s > 0 and fetch_s > MOST_OF_COPIES * copy_s
        if self.is_slow:
            self._give_back()

    def _give_back(self) -> None:
        """Frees the slots of fetched experts; nothing that writes there may be queued."""
        store = self._store
        landing = next(iter(self.layers.values())).tables.landing_L.tolist()
        with store._monitor:
            store._closed.difference_update(landing)
            store._free += landing
            store._policy.divide(sum(store._policy.slots_by_layer) + len(landing))

    def count(self, listed: Mapping[int, Residents], ids: Mapping[int, Sequence[int]]) -> None:
        """Counts the choices of a step, and copies experts with many uses to the device.

        ``listed`` are the residents during the step, ``ids`` the chosen experts by layer, most
        wanted last.
        """
        store = self._store
        with store._monitor:
            for layer, chosen in ids.items():
                places = self.layers[layer]
                self._uses.count(layer, chosen)
                for expert in chosen:
                    if expert in listed[layer].experts:
                        store._count_use(places.keys[expert])
                        continue
                    store._counters.misses += 1
                    store._counters.demand_bytes += places.expert_bytes
                    if self._uses.of(places.keys[expert]) > MARGIN:
                        self._admit(places.keys[expert])

    # The following is called with the lock held.

    def _list(self, layer: int, stream: int) -> bool:
        """Updates the tables of a layer; False if an expert is in neither memory."""
        store, lower, places = self._store, self._lower, self.layers[layer]
        found = store._residents.get(layer)
        if found is None or found.stream != stream:
            found = store._residents[layer] = store._find_residents(layer, stream)
        if found is self._listed.get(layer) and layer not in lower.moved_layers:
            return True
        entries = [lower._entries.get(key) for key in places.keys]
        slots_E = np.array([e.slot if e and is_resident(e) else -1 for e in entries], np.int64)
        if ((slots_E < 0) & (found.slots < 0)).any():
            return False
        slab = lower._slab
        sources_EP = slab.bytes.data_ptr() + slots_E[:, None] * slab.slot_bytes + places.offsets_EP
        sources_EP[slots_E < 0] = 0
        store.device.upload(found.slots, places.tables.residents_E)
        store.device.upload(sources_EP, places.tables.sources_EP)
        self._listed[layer] = found
        lower.moved_layers.discard(layer)
        return True

    def _admit(self, key: ExpertKey) -> None:
        """Begins to copy an expert, unless its victim has about as many uses."""
        store, lower = self._store, self._lower
        if key in store._entries or store.is_closed:
            return
        with lower._monitor:
            if not store._free:
                victim = next(filter(store._is_idle, store._unadmitted), None)
                if victim is None:
                    victim = store._victim(key)
                    if victim is None:
                        return
                    if self._uses.of(key) <= self._uses.of(victim) + MARGIN:
                        return
                if not lower.has(victim):
                    if lower.has_spare(victim.layer):  # it must always be in one of both memories
                        store.return_to_host(victim)
                    return
                store._counters.evictions += 1
                store._drop(victim)
            store._start(key, store._free.pop(), keep=True, priority=Priority.READAHEAD)


def open_host_tables(
    store: DeviceStore[Any], layers: Mapping[int, Sequence[ExpertKey]], num_choices: int
) -> HostTables | None:
    """Makes tables for the layers of a model, with ``num_choices`` slots for fetched experts.

    Returns None if the device cannot read host memory, a policy decides after each use, there are
    too few slots, an expert is in neither memory, or experts of a layer fill different bytes.
    """
    lower = store.lower
    if (
        store.decides_later
        or lower.decides_later
        or not tiers_have_room(store, layers, num_choices)
        or not store.device.reads_host(lower._slab.bytes)
    ):
        return None
    slot, find = store._slab.slot(0), store.fetcher.moves_of
    with store._monitor, lower._monitor:  # delivers ended reads
        if not all(store.has(key) or lower.has(key) for keys in layers.values() for key in keys):
            return None
        moves = dict[int, Sequence[Sequence[CopyPart]]]()
        for layer, keys in layers.items():
            alike = parts_alike([find(key, slot) for key in keys])
            if alike is None:
                return None
            moves[layer] = alike
        givers = sorted(layers, key=store.slots_of)[-num_choices:] * num_choices
        taken = [store._take_slot(layers[n][0], keep=True) for n in givers[:num_choices]]
        landing = [slot for slot in taken if slot is not None]
        if len(landing) < num_choices:
            store._free += landing
            return None
        for event in store.fetcher.vacate(*map(store._slab.slot, landing)):
            event.synchronize()
        places = {n: _places(store, keys, moves[n], landing) for n, keys in layers.items()}
        slots_E = store.device.upload(np.full(max(map(len, layers.values())), -1, np.int32))
        tables = HostTables(store, places, slots_E)
        store._closed.update(landing)
        store.host_tables = tables
        store._policy.divide(sum(store._policy.slots_by_layer) - num_choices)
    return tables


def has_room(
    num_slots: int, num_below: int, *, num_experts: int, num_layers: int, num_choices: int
) -> bool:
    """Whether the two memories have slots for all experts, but the device alone has not. In every
    layer one expert may be in both, while two are exchanged."""
    is_enough = num_experts + num_layers <= num_slots - num_choices + num_below
    return num_slots < num_experts and is_enough and num_choices <= num_slots // LANDING_SHARE


def tiers_have_room(
    store: DeviceStore[Any], layers: Mapping[int, Sequence[ExpertKey]], num_choices: int
) -> bool:
    return has_room(
        store._slab.num_slots, store.lower.num_slots,
        num_experts=sum(map(len, layers.values())), num_layers=len(layers), num_choices=num_choices,
    )  # fmt: skip


def read_rest(store: DeviceStore[Any], keys: list[ExpertKey]) -> None:
    """Begins to read experts that are in neither memory, without evicting another's only copy.
    Removes keys that are resident or under way from ``keys``."""
    lower = store.lower
    with lower._monitor:
        keys[:] = [key for key in keys if not (store.has(key) or lower.read_spare(key))]


def _places(
    store: DeviceStore[Any],
    keys: Sequence[ExpertKey],
    moves: Sequence[Sequence[CopyPart]],
    landing: Sequence[int],
) -> LayerPlaces:
    offsets_EP = np.array([[move.source for move in each] for each in moves], np.int64)
    parts_2P = np.array([[m.place, m.num_bytes] for m in moves[0]], np.int64).T
    upload = store.device.upload
    tables = FetchTables(
        upload(np.full(len(keys), -1, np.int32)),
        upload(np.zeros_like(offsets_EP)),
        upload(np.ascontiguousarray(parts_2P)),
        upload(np.array(landing, np.int32)),
    )
    lower = store.lower._slab
    numbers = lower.bytes.data_ptr(), lower.slot_bytes, store.slot_bytes
    word_bytes = math.gcd(8, *numbers, *offsets_EP.flatten().tolist(), *parts_2P.flatten().tolist())
    return LayerPlaces(keys, tables, offsets_EP, word_bytes, int(parts_2P[1].sum()))
