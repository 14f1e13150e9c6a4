"""How the experts of a recorded step are computed when it is replayed.

Where all are resident, or lie in host memory that kernels read, it is one graph. Otherwise it is
recorded in parts: one ends with the residents of a layer, and tells the host of its choices; the
next begins with the sums. Misses are queued in between, and join the same sums: the same bits.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from moe_runtime.inference.device.device_experts import DeviceExperts, Found, Routed
from moe_runtime.kernels.expert_fetch import fetch_experts
from moe_runtime.memory.device.device import Graph, GraphRecorder
from moe_runtime.memory.device.device_store import DeviceStore, Residents
from moe_runtime.memory.device.host_tables import (
    HostTables,
    open_host_tables,
    read_rest,
    tiers_have_room,
)
from moe_runtime.types import ExpertKey

MOST_REFUSED = 8
"""Steps in a row that find experts in neither memory, before they are recorded in parts; and steps
in parts between two looks whether all are there."""


class StepExperts(ABC):
    """The experts of one step.

    Attributes:
        is_over: whether the next step is to be recorded anew.
        is_one_graph: whether the next step probably does not wait for the host.
    """

    is_over = False
    is_one_graph = True

    @abstractmethod
    def record(self, experts: DeviceExperts, routed: Routed, recorder: GraphRecorder) -> Any:
        """The sums of a layer's experts ``[T, D]``, which are computed in a replay."""

    @abstractmethod
    def end(self) -> None:
        """All layers are recorded, the last graph is not ended yet."""

    @abstractmethod
    def replay(self, last: Graph) -> bool:
        """Queues the step, with its last graph; False where experts are not where they have to
        be."""


def experts_of_step(
    store: DeviceStore[Any],
    modules: Sequence[DeviceExperts],
    num_choices: int,
    num_tokens: int,
    *,
    reads_ahead: bool,
) -> StepExperts:
    """How a step is to be recorded now."""
    # their stacks are made now: not what is recorded
    found = {m.layer: store.with_residents(m.layer, lambda r: r.stack) for m in modules}
    if all(map(_is_quiet, modules)) and all(each.are_all for each in found.values()):
        return ResidentExperts(store, modules, found)
    tables = _tables(store, modules, num_choices)
    if tables is not None:
        _load_kernels(tables, num_tokens, num_choices)
        return FetchedExperts(store, modules, tables, reads_ahead=reads_ahead)
    return ExpertsInParts(store, modules, num_choices, reads_ahead=reads_ahead)


def _load_kernels(tables: HostTables, num_tokens: int, num_choices: int) -> None:
    """Compiles and loads the kernels that fetch experts, which a recording must not."""
    kinds = {(one.tables.sources_EP.shape, one.word_bytes): one for one in tables.layers.values()}
    for (shape, word_bytes), places in kinds.items():
        slots_E = tables.slots_E[: shape[0]]
        nobody_TK = torch.full((num_tokens, num_choices), -1, device=slots_E.device)
        fetch_experts(
            nobody_TK, places.tables, tables.slots, slots_E, word_bytes=word_bytes, impl="triton"
        )


def _tables(
    store: DeviceStore[Any], modules: Sequence[DeviceExperts], num_choices: int
) -> HostTables | None:
    """Where every expert is that may be asked for; None where a listener needs each layer, or
    experts are missing."""
    if not all(map(_is_quiet, modules)) or any(m.misses is not None for m in modules):
        return None
    if store.host_tables is None:
        open_host_tables(store, _keys_of(modules), num_choices)
    tables: HostTables | None = store.host_tables
    return tables if tables is not None and tables.launch(lambda: None) is not None else None


def _keys_of(modules: Sequence[DeviceExperts]) -> dict[int, list[ExpertKey]]:
    return {m.layer: m.keys_of(range(m.num_experts)) for m in modules}


def _all_keys(modules: Sequence[DeviceExperts]) -> list[ExpertKey]:
    return [*itertools.chain(*_keys_of(modules).values())]


def _is_quiet(experts: DeviceExperts) -> bool:
    """Whether no listener needs to hear of a layer within a step."""
    listens = experts.listeners.routed or experts.listeners.demanded
    return not listens and experts.store is not None and experts.store.listener is None


