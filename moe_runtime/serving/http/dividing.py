"""One budget for several models."""

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
"""Reserved for connections, requests and their texts: 15 minutes with 8 clients took 4 MiB."""
_TOKEN_BYTES = 64
"""Reserved for each token of a KV cache: what finds a kept prefix again, and its tensor's own."""


def server_bytes(max_tokens: int | None, num_models: int = 1) -> int:
    """What a server needs beside its models, of whose budget they get the rest."""
    return _OWN_BYTES + _TOKEN_BYTES * (max_tokens or 0) * num_models


def is_on_cpu(loading: Mapping[str, Any]) -> bool:
    device = loading["device"]
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def rest_for_model(loading: Mapping[str, Any]) -> Budget:
    """The budget of a model that has the server to itself; at least a byte."""
    return _part(loading, max(1, _host_budget(loading) - server_bytes(loading["max_tokens"])))


def with_server(error: CapacityError, loading: Mapping[str, Any]) -> CapacityError:
    """The error of a model whose budget is too small, in terms of the server's budget.

    With a device it may speak of either budget, and stays as it is.
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
    return resolve_budget(_asked(loading), available_host_bytes(), "this machine")


def _part(loading: Mapping[str, Any], num_bytes: int) -> Budget:
    return _asked(loading).part(num_bytes, auto_share=AUTO_SHARE)


def _asked(loading: Mapping[str, Any]) -> Budget:
    return parse_budget(loading["host_memory"], name="--host-memory")


@dataclass(frozen=True, slots=True)
class Need:
    """What a model needs of a budget, in bytes: to run, and beyond that until all experts fit.

    ``adapter_bytes`` are that part of the former which is not the model's own.
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
    """What each model needs with its adapters, from its files' headers.

    Raises CapacityError, UnsupportedModelError for a GPU, or ValueError for ``adapter_bytes``.
    """
    if not is_on_cpu(loading):
        raise UnsupportedModelError(
            "several models, and adapters, are served from the CPU, got --device "
            f"{loading['device']}; give --device cpu, or one model without adapters"
        )
    names_of_options = ("dtype", "max_tokens", "cache_code", "kv_cache", "misses", "draft")
    options = {option: loading[option] for option in names_of_options}
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
    """What models that are loaded together may take, in bytes: not what the server needs."""
    return _host_budget(loading) - server_bytes(loading["max_tokens"], num_models)


def divide_host_memory(needs: Mapping[str, Need], loading: Mapping[str, Any]) -> list[Budget]:
    """The share of each model in the budget of all, without that of its adapters."""
    own = server_bytes(loading["max_tokens"], len(needs))
    shares = divide(_host_budget(loading), needs, own)
    return [part_for(loading, *each) for each in zip(shares, needs.values(), strict=True)]


def part_for(loading: Mapping[str, Any], share_bytes: int, need: Need) -> Budget:
    """The budget of a model that has a share of the bytes of all."""
    return _part(loading, share_bytes - need.adapter_bytes)


def divide(budget_bytes: int, needs: Mapping[str, Need], own_bytes: int = 0) -> list[int]:
    """Gives each model the least that it runs with, and experts of all the same share of the rest.

    The server has ``own_bytes`` before.
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
"""Seconds without a step after which a model's slots may go to another that works."""


@dataclass(slots=True, eq=False)
class _Member:
    """A model; ``is_asking`` while it waits for its turn, or has it."""

    handle: RuntimeHandle
    last_s: float
    adapter_bytes: int = 0
    is_asking: bool = False

    @property
    def _fixed_bytes(self) -> int:
        plan = self.handle.facts.host_plan
        return plan.dense_bytes + plan.reserve_bytes + self.adapter_bytes

    @property
    def taken_bytes(self) -> int:
        """What it takes of the budget, whether it is filled or not."""
        plan = self.handle.facts.host_plan
        return self._fixed_bytes + plan.num_slots * plan.slot_bytes

    def need(self, *, works: bool) -> Need:
        """Without work it needs no more than the least; slots that cannot be moved it keeps."""
        if not is_resizable(self.handle):
            return Need(self.taken_bytes, 0)
        plan, signature = self.handle.facts.host_plan, self.handle.facts.signature
        smallest = smallest_budget(plan.dense_bytes, plan.reserve_bytes, plan.slot_bytes)
        num_more = signature.num_layers * signature.num_experts - MIN_SLOTS
        more_bytes = max(0, num_more) * plan.slot_bytes if works else 0
        return Need(smallest + self.adapter_bytes, more_bytes)

    def slots_of(self, share_bytes: int) -> int:
        """Slots that a share of the budget has room for."""
        plan = self.handle.facts.host_plan
        if not is_resizable(self.handle):
            return plan.num_slots
        return (share_bytes - self._fixed_bytes) // plan.slot_bytes


