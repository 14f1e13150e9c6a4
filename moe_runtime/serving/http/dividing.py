"""One memory budget for several models."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.config import Budget, format_bytes, parse_budget
from moe_runtime.errors import CapacityError, UnsupportedModelError
from moe_runtime.inference.adapters import resident_bytes
from moe_runtime.inference.budget import (
    AUTO_SHARE,
    MIN_SLOTS,
    available_host_bytes,
    resolve_budget,
    smallest_budget,
)
from moe_runtime.inference.hugging_face.loaded_model import (
    RuntimeHandle,
    is_resizable,
    resize_cache,
)
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.serving.engine import Turns

_OWN_BYTES = 6 * 2**20
"""For connections, requests and their texts: 15 minutes with 8 clients took 4 MiB."""
_TOKEN_BYTES = 64
"""For each token of a KV cache: the index of prefixes, and objects of its tensors."""


def server_bytes(max_tokens: int | None, num_models: int = 1) -> int:
    """Bytes of the budget that the server itself needs; its models get the rest."""
    return _OWN_BYTES + _TOKEN_BYTES * (max_tokens or 0) * num_models


def is_on_cpu(loading: Mapping[str, Any]) -> bool:
    device = loading["device"]
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def rest_for_model(loading: Mapping[str, Any]) -> Budget:
    """The budget of the only model of a server; at least a byte."""
    return part_for(loading, max(1, budget_of_models(loading, 1)))


def with_server(error: CapacityError, loading: Mapping[str, Any]) -> CapacityError:
    """Restates the error of a model whose budget is too small for the server's budget.

    With a device the error may be about either budget, and stays unchanged.
    """
    if error.smallest_bytes is None or not is_on_cpu(loading):
        return error
    own = server_bytes(loading["max_tokens"])
    smallest = error.smallest_bytes + own
    return CapacityError(
        f"--host-memory: a budget of {format_bytes(_host_budget(loading))} is too small: the "
        f"smallest that works is {format_bytes(smallest, up=True)} ({smallest} bytes): "
        f"{format_bytes(error.smallest_bytes, up=True)} for the model, "
        f"{format_bytes(own, up=True)} for the server",
        smallest_bytes=smallest,
    )


def _host_budget(loading: Mapping[str, Any]) -> int:
    asked = parse_budget(loading["host_memory"], name="--host-memory")
    return resolve_budget(asked, available_host_bytes(), "this machine")


def part_for(loading: Mapping[str, Any], share_bytes: int, adapter_bytes: int = 0) -> Budget:
    """The budget of a model with a share of all bytes, without its adapters."""
    asked = parse_budget(loading["host_memory"], name="--host-memory")
    return asked.part(share_bytes - adapter_bytes, auto_share=AUTO_SHARE)


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a model needs.

    Attributes:
        smallest_bytes: to run, adapters included.
        experts_bytes: beyond that, for all experts.
        adapter_bytes: of adapters, within ``smallest_bytes``.
    """

    smallest_bytes: int
    experts_bytes: int
    adapter_bytes: int = 0


def needs_of(
    names: Sequence[str],
    folders: Sequence[Path],
    adapters: Sequence[Mapping[str, AdapterFolder]],
    loading: Mapping[str, Any],
    adapter_bytes: int | None = None,
    *,
    loads_adapters: bool = False,
) -> dict[str, Need]:
    """The need of each model with its adapters, from the headers of its files.

    Raises:
        CapacityError, ValueError: ``adapter_bytes`` is too small.
        UnsupportedModelError: the models would run on a GPU.
    """
    if not is_on_cpu(loading):
        raise UnsupportedModelError(
            "several models, and adapters, are served from the CPU, got --device "
            f"{loading['device']}; give --device cpu, or one model without adapters"
        )
    known = ("dtype", "max_tokens", "cache_code", "kv_cache", "misses", "draft")
    options = {option: loading[option] for option in known}
    needs = {}
    for name, folder, own in zip(names, folders, adapters, strict=True):
        found = inspect_checkpoint(folder, **options)
        smallest = found.smallest_budget_bytes
        whole = found.dense_bytes + found.reserve_bytes + found.total_experts * found.slot_bytes
        workspace = max((one.workspace_bytes(found.max_tokens) for one in own.values()), default=0)
        beside = workspace + resident_bytes(own, adapter_bytes, takes_more=loads_adapters)
        needs[name] = Need(smallest + beside, max(0, whole - smallest), beside)
    return needs


