"""Experts on several GPUs of one machine: each card has the experts of some layers.

The first card has everything else. A layer's rows go to its card, and their sums come back, so no
bit depends on the division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.config import Budget
from moe_runtime.errors import CapacityError
from moe_runtime.inference.budget import (
    MIN_SLOTS,
    MemoryPlan,
    activation_bytes_per_token,
    available_device_bytes,
    plan_memory,
    resolve_budget,
)
from moe_runtime.memory.source import ExpertSource, Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LayerShares

Stores = tuple[ExpertStore[Any], ExpertStore[torch.Tensor] | None]


class Card(NamedTuple):
    """A device, the layers whose experts it has, and its part of each tier."""

    place: torch.device
    layers: Sequence[int]
    plans: dict[str, MemoryPlan]

    def own(self, experts: ExpertMap) -> ExpertMap:
        """The experts of its layers."""
        if len(self.layers) == len(experts.modules):
            return experts
        own = {key: each for key, each in experts.layouts.items() if key.layer in self.layers}
        return replace(experts, layouts=own)


def require_one_process(device: object, prefetch: str, shares: str, *, is_alone: bool) -> None:
    """Refuses what several GPUs in one process do not support, by a ValueError."""
    for given, name in (
        (prefetch != "off", f"prefetch {prefetch}"),
        (shares == "adaptive", "shares adaptive"),
        (not is_alone, "several processes"),
    ):
        if given:
            raise ValueError(f"{name} is for one GPU, got the device {device}: leave it out")


def plan_cards(
    places: Sequence[torch.device],
    plans: Mapping[str, MemoryPlan],
    budget: Budget,
    checkpoint: Checkpoint,
    slot_maps: Mapping[str, ExpertMap],
    reserve_bytes: int,
    max_tokens: int,
) -> list[Card]:
    """Plans the devices ``places``, of which the first has its plan already.

    Others reserve ``reserve_bytes`` and the activations of ``max_tokens`` tokens. Raises as
    `divide_cards` and `plan_memory`.
    """
    experts = slot_maps["device"]
    if len(places) == 1:
        return [Card(places[0], range(len(experts.modules)), {**plans})]
    of_token = activation_bytes_per_token(checkpoint.config, checkpoint.dtype, experts.top_k)
    there = [plans["device"]]
    for place in places[1:]:
        there.append(
            plan_memory(
                resolve_budget(budget, available_device_bytes(place), str(place)),
                dense_bytes=0,
                reserve_bytes=reserve_bytes + max_tokens * of_token,
                slot_bytes=experts.slot_bytes,
                num_experts=len(experts.layouts),
                max_tokens=max_tokens,
                option="device_memory",
            )
        )
    return divide_cards(places, there, plans["host"], experts)


def divide_cards(
    places: Sequence[torch.device],
    plans: Sequence[MemoryPlan],
    host: MemoryPlan,
    experts: ExpertMap,
) -> list[Card]:
    """Divides layers by the slots of each card, and the host's slots by the experts of each.

    Raises CapacityError: the host's slots are too few. Raises ValueError: a card would have no
    layer.
    """
    sizes = [module.num_experts for module in experts.modules]
    cards, left = list[Card](), host.num_slots
    layers = divide_layers([plan.num_slots for plan in plans], sizes)
    for place, plan, own in zip(places, plans, layers, strict=True):
        if not own:
            raise ValueError(f"device {place} would have no experts: leave it out")
        num_own = sum(sizes[layer] for layer in own)
        is_last = own[-1] + 1 == len(sizes)
        num_below = left if is_last else host.num_slots * num_own // sum(sizes)
        num_below, left = min(num_below, num_own), left - num_below
        if num_below < MIN_SLOTS:
            raise CapacityError(
                f"host_memory has room for {host.num_slots} experts: each of {len(places)} GPUs "
                f"needs {MIN_SLOTS} there; give more, or name fewer GPUs"
            )
        above = replace(plan, num_slots=min(plan.num_slots, num_own))
        below = replace(host, num_slots=num_below)
        cards.append(Card(place, own, {"device": above, "host": below}))
    return cards


def open_cards(
    cards: Sequence[Card],
    sources: Sequence[ExpertSource],
    slabs: Sequence[Slab],
    experts: ExpertMap,
    slot_maps: Mapping[str, ExpertMap],
    new_policy: Callable[[MemoryPlan], LayerShares],
    open_stores: Callable[..., Stores],
) -> list[Stores]:
    """The stores of each card, by ``open_stores`` for its source and its slots of the host."""
    found = list[Stores]()
    with ExitStack() as failure:
        for card, source, slab in zip(cards, sources, slabs, strict=True):
            maps = {tier: card.own(each) for tier, each in slot_maps.items()}
            make = partial(_policy_of, new_policy, card.layers)
            own = card.own(experts)
            found.append(open_stores(source, slab, own, maps, card.plans, make, card.place))
            failure.callback(found[-1][0].close)
        failure.pop_all()
    return found


def give_stores(
    cards: Sequence[Card], opened: Sequence[Stores], modules: Sequence[Any], bind: Any
) -> None:
    """Gives each layer the store of its card; with ``bind`` the CPU may compute missing experts."""
    for card, tiers in zip(cards, opened, strict=True):
        own = [modules[layer] for layer in card.layers]
        for module in own:
            module.store = tiers[0]
            if card is not cards[0]:
                module.card = card.place
        if bind is not None:
            from moe_runtime.inference.device.misses import open_misses

            open_misses(own, *tiers, bind)


def _policy_of(
    new_policy: Callable[[MemoryPlan], LayerShares], layers: Sequence[int], plan: MemoryPlan
) -> LayerShares:
    policy = new_policy(plan)
    return policy if len(layers) == len(policy.layers) else policy.keep_to(layers)


def divide_layers(slots: Sequence[int], sizes: Sequence[int]) -> list[range]:
    """The layers of each card, for its slots and the layers' numbers of experts: all that fit, in
    order; if not all fit, parts in proportion to the slots. Each takes one if there are enough."""
    room, num_given, first = 0, 0, 0
    most, found = max(sum(slots), sum(sizes)), list[range]()
    for number, own in enumerate(slots, 1):
        room, last = room + own, first
        while last < len(sizes) and (
            number == len(slots)
            or (last == first and len(sizes) - last > len(slots) - number)
            or (num_given + sizes[last]) * sum(slots) <= room * most
        ):
            num_given, last = num_given + sizes[last], last + 1
        found.append(range(first, last))
        first = last
    return found
