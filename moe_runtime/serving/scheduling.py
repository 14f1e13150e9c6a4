"""Who runs, who waits, and what the next step computes. No model, no tensors, no clock."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from operator import attrgetter
from typing import Any, Protocol

from moe_runtime.serving.caches.kv_account import PIECE, KVAccount, rounded_up
from moe_runtime.serving.requests import GenerationRequest
from moe_runtime.serving.sequences import Sequence

_ORDER = attrgetter("order")


def groups_of(sequences: Iterable[Sequence], most_together: int) -> list[list[Sequence]]:
    """Those that may decode in one pass, as many as may; those of one adapter side by side."""
    together: list[Sequence] = []
    alone: list[Sequence] = []
    for sequence in sequences:
        (alone if sequence.is_alone else together).append(sequence)
    together.sort(key=attrgetter("root"))
    groups = [
        together[first : first + most_together] for first in range(0, len(together), most_together)
    ]
    return [*groups, *([sequence] for sequence in alone)]


def beside_prompts(
    decoding: Iterable[Sequence], chosen: Items[tuple[Sequence, int]]
) -> list[Sequence]:
    """Those that may go on by one token in the pass of chosen prompts; it reads an expert once."""
    if not chosen:
        return []
    first = chosen[0][0]
    if first.is_alone or first.wants_prompt_logprobs:
        return []
    return [sequence for sequence in decoding if not sequence.is_alone]


class AdapterRoom(Protocol):
    """The room for adapters, see `Adapters`."""

    def reserve(self, sequence: Hashable, name: str | None) -> bool:
        """Gives a sequence's adapter its memory, if it can be had."""
        ...

    def release(self, sequence: Hashable) -> None:
        """A sequence has no adapter any more."""


class Scheduler:
    """Sequences that wait and run, each list in the order of priority, turn and arrival.

    Clients take turns: a request gets the number of the turn that runs, or the next one behind its
    client's last, so that whoever asks little does not wait for all that others asked (start-time
    fair queueing, Goyal, Vin and Cheng 1996, within a priority, with a cost of one a request).

    A sequence runs when its whole prompt and its adapter have room. When those that run need more
    room than there is, the last of them loses what it has, waits, and is computed again later.

    Attributes:
        account: the room for keys and values.
        waiting: without a cache.
        running: with one.
        num_preemptions: times that a sequence lost its cache to another.
    """

    def __init__(
        self,
        account: KVAccount[Any],
        *,
        most_running: int,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """Begins with nobody; without ``adapters`` no request has one."""
        self.account = account
        self._adapters = adapters
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._most_running = most_running

    def add(self, sequence: Sequence) -> None:
        """A sequence waits from now on, for the first time."""
        sequence.turn = self._turn_of(sequence.request)
        self._wait(sequence)

    def next_to_start(
        self,
        look_up: Callable[[Sequence], None],
        is_held: Callable[[Sequence, Items[Sequence]], bool] = lambda waiting, running: False,
    ) -> Sequence | None:
        """The first of those who wait, if it may run now; it has its room then.

        Nobody overtakes it: it starts as soon as there is room. Where it is held back, those behind
        it go on with what it leaves them of the places and of the room.

        Args:
            look_up: called before room is taken from prefixes for it.
            is_held: whether one that waits had better wait for one of those that run.
        """
        num_held = held_tokens = 0
        for index, first in enumerate(self.waiting):
            if len(self.running) + num_held >= self._most_running:
                return None
            needed = len(first.tokens) + 1
            # those that run grow too, and would take it away again at once
            spare = PIECE * len(self.running) + held_tokens
            if needed + spare > self.account.available:
                return None
            if is_held(first, self.running):
                num_held += 1
                held_tokens += rounded_up(needed)
                continue
            adapter = first.request.adapter
            if self._adapters is not None and not self._adapters.reserve(first, adapter):
                return None
            look_up(first)
            if not self.account.reserve(first, needed):
                first.found = []
                self._release(first)
                return None
            self.running.append(self.waiting.pop(index))
            self.running.sort(key=_ORDER)
            return first
        return None

    def make_room(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Gives sequences that run room for one more token each.

        Returns:
            Those that have it; others, and maybe some that were not named, wait again.
        """
        ready = []
        for sequence in sequences:
            while sequence.cache is not None:
                if self.account.reserve(sequence, sequence.num_computed + 1):
                    ready.append(sequence)
                    break
                # one in a row of `DecodeRows` has no room to give
                has_room = (s for s in self.running if s is sequence or self.account.room_of(s))
                self.preempt([*has_room][-1])
                self.num_preemptions += 1
        return [sequence for sequence in ready if sequence.cache is not None]

    def preempt(self, sequence: Sequence) -> None:
        """A sequence that runs loses its cache and waits."""
        self.remove(sequence)
        sequence.stop()
        self._wait(sequence)

    def _turn_of(self, request: GenerationRequest) -> int:
        running, waiting = (
            [other for other in some if other.request.priority == request.priority]
            for some in (self.running, self.waiting)
        )
        now = max((other.turn for other in running), default=None)
        if now is None:
            now = min((other.turn for other in waiting), default=0)
        own = (o.turn + 1 for o in (*running, *waiting) if o.request.client == request.client)
        return max(now, max(own, default=0))

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """A sequence neither waits nor runs any more."""
        for some in (self.running, self.waiting):
            if sequence in some:
                some.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.account.release(sequence)
        if self._adapters is not None:
            self._adapters.release(sequence)

    def prompts(
        self, most_tokens: int, most_logprobs: int, *, exact: bool
    ) -> list[tuple[Sequence, int]]:
        """The next tokens of prompts to read in one pass: sequences, and how many of each.

        Args:
            most_tokens: in all.
            most_logprobs: of a prompt whose log-probabilities are asked for.
            exact: one prompt alone, cut where it would be cut whatever else runs.
        """
        chosen: list[tuple[Sequence, int]] = []
        left = most_tokens
        for sequence in self.running:
            if not left or not sequence.is_reading:
                continue
            num_new = sequence.read_end - sequence.num_computed
            if exact or sequence.is_alone or sequence.wants_prompt_logprobs:
                if chosen:
                    continue
                piece = most_tokens
                if sequence.wants_prompt_logprobs:
                    piece = min(most_tokens, most_logprobs)
                return [(sequence, min(num_new, piece - sequence.num_computed % piece))]
            chosen.append((sequence, min(num_new, left)))
            left -= chosen[-1][1]
        return chosen

    def decoding(self) -> list[Sequence]:
        """The sequences that go on by one token."""
        return [sequence for sequence in self.running if not sequence.is_reading]

    def check(self, room_of_rows: int = 0) -> None:
        """Proves that lists and room agree.

        Args:
            room_of_rows: tokens that have room in rows, of whoever is there.

        Raises:
            AssertionError: they do not.
        """
        self.account.check()
        for some in (self.waiting, self.running):
            assert some == sorted(some, key=_ORDER)
        for sequence in self.waiting:
            assert sequence.cache is None
            assert not self.account.room_of(sequence)
        held = room_of_rows
        for sequence in self.running:
            room = self.account.room_of(sequence)
            assert sequence.num_computed <= room or (room_of_rows and not room)
            assert sequence not in self.waiting
            held += room
        assert held == self.account.sequence_tokens