def budget_of_models(loading: Mapping[str, Any], num_models: int) -> int:
    """Bytes for all models that are loaded together."""
    return _host_budget(loading) - server_bytes(loading["max_tokens"], num_models)


def divide_host_memory(needs: Mapping[str, Need], loading: Mapping[str, Any]) -> list[Budget]:
    """The budget of each model, without its adapters."""
    own = server_bytes(loading["max_tokens"], len(needs))
    shares = divide(_host_budget(loading), needs, own)
    every = zip(shares, needs.values(), strict=True)
    return [part_for(loading, share, need.adapter_bytes) for share, need in every]


def divide(budget_bytes: int, needs: Mapping[str, Need], own_bytes: int = 0) -> list[int]:
    """Bytes for each model: its smallest need, and a share of the rest by the size of its experts.

    ``own_bytes`` go to the server first.
    """
    smallest = own_bytes + sum(need.smallest_bytes for need in needs.values())
    if budget_bytes < smallest:
        each = ", ".join(
            f"{format_bytes(need.smallest_bytes, up=True)} for {name}"
            for name, need in needs.items()
        )
        raise CapacityError(
            f"--host-memory: a budget of {format_bytes(budget_bytes)} is too small for all models "
            f"and their adapters: the smallest that works is {format_bytes(smallest, up=True)} "
            f"({smallest} bytes): {each}, {format_bytes(own_bytes, up=True)} for the server",
            smallest_bytes=smallest,
        )
    wanted = sum(need.experts_bytes for need in needs.values())
    rest = min(budget_bytes - smallest, wanted)
    return [
        need.smallest_bytes + (rest * need.experts_bytes // wanted if wanted else 0)
        for need in needs.values()
    ]


IDLE_S = 10.0
"""Seconds without a step after which a model lends its slots."""


class _Member(Turns):
    """A model, and the turns of its engine; ``is_asking`` while it waits for its turn or has it."""

    def __init__(self, sharing: SlotSharing, handle: RuntimeHandle, adapter_bytes: int) -> None:
        super().__init__()
        self.handle, self.adapter_bytes, self._sharing = handle, adapter_bytes, sharing
        self.last_s, self.is_asking = sharing.clock(), False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.is_asking = True
        with self._sharing.turns.turn():
            try:
                self._sharing.divide_again()
                yield
            finally:
                self.last_s, self.is_asking = self._sharing.clock(), False

    @property
    def is_wanted(self) -> bool:
        return self._sharing.turns.is_wanted

    @property
    def _fixed_bytes(self) -> int:
        plan = self.handle.facts.host_plan
        return plan.dense_bytes + plan.reserve_bytes + self.adapter_bytes

    @property
    def taken_bytes(self) -> int:
        """Its part of the budget, filled or not."""
        plan = self.handle.facts.host_plan
        return self._fixed_bytes + plan.num_slots * plan.slot_bytes

    def need(self, *, works: bool) -> Need:
        """An idle model needs only the minimum. Slots that cannot be resized stay."""
        if not is_resizable(self.handle):
            return Need(self.taken_bytes, 0)
        plan, signature = self.handle.facts.host_plan, self.handle.facts.signature
        smallest = smallest_budget(plan.dense_bytes, plan.reserve_bytes, plan.slot_bytes)
        num_more = signature.num_layers * signature.num_experts - MIN_SLOTS
        more_bytes = max(0, num_more) * plan.slot_bytes if works else 0
        return Need(smallest + self.adapter_bytes, more_bytes)

    def slots_of(self, share_bytes: int) -> int:
        """Slots that fit into a share of the budget."""
        plan = self.handle.facts.host_plan
        if not is_resizable(self.handle):
            return plan.num_slots
        return (share_bytes - self._fixed_bytes) // plan.slot_bytes


class SlotSharing:
    """Divides a budget again when the set of working models changes.

    Every model keeps its minimum. Idle models lend the rest to working ones, as far as these have
    experts for it. Slots are freed before others take their bytes. Only the engine whose turn it is
    moves slots, so no model computes meanwhile.

    The budget is ``budget_bytes``, or the total of the models' budgets if that is more.
    """

    def __init__(
        self,
        turns: Turns,
        budget_bytes: int = 0,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.turns = turns
        self.clock = clock
        self._idle_s = idle_s
        self._members: list[_Member] = []
        self._working: list[_Member] | None = None  # at the last division
        self._budget_bytes = budget_bytes
        self.room_bytes = 0  # reserved for a model that loads, or not yet freed by a closed one

    def add(self, handle: RuntimeHandle, adapter_bytes: int = 0) -> Turns:
        """Adds a model with its budget; returns the turns for its engine."""
        with self.turns.turn():
            member = _Member(self, handle, adapter_bytes)
            self._members.append(member)
            self.room_bytes = 0
            self._budget_bytes = max(self._budget_bytes, self._taken_bytes())
            self._working = list(self._members)
        return member

    def remove(self, handle: RuntimeHandle) -> None:
        """Reserves the bytes of a model that closes until `leave_room`."""
        with self.turns.turn():
            (gone,) = (some for some in self._members if some.handle is handle)
            self._members.remove(gone)
            self.room_bytes, self._working = self.room_bytes + gone.taken_bytes, None

    def make_room(self, need: Need) -> bool:
        """Frees slots for a model that will load, and reserves ``room_bytes`` until `add`.

        Returns False if the minimums of the others leave too few bytes.
        """
        with self.turns.turn():
            self.room_bytes, self._working = 0, None
            needs = [*(some.need(works=True) for some in self._members), need]
            try:
                *shares, own = self._shares(needs)
            except CapacityError:
                return False
            self._move(shares, only_fewer=True)
            room = min(own, self._budget_bytes - self._taken_bytes())
            self.room_bytes = room if room >= need.smallest_bytes else 0
            return self.room_bytes > 0

    def leave_room(self) -> None:
        """Ends the reservation: loading failed, or a model has closed."""
        with self.turns.turn():
            self.room_bytes, self._working = 0, None

    def check(self) -> None:
        """Asserts that all models together stay within the budget."""
        assert self._taken_bytes() + self.room_bytes <= self._budget_bytes
        for member in self._members:
            member.handle.check()
            assert member.handle.stats().expert_slots == member.handle.facts.host_plan.num_slots

    def divide_again(self) -> None:
        """Moves slots if the set of working models has changed; within a turn."""
        since_s = self.clock() - self._idle_s
        working = [one for one in self._members if one.is_asking or one.last_s > since_s]
        if working != self._working and self._divide(working):
            self._working = working

    def _taken_bytes(self) -> int:
        return sum(member.taken_bytes for member in self._members)

    def _shares(self, needs: Sequence[Need]) -> list[int]:
        budget_bytes = self._budget_bytes - self.room_bytes
        return divide(budget_bytes, {str(number): need for number, need in enumerate(needs)})

    def _divide(self, working: Collection[_Member]) -> bool:
        """Moves slots; returns whether all models have their share."""
        shares = self._shares([some.need(works=some in working) for some in self._members])
        # Idle models keep what the working ones cannot use.
        rest = [
            Need(share, 0 if some in working else some.need(works=True).experts_bytes)
            for share, some in zip(shares, self._members, strict=True)
        ]
        return self._move(self._shares(rest))

    def _move(self, shares: Sequence[int], *, only_fewer: bool = False) -> bool:
        wanted = [
            (some, some.handle.facts.host_plan, some.slots_of(share))
            for some, share in zip(self._members, shares, strict=True)
        ]
        is_whole = True
        for some, plan, num_slots in wanted:
            if num_slots < plan.num_slots:
                is_whole &= resize_cache(some.handle, num_slots) == num_slots
        for some, plan, num_slots in wanted if not only_fewer else ():
            if num_slots > plan.num_slots:
                left_bytes = self._budget_bytes - self.room_bytes - self._taken_bytes()
                most = min(num_slots, plan.num_slots + left_bytes // plan.slot_bytes)
                is_whole &= resize_cache(some.handle, most) == num_slots
        return is_whole
