"""One budget of slots for several models: who works takes from who does not.

Source: Prabhakar et al., "SambaNova SN40L: Scaling the AI Memory Wall with Dataflow and
Composition of Experts" (2024).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from moe_runtime.inference.budget import MIN_SLOTS, smallest_budget
from moe_runtime.inference.handle import RuntimeHandle, is_resizable, resize_cache
from moe_runtime.serving.http.models.dividing import Need, divide
from moe_runtime.serving.turns import Turns

IDLE_S = 10.0
"""Seconds without a step after which a model's slots may go to another that works."""


@dataclass(slots=True, eq=False)
class _Member:
    """A model.

    Attributes:
        handle: of its experts.
        last_s: when its last step ended.
        is_asking: whether it waits for its turn, or has it.
    """

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

    Each keeps the least that it runs with. What those that do not work had beyond that goes to
    those that work, as far as their experts fill it, and comes back when they are asked again. A
    slot is given up before another is made of its bytes. Only the engine whose turn it is moves
    slots, so that nobody computes meanwhile.
    """

    def __init__(
        self, turns: Turns, *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins without models.

        Args:
            turns: of their engines.
            idle_s: seconds without a step after which a model does not work.
            clock: seconds.
        """
        self._turns = turns
        self._idle_s = idle_s
        self._clock = clock
        self._members: list[_Member] = []
        self._working: list[_Member] | None = None  # for whom the budget was divided last
        self._budget_bytes = 0

    def add(self, handle: RuntimeHandle) -> Turns:
        """A model brings what it was loaded with; gives the turns of its engine.

        One whose slots cannot be moved keeps them.
        """
        if not is_resizable(handle):
            return self._turns
        member = _Member(handle, self._clock())
        self._members.append(member)
        self._budget_bytes += member.taken_bytes
        self._working = list(self._members)
        return _MemberTurns(self._turns, lambda: self._turn(member))

    def check(self) -> None:
        """Proves that the models take no more than they brought.

        Raises:
            AssertionError: they do.
        """
        assert sum(member.taken_bytes for member in self._members) <= self._budget_bytes
        for member in self._members:
            member.handle.check()
            assert member.handle.stats().expert_slots == member.handle.facts.host_plan.num_slots

    @contextlib.contextmanager
    def _turn(self, member: _Member) -> Iterator[None]:
        """A model waits for its turn, and makes a step within the block."""
        member.is_asking = True
        with self._turns.turn():
            try:
                self._begin()
                yield
            finally:
                member.last_s, member.is_asking = self._clock(), False

    def _begin(self) -> None:
        """A model begins a step; a step of each of the others may have come before it."""
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
    """The turns of one model's engine, which share those of all."""

    def __init__(
        self, shared: Turns, turn: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self._shared = shared
        self._turn = turn

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for its turn, and has it within the block."""
        with self._turn():
            yield

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the turn that somebody else has."""
        return self._shared.is_wanted
