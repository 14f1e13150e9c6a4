"""Loaded models whose experts lie in slots of an emulated device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_device import EmulatedDevice

import moe_runtime
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.inference import loading
from moe_runtime.inference.device.cards import Card, divide_cards, give_stores, open_cards
from moe_runtime.inference.device.decode_graphs import RecordedStep
from moe_runtime.inference.device.decoding_model import capture_decoding
from moe_runtime.inference.device.device_experts import (
    DeviceExperts,
    experts_on_device,
    open_device_stores,
)
from moe_runtime.inference.device.misses import MissPlan, MissSpeeds
from moe_runtime.inference.expert_layer import bind_slots
from moe_runtime.inference.hugging_face.loaded_model import RuntimeHandle
from moe_runtime.memory.source import ExpertSource, Slab
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares

emulated = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU here, which sees no emulated device"
)


class EagerDevice(EmulatedDevice):
    """An emulated device beside which torch computes at once: what a stream waits for is done.

    A copy that failed is over, too: who waits on the host is told, not who goes on behind it.
    """

    def wait_here(self, event: Any) -> None:
        super().wait_here(event)
        getattr(event, "event", event).synchronize()


@contextmanager
def counted_recordings() -> Iterator[list[int]]:
    """Has a number for each step that is recorded."""
    made, make = list[int](), RecordedStep.__init__

    def noted(*args: Any, **kwargs: Any) -> None:
        made.append(len(made))
        make(*args, **kwargs)

    with patch.object(RecordedStep, "__init__", noted):
        yield made


def map_of(checkpoint: Path, dtype: str = "auto") -> ExpertMap:
    opened = open_checkpoint(checkpoint, dtype)
    return map_experts(build_on_meta(opened), opened)


class ComputesAll(MissSpeeds):
    def rests(self) -> bool:
        return False

    def plan(self, rows: Mapping[int, int], *_: Any, **__: Any) -> MissPlan:
        return MissPlan((), (*rows,), 0.0)


def load_on_emulated_device(
    checkpoint: Path,
    *,
    slots_a_layer: int,
    dtype: str = "auto",
    misses: str = "device",
    max_tokens: int = 64,
    host_slots: int | None = None,
    card_slots: Sequence[int] = (),
    **options: Any,
) -> Any:
    """A model on the CPU whose experts are computed from slots of an emulated device.

    The host has two slots more than the device unless it is said how many. Other options of
    ``load`` say who listens to it. Its ``moe`` is the handle of the two stores. With ``misses``
    ``"all-on-cpu"`` each plan is that the CPU computes everything. With ``card_slots`` there are
    several devices of so many slots, which divide the layers.
    """
    with ExitStack() as patches:
        patches.enter_context(patch.object(loading, "OffloadedExperts", DeviceExperts))
        for name in (
            "use_small_batch_layers",
            "use_single_query_attention",
            "fuse_attention_layers",
        ):
            # other layers are transformers' own on a device
            patches.enter_context(patch.object(loading, name, lambda *model, **options: None))
        options |= {"dtype": dtype, "max_tokens": max_tokens}
        model: Any = moe_runtime.load(checkpoint, device="cpu", **options)
    facts = model.moe.facts
    model.moe.close()
    experts = map_of(checkpoint, dtype)
    there = experts_on_device(experts)
    num_slots = slots_a_layer * len(experts.modules)
    plans = {
        place: dataclasses.replace(facts.host_plan, num_slots=number, slot_bytes=part.slot_bytes)
        for place, part, number in (
            ("device", there, num_slots),
            ("host", experts, host_slots or num_slots + 2),
        )
    }
    here, slot_maps = EagerDevice.place, {"host": experts, "device": there}
    cards = [Card(here, range(len(experts.modules)), plans)]
    if card_slots:
        each = [dataclasses.replace(plans["device"], num_slots=number) for number in card_slots]
        cards = divide_cards([here] * len(each), each, plans["host"], there)

    def open_stores(source: Any, slab: Any, own: Any, maps: Any, *rest: Any) -> Any:
        plans, new_policy, _ = rest
        both = maps | {"host": own}
        return open_device_stores(
            source, slab, plans, new_policy, both, (None, None), EagerDevice()
        )

    opened = open_cards(
        cards,
        [ExpertSource(card.own(experts).layouts, io_threads=2) for card in cards],
        [Slab(card.plans["host"].num_slots, experts.slot_bytes) for card in cards],
        experts,
        slot_maps,
        lambda plan: LayerShares(LRU, even_shares(plan.num_slots, len(experts.modules))),
        open_stores,
    )
    modules = experts_modules_of(model)
    give_stores(cards, opened, modules, None if misses == "device" else bind_slots(experts))
    for module in modules if misses == "all-on-cpu" else ():
        assert module.misses is not None
        module.misses.speeds = ComputesAll()
    capture_decoding(model, modules)
    model._steps._stores = [store for stores in opened for store in stores]
    facts = dataclasses.replace(facts, host_plan=plans["host"], device_plan=plans["device"])
    model.moe = RuntimeHandle(opened[0][0], facts, host_store=opened[0][1], others=opened[1:])
    return model


def logits_of(model: Any, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(prompt).logits for prompt in prompts]


def experts_modules_of(model: Any) -> list[DeviceExperts]:
    return [module for module in model.modules() if isinstance(module, DeviceExperts)]


def bring_all(model: Any) -> None:
    """Has every expert of a model in a slot, of which there are as many."""
    for module in experts_modules_of(model):
        assert module.store is not None
        with module.store.lease(module._keys) as lease:
            assert sum(map(len, lease)) == module.num_experts


def settle(model: Any) -> None:
    """Waits until every copy to the device is counted."""
    store = experts_modules_of(model)[0].store
    assert store is not None
    while not all(entry.arrived for entry in [*store._entries.values()]):
        time.sleep(0.001)
