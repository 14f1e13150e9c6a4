"""Tables of experts that kernels read in host memory: when these bytes may be overwritten."""

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from emulated_device import EmulatedEvent
from emulated_models import emulated, map_of
from fetched_models import ENOUGH, EVERY, LAYERS, SLOTS, Request, in_both, store_of, warmed

from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.device.device_experts import policy_of_device
from moe_runtime.memory.device import host_tables

pytest.importorskip("triton")
pytestmark = emulated


class LateEvent:
    """The end of a kernel that reads host memory; it comes when it is waited for."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def launch(model: Any) -> list[LateEvent]:
    """Queues a kernel that does not end by itself; empty where experts are not all there."""
    store, late = store_of(model), LateEvent()
    with patch.object(store.device, "vacate", lambda *_, **__: [late]):
        found = store.host_tables.launch(lambda: None)
    return [] if found is None else [late]


def assert_listed(model: Any) -> None:
    """The tables say where every expert is."""
    store = store_of(model)
    tables, lower = store.host_tables, store.fetcher.lower
    for places in tables.layers.values():
        for key in places.keys:
            above, below = store._entries.get(key), lower._entries.get(key)
            slot = above.slot if above is not None and above.arrived else -1
            assert places.tables.residents_E[key.expert] == slot
            offsets_P = places.offsets_EP[key.expert]
            if below is None:
                expected = [0] * len(offsets_P)
            else:
                expected = (lower._slab.slot(below.slot).data_ptr() + offsets_P).tolist()
            assert places.tables.sources_EP[key.expert].tolist() == expected


def only_below(model: Any) -> Any:
    above, below = in_both(model)
    return min(below - above)


def bring_back(lower: Any, key: Any) -> None:
    with lower.lease([key]) as lease:
        assert len([*lease]) == 1


def test_the_disk_writes_behind_kernels(checkpoint):
    with warmed(checkpoint) as model:
        Request(model).until_fetched()
        lower, order = store_of(model).fetcher.lower, []
        (late,) = launch(model)
        victim, fetch = only_below(model), lower._fetcher._source.fetch
        with lower._monitor:
            lower._drop(victim)

        def noted(*what: Any) -> None:
            order.append(late.is_over)
            fetch(*what)

        with patch.object(lower._fetcher._source, "fetch", noted):
            bring_back(lower, victim)
        assert order == [True]


def test_returns_to_the_host_wait_for_kernels_of_all_streams(checkpoint):
    with warmed(checkpoint, host_slots=ENOUGH) as model:
        Request(model).until_fetched()
        store = store_of(model)
        lower, device = store.fetcher.lower, store.device
        with device.stream(7):
            device.compute_here()
            device.compute(lambda: None, 5.0)
        kernels = device.now_s + 5.0
        victim = min(in_both(model)[0] - in_both(model)[1])
        with store._monitor:
            store._drop(victim)
        assert max(event.time_s for event in lower._fetcher._leaving.values()) > kernels


def test_closing_waits_for_kernels(checkpoint):
    with warmed(checkpoint) as model:
        Request(model).until_fetched()
        (late,) = launch(model)
        model.moe.close()
        assert late.is_over


def test_another_stream_waits_for_the_last_one(checkpoint):
    """There is one set of tables and landing slots."""
    with warmed(checkpoint) as model:
        Request(model).until_fetched()
        (first,) = launch(model)
        launch(model)
        assert not first.is_over
        (last,) = launch(model)
        with store_of(model).device.stream(3):
            launch(model)
        assert last.is_over


def test_a_missing_expert_is_seen_at_once(checkpoint):
    with warmed(checkpoint) as model:
        Request(model).until_fetched()
        store, queued = store_of(model), []
        lower, victim = store.fetcher.lower, only_below(model)
        assert_listed(model)
        with lower._monitor:
            lower._drop(victim)
        assert store.host_tables.launch(lambda: queued.append(1)) is None
        assert not queued
        bring_back(lower, victim)
        assert launch(model)
        assert_listed(model)


def test_residency_is_fixed_while_work_is_queued(checkpoint):
    with warmed(checkpoint) as model:
        Request(model).until_fetched()
        store, seen = store_of(model), deque[str]()
        locks = {"above": store._monitor, "below": store.fetcher.lower._monitor}

        def take(name: str) -> None:
            with locks[name]:
                seen.append(name)

        others = [threading.Thread(target=take, args=(name,)) for name in locks]

        def queue() -> None:
            for other in others:
                other.start()
                other.join(0.1)
            seen.append("queued")

        store.host_tables.launch(queue)
        for other in others:
            other.join()
        assert seen[0] == "queued"


def test_landing_slots_survive_exceptions(checkpoint):
    waited: list[EmulatedEvent] = []
    synchronize = EmulatedEvent.synchronize

    def noted(event: EmulatedEvent) -> None:
        waited.append(event)
        synchronize(event)

    with warmed(checkpoint) as model:
        store, request = store_of(model), Request(model)
        num_slots = store.num_slots
        for name in ("_places", "HostTables"):
            with (
                patch.object(host_tables, name, side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                request.steps(20)
            assert store.num_slots == num_slots
            assert store.host_tables is None
            model.moe.check()
        shares = sum(store.slots_of(layer) for layer in range(LAYERS))
        with patch.object(EmulatedEvent, "synchronize", noted):
            Request(model).until_fetched()  # the stores were emptied: experts are read again
        assert store.host_tables is not None
        assert waited
        assert store.num_slots == num_slots - 2
        assert sum(store.slots_of(layer) for layer in range(LAYERS)) == shares - 2
        model.moe.check()


def test_a_closed_model_only_counts_uses(checkpoint):
    with warmed(checkpoint) as model:
        request = Request(model).until_fetched()
        request.steps(3)
        tables = store_of(model).host_tables
        assert store_of(model)._uncounted
        model.moe.close()
        assert model.moe.stats().misses > 0
        with pytest.raises(MoERuntimeError, match="the model's experts were closed"):
            tables.launch(lambda: None)


def test_policies_that_decline_cut_steps(checkpoint):
    with warmed(checkpoint) as model:
        store_of(model)._policy.may_decline = True
        Request(model).steps(20)
        assert store_of(model).host_tables is None
        assert not model.forward.is_one_graph


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [(SLOTS * LAYERS, EVERY, True), (8, 8, True), (8, 7, False), (12, 12, False), (7, 12, False)],
)
def test_room(device, host, expected):
    """All in two memories and one of each layer in both; not on the device; a quarter for two."""
    given = {"num_experts": EVERY, "num_layers": LAYERS, "num_choices": 2}
    assert host_tables.has_room(device, host, **given) == expected


def test_auto_policy_is_lru_if_all_experts_are_in_memory(checkpoint):
    experts = map_of(checkpoint)

    def policy(device: int, host: int) -> str:
        slots = {"device": device, "host": host}
        plans: Any = {place: SimpleNamespace(num_slots=number) for place, number in slots.items()}
        return policy_of_device(plans, experts)

    assert policy(SLOTS * LAYERS, EVERY) == "lru"
    assert policy(SLOTS * LAYERS, 4) == policy(EVERY, EVERY) == "auto"
