"""Host copies of the choices in a recorded step with missing experts."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_models import bring_all, emulated, experts_modules_of, load_on_emulated_device, settle
from tiny_checkpoints import PROMPT
from transformers import StaticCache

from moe_runtime.inference.device import device_experts
from moe_runtime.inference.steps import LayerRouting, Listener
from moe_runtime.memory.device.device_store import use_arriving

pytest.importorskip("triton")
NUM_EXPERTS, STEPS = 6, 4


class Heard(Listener):
    wants_routing = True

    def __init__(self) -> None:
        self.told: list[tuple[int, torch.Tensor]] = []

    def routed(self, routing: LayerRouting) -> None:
        assert [key.layer for key in routing.keys] == [routing.layer] * len(routing.keys)
        assert {key.expert for key in routing.keys} == {*routing.ids_TK.flatten().tolist()}
        self.told.append((routing.layer, routing.ids_TK))  # and keeps it


def decode(checkpoint: Path, slots: int, misses: str, *, is_recorded: bool) -> tuple[Any, ...]:
    """Logits of steps of two sequences, the routing that a listener got, and counted uses."""
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots, misses=misses)
    if not is_recorded:
        model.forward = model.forward.__wrapped__
    with model.moe, torch.no_grad():
        cache, heard = StaticCache(model.config, max_cache_len=20), Heard()
        ids = PROMPT[:, :3].repeat(2, 1)
        ids[1] = ids[1].flip(0)
        logits = []
        with model._steps.listeners.also(heard):
            for step in range(STEPS):
                found = model(ids, past_key_values=cache, use_cache=True).logits
                ids = torch.full((2, 1), 40 + step)  # known without a look at the last step
                logits.append(found[:, -1])
        # without listeners, uses are counted later
        for step in range(STEPS):
            ids = torch.full((2, 1), 50 + step)
            logits.append(model(ids, past_key_values=cache, use_cache=True).logits[:, -1])
        model.moe.check()
        stats = model.moe.stats()
        told = [(layer, ids_TK.tolist()) for layer, ids_TK in heard.told]
        # arrival times decide evictions, and so the number of misses
        return torch.stack(logits), told, stats.hits + stats.late_hits + stats.misses


@emulated
@pytest.mark.parametrize(
    ("slots", "misses"), [(3, "device"), (3, "all-on-cpu"), (NUM_EXPERTS, "device")]
)
def test_listeners_and_counters_equal_those_without_a_recording(checkpoint, slots, misses):
    ways = [decode(checkpoint, slots, misses, is_recorded=one) for one in (True, False)]
    assert torch.equal(ways[0][0], ways[1][0])
    assert ways[0][1] == ways[1][1]
    assert len(ways[0][1]) == 2 * STEPS
    assert ways[0][2] == ways[1][2]


@emulated
def test_missing_experts_in_host_memory_need_no_lease(checkpoint):
    """Two layers of six experts, with four slots each and five places below."""
    model = load_on_emulated_device(checkpoint, slots_a_layer=4)
    store: Any = experts_modules_of(model)[0].store
    outcomes = list[tuple[int, int]]()

    def noted(store: Any, keys: Any, residents: Any, launch: Any) -> Any:
        left = use_arriving(store, keys, residents, launch)
        outcomes.append((len({key.expert for key in keys} - residents.experts), len(left)))
        return left

    with model.moe, torch.no_grad(), patch.object(device_experts, "use_arriving", noted):
        cache = StaticCache(model.config, max_cache_len=40)
        model(PROMPT[:, :3], past_key_values=cache, use_cache=True)
        for step in range(20):
            model(torch.full((1, 1), step), past_key_values=cache, use_cache=True)
            settle(model)
        assert any(num_missing and not num_left for num_missing, num_left in outcomes)
        model.moe.check()
        # a prefetch may have been on its way: then it is a late hit
        counted = store.stats().misses + store.stats().late_hits
        assert counted >= sum(num_missing for num_missing, _ in outcomes)


@emulated
def test_default_options_keep_a_step_one_graph(checkpoint):
    """`--policy auto --prefetch auto` listen only to layers that are not fully resident."""
    found = []
    for options in ({"policy": "auto", "prefetch": "auto"}, {}):
        model = load_on_emulated_device(checkpoint, slots_a_layer=NUM_EXPERTS, **options)
        with model.moe:
            bring_all(model)
            found.append(model.generate(PROMPT, max_new_tokens=6, do_sample=False))
            store: Any = experts_modules_of(model)[0].store
            assert store.recorded is not None
            assert store.recorded.is_one_graph
    assert torch.equal(*found)


class OfAnotherStream:
    """An event that the device reaches when it is waited for."""

    is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


@emulated
def test_uses_that_are_counted_late_are_those_of_their_step(checkpoint):
    """Choices of another stream are counted first: a step must not overwrite them, and a lease must
    not wait for a later layer."""
    found = list[tuple[Any, ...]]()
    for is_late in (False, True):
        model = load_on_emulated_device(checkpoint, slots_a_layer=2)
        store: Any = experts_modules_of(model)[0].store
        with model.moe, torch.no_grad():
            cache, logits = StaticCache(model.config, max_cache_len=40), []
            model(PROMPT[:, :3], past_key_values=cache, use_cache=True)
            for step in range(12):
                if is_late and step % 3 == 2:
                    store.count_later(OfAnotherStream(), list)
                ids = torch.full((1, 1), step)
                logits.append(model(ids, past_key_values=cache, use_cache=True).logits)
            model.moe.check()
            stats = model.moe.stats()
        found.append((logits, stats.hits + stats.late_hits + stats.misses))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]