class SlotSharing:
    """Divides a budget again whenever other models work than before.

    Each keeps the least that it runs with. The rest of idle models goes to those that work, as far
    as their experts fill it. A slot is freed before another is made of its bytes. Only the engine
    whose turn it is moves slots, so no model computes meanwhile.

    The budget is ``budget_bytes``, or what the models brought where that is more.
    """

    def __init__(
        self,
        turns: Turns,
        budget_bytes: int = 0,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turns = turns
        self._idle_s = idle_s
        self._clock = clock
        self._members: list[_Member] = []
        self._working: list[_Member] | None = None  # for whom the budget was divided last
        self._budget_bytes = budget_bytes
        self._room_bytes = 0  # set aside for a model that is being loaded, or of one that closes

    def add(self, handle: RuntimeHandle, adapter_bytes: int = 0) -> Turns:
        """Adds a model with its budget; gives the turns of its engine."""
        with self._turns.turn():
            member = _Member(handle, self._clock(), adapter_bytes)
            self._members.append(member)
            self._room_bytes = 0
            self._budget_bytes = max(self._budget_bytes, self._taken_bytes())
            self._working = list(self._members)
        return _MemberTurns(self._turns, lambda: self._turn(member))

    def remove(self, handle: RuntimeHandle) -> None:
        """Sets aside what a model that closes took, until `leave_room` says that it is back."""
        with self._turns.turn():
            (gone,) = (some for some in self._members if some.handle is handle)
            self._members.remove(gone)
            self._room_bytes, self._working = self._room_bytes + gone.taken_bytes, None

    def make_room(self, need: Need) -> int:
        """Takes slots of models for one that is to be loaded, and sets their bytes aside.

        Gives the bytes; 0 where models that keep only the least leave too few. They are set aside
        until ``add``, or the next call.
        """
        with self._turns.turn():
            self._room_bytes, self._working = 0, None
            needs = [*(some.need(works=True) for some in self._members), need]
            try:
                *shares, own = self._shares(needs)
            except CapacityError:
                return 0
            self._move(shares, only_fewer=True)
            room = min(own, self._budget_bytes - self._taken_bytes())
            self._room_bytes = room if room >= need.smallest_bytes else 0
            return self._room_bytes

    def leave_room(self) -> None:
        """Gives back what was set aside: a model could not be loaded, or is closed."""
        with self._turns.turn():
            self._room_bytes, self._working = 0, None

    def check(self) -> None:
        """Asserts that the models take no more than they brought."""
        assert self._taken_bytes() + self._room_bytes <= self._budget_bytes
        for member in self._members:
            member.handle.check()
            assert member.handle.stats().expert_slots == member.handle.facts.host_plan.num_slots

    @contextlib.contextmanager
    def _turn(self, member: _Member) -> Iterator[None]:
        member.is_asking = True
        with self._turns.turn():
            try:
                self._begin()
                yield
            finally:
                member.last_s, member.is_asking = self._clock(), False

    def _begin(self) -> None:
        now_s = self._clock()
        working = [
            some for some in self._members if some.is_asking or now_s - some.last_s < self._idle_s
        ]
        if working != self._working and self._divide(working):
            self._working = working

    def _taken_bytes(self) -> int:
        return sum(member.taken_bytes for member in self._members)

    def _shares(self, needs: Sequence[Need]) -> list[int]:
        budget_bytes = self._budget_bytes - self._room_bytes
        return divide(budget_bytes, {str(number): need for number, need in enumerate(needs)})

    def _divide(self, working: Collection[_Member]) -> bool:
        """Moves slots; gives whether all are where they belong."""
        shares = self._shares([some.need(works=some in working) for some in self._members])
        # what those that work have no use for stays with the others
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
                left_bytes = self._budget_bytes - self._room_bytes - self._taken_bytes()
                most = min(num_slots, plan.num_slots + left_bytes // plan.slot_bytes)
                is_whole &= resize_cache(some.handle, most) == num_slots
        return is_whole


class _MemberTurns(Turns):
    def __init__(
        self, shared: Turns, turn: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self._shared = shared
        self._turn = turn

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._turn():
            yield

    @property
    def is_wanted(self) -> bool:
        return self._shared.is_wanted