class _OneGraph(StepExperts):
    """A step that does not wait for the host, which hears of the choices afterwards."""

    def __init__(self, store: DeviceStore[Any], modules: Sequence[DeviceExperts]) -> None:
        self._store, self._modules = store, modules
        self._ids: list[torch.Tensor] = []
        self._ids_LTK: torch.Tensor | None = None

    def end(self) -> None:
        self._ids_LTK = torch.stack(self._ids) if self._ids else None

    def replay(self, last: Graph) -> bool:
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
    def _launch(self, last: Graph) -> Callable[[torch.Tensor], Sequence[ExpertKey]] | None:
        """Queues the step; None where it cannot be.

        Else what ``used`` of ``DeviceStore.count_later`` is of the choices ``[L, T, K]``, without
        this recording, whose memory may be given up before.
        """


class ResidentExperts(_OneGraph):
    """All experts are in slots of the device."""

    def __init__(
        self,
        store: DeviceStore[Any],
        modules: Sequence[DeviceExperts],
        residents: Mapping[int, Residents],
    ) -> None:
        super().__init__(store, modules)
        self._residents = residents

    def record(
        self, experts: DeviceExperts, routed: Routed, recorder: GraphRecorder
    ) -> torch.Tensor:
        products = experts.products(routed)
        products.add(self._residents[experts.layer].stack)
        self._ids.append(routed.ids_TK)
        return products.sums()

    def _launch(self, last: Graph) -> Callable[[torch.Tensor], Sequence[ExpertKey]] | None:
        self.is_over = not self._store.with_same_residents(self._residents, last.replay)
        return None if self.is_over else partial(_used, self._modules)


class FetchedExperts(_OneGraph):
    """Some experts are in host memory, from where the device fetches the chosen ones."""

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
        self, experts: DeviceExperts, routed: Routed, recorder: GraphRecorder
    ) -> torch.Tensor:
        assert self._store.stacks is not None, "the layer has a stack"
        places, products = self._tables.layers[experts.layer], experts.products(routed)
        slots_E = self._tables.slots_E[: experts.num_experts]
        stack = self._store.stacks.stack_over(experts.layer, slots_E)
        for first in range(0, routed.ids_TK.numel(), len(places.tables.landing_L)):
            fetch_experts(
                routed.ids_TK, places.tables, self._tables.slots, slots_E,
                first=first, word_bytes=places.word_bytes, impl="triton",
            )  # fmt: skip
            products.add(stack)
        self._ids.append(routed.ids_TK)
        return products.sums()

    def _launch(self, last: Graph) -> Callable[[torch.Tensor], Sequence[ExpertKey]] | None:
        found = self._tables.launch(last.replay)
        self._num_refused = 0 if found is not None else self._num_refused + 1
        self.is_one_graph = found is not None
        self.is_over = self._num_refused >= MOST_REFUSED
        if found is None and self._reads_ahead:
            read_rest(self._store, _all_keys(self._modules))
        return (
            None if found is None else partial(_count_fetched, self._tables, self._modules, found)
        )


class ExpertsInParts(StepExperts):
    """Misses of a layer are queued between two graphs."""

    is_one_graph = False

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
        upload = store.device.upload
        self._tables = {m.layer: upload(np.full((2, m.num_experts), -1, np.int32)) for m in modules}

    def record(
        self, experts: DeviceExperts, routed: Routed, recorder: GraphRecorder
    ) -> torch.Tensor:
        tables_2E = self._tables[experts.layer]
        self._layers.append(RecordedLayer(experts, routed, recorder, tables_2E))
        return self._layers[-1].sums()

    def end(self) -> None:
        for layer, following in itertools.pairwise(self._layers):
            layer.following = following

    def replay(self, last: Graph) -> bool:
        self._layers[0].prepare()
        are_all = [layer.replay() for layer in self._layers]
        last.replay()
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
    """The experts of a step, without its recording, whose memory may be given up before."""
    if ids_LTK.shape[1] == 1:  # whose rows are its choices in their order
        layers = zip(modules, ids_LTK.tolist(), strict=True)
        return [key for m, (ids,) in layers for key in m.keys_of(dict.fromkeys(ids))]
    layers = zip(modules, ids_LTK, strict=True)
    return [key for m, ids_TK in layers for key in m.keys_of(m.rows_of(ids_TK))]


class RecordedLayer:
    """The experts of one layer in a recorded step, to which missing ones are added.

    Attributes:
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
        """Records residents and arrivals; ``tables_2E`` has their slots, filled before a replay."""
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
        self._arrivals.replay()

    def replay(self) -> bool:
        """Replays the layer's choices and residents, and queues what it lacks; says whether all
        were resident."""
        self._experts.complete(self, self._routed, self._launch)
        return self._listed is not None and self._listed.are_all

    def prepare(self) -> None:
        """Drops the choices of the step before; to be called before each replay."""
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
