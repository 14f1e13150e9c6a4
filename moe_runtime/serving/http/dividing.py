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
    """What a model needs of a budget, in bytes: to run, and beyond that until all experts fit."""

    smallest_bytes: int
    experts_bytes: int


def divide_host_memory(
    names: Sequence[str],
    folders: Sequence[Path],
    adapters: Sequence[Mapping[str, AdapterFolder]],
    loading: Mapping[str, Any],
    adapter_bytes: int | None = None,
) -> list[Budget]:
    """The share of each model in the budget of all, without that of its adapters.

    Raises CapacityError, UnsupportedModelError for a GPU, or ValueError for ``adapter_bytes``.
    """
    if not is_on_cpu(loading):
        raise UnsupportedModelError(
            "several models, and adapters, are served from the CPU, got --device "
            f"{loading['device']}; give --device cpu, or one model without adapters"
        )
    budget = _host_budget(loading)
    options = {
        option: loading[option] for option in ("dtype", "max_tokens", "cache_code", "misses")
    }
    needs, taken = {}, []
    for name, folder, own in zip(names, folders, adapters, strict=True):
        found = inspect_checkpoint(folder, **options)
        smallest = found.smallest_budget_bytes
        whole = found.dense_bytes + found.reserve_bytes + found.total_experts * found.slot_bytes
        workspace = max((one.workspace_bytes(found.max_tokens) for one in own.values()), default=0)
        taken.append(workspace + resident_bytes(own, adapter_bytes))
        needs[name] = Need(smallest + taken[-1], max(0, whole - smallest))
    shares = divide(budget, needs, server_bytes(loading["max_tokens"], len(names)))
    return [_part(loading, share - own) for share, own in zip(shares, taken, strict=True)]


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
    is_asking: bool = False

    @property
    def taken_bytes(self) -> int:
        """What it takes of the budget, whether it is filled or not."""
        plan = self.handle.facts.host_plan
        return plan.dense_bytes + plan.reserve_bytes + plan.num_slots * plan.slot_bytes

    def need(self, *, works: bool) -> Need:
        """Without work it needs no more than the least."""
        plan, signature = self.handle.facts.host_plan, self.handle.facts.signature
        smallest = smallest_budget(plan.dense_bytes, plan.reserve_bytes, plan.slot_bytes)
        num_more = signature.num_layers * signature.num_experts - MIN_SLOTS
        return Need(smallest, max(0, num_more) * plan.slot_bytes if works else 0)


class SlotSharing:
    """Divides a budget again whenever other models work than before.

    Each keeps the least that it runs with. The rest of idle models goes to those that work, as far
    as their experts fill it. A slot is freed before another is made of its bytes. Only the engine
    whose turn it is moves slots, so no model computes meanwhile.
    """

    def __init__(
        self, turns: Turns, *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._turns = turns
        self._idle_s = idle_s
        self._clock = clock
        self._members: list[_Member] = []
        self._working: list[_Member] | None = None  # for whom the budget was divided last
        self._budget_bytes = 0

    def add(self, handle: RuntimeHandle) -> Turns:
        """Adds a model with its budget; gives the turns of its engine. Slots that cannot be moved
        stay."""
        if not is_resizable(handle):
            return self._turns
        member = _Member(handle, self._clock())
        self._members.append(member)
        self._budget_bytes += member.taken_bytes
        self._working = list(self._members)
        return _MemberTurns(self._turns, lambda: self._turn(member))

    def check(self) -> None:
        """Asserts that the models take no more than they brought."""
        assert sum(member.taken_bytes for member in self._members) <= self._budget_bytes
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

    def _divide(self, working: Collection[_Member]) -> bool:
        """Moves slots; gives whether all are where they belong."""
        needs = [some.need(works=some in working) for some in self._members]
        shares = divide(self._budget_bytes, {str(n): need for n, need in enumerate(needs)})
        # what those that work have no use for stays with the others
        rest = [
            Need(share, 0 if some in working else some.need(works=True).experts_bytes)
            for share, some in zip(shares, self._members, strict=True)
        ]
        shares = divide(self._budget_bytes, {str(n): need for n, need in enumerate(rest)})
        wanted = []
        for some, share in zip(self._members, shares, strict=True):
            plan = some.handle.facts.host_plan
            num_slots = (share - plan.dense_bytes - plan.reserve_bytes) // plan.slot_bytes
            wanted.append((some, plan, num_slots))
        is_whole = True
        for some, plan, num_slots in wanted:
            if num_slots < plan.num_slots:
                is_whole &= resize_cache(some.handle, num_slots) == num_slots
        for some, plan, num_slots in wanted:
            if num_slots > plan.num_slots:
                left_bytes = self._budget_bytes - sum(one.taken_bytes for one in self._members)
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
