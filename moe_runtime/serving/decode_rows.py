"""Decoding in rows on a GPU: a step is recorded once and replayed."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from transformers.cache_utils import DynamicCache

from moe_runtime.inference.sequence_cache import RowMemory
from moe_runtime.serving.kv_account import PIECE, rounded_up
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import EngineOptions
from moe_runtime.serving.scheduling import Failure, Scheduler, Sequence

LEAST_TOKENS = 64
"""Tokens of the shortest row that is worth its memory."""


class InRow(DynamicCache):
    """The cache of a sequence while its keys and values are in a row."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row


def size_of_rows(options: EngineOptions, capacity: int) -> tuple[int, int]:
    """Number of rows, and tokens of each, in half of the memory for tokens; none if too short."""
    num_rows = min(options.decode_rows, options.most_running, capacity // 2 // LEAST_TOKENS)
    # exact bits must not depend on the order of arrival
    if not num_rows or (options.exact and num_rows < options.most_running):
        return 0, 0
    return num_rows, capacity // 2 // num_rows // PIECE * PIECE


class RowDecoding:
    """Rows for sequences that decode, with room of their own in the account.

    A sequence whose prompt was read gets a free row and gives its own room back. It stays until it
    ends, loses its cache, or outgrows the row. Sequences in rows decode in one pass, and take the
    first rows without a gap. Memory is allocated for the first sequence.
    """

    def __init__(self, passes: ModelPasses, scheduler: Scheduler, options: EngineOptions) -> None:
        self._passes, self._scheduler, self._account = passes, scheduler, scheduler.account
        self._exact = options.exact
        self._num_rows = self._num_tokens = 0
        if passes.can_have_rows:
            self._num_rows, self._num_tokens = size_of_rows(options, self._account.capacity)
        self._memory: RowMemory | None = None
        self._held: list[tuple[Sequence, InRow]] = []
        self._open()

    @property
    def room(self) -> int:
        """Tokens that rows take of the account."""
        return self._account.room_of(self)

    @property
    def most_request_tokens(self) -> int:
        """Tokens that a request may have. Rows make room for it, unless bits depend on them."""
        left = self._account.capacity - (self.room if self._exact else 0)
        return left // PIECE * PIECE

    @property
    def idle_tokens(self) -> int:
        num_held = sum(sequence.cache is own for sequence, own in tuple(self._held))
        return max(0, self.room - num_held * self._num_tokens)

    def close(self) -> None:
        self._memory = None
        self._held.clear()
        self._account.release(self)

    def divide(self) -> tuple[list[list[Sequence]], list[Sequence]]:
        """Gives decoding sequences a free row or room for one more token.

        Returns the sequences in rows, by pass, and the others.
        """
        waiting = self._scheduler.waiting
        if not waiting:
            self._open()
        elif self.room and not self._exact:
            self._make_way(rounded_up(len(waiting[0].tokens) + 1))
        self._admit(self._scheduler.decoding())
        others = self._scheduler.make_room(
            each
            for each in self._scheduler.decoding()
            if not isinstance(each.cache, InRow) or each.num_computed >= self._num_tokens
        )
        for sequence in others:
            with Failure() as failure:
                self.take_out(sequence)
            if failure.has_failed:
                self._scheduler.preempt(sequence)
        return self._groups(), [each for each in others if each.cache is not None]

    def take_out(self, sequence: Sequence, *, is_view: bool = False) -> None:
        """Gives a sequence in a row its own cache, or one that is a view of the row."""
        if isinstance(sequence.cache, InRow):
            assert self._memory is not None
            cache = self._passes.new_cache()
            row, num_tokens = sequence.cache.row, sequence.num_computed
            self._memory.read(row, num_tokens, cache, is_view=is_view)
            sequence.cache = cache

    def decode(self, group: Items[Sequence]) -> torch.Tensor:
        assert self._memory is not None
        assert isinstance(group[0].cache, InRow)
        tokens = [sequence.tokens[sequence.num_computed] for sequence in group]
        places = [sequence.num_computed for sequence in group]
        cache, inputs = self._memory.step(group[0].cache.row, tokens, places)
        return self._passes.step_of_rows(cache, inputs, group)

    def check(self) -> None:
        """Asserts that rows and sequences agree."""
        self._tidy()
        assert self.room in (0, self._num_rows * self._num_tokens)
        assert len(self._held) <= (self._num_rows if self.room else 0)
        for row, (sequence, own) in enumerate(self._held):
            assert own.row == row
            assert not self._account.room_of(sequence)
            assert sequence.num_computed <= self._num_tokens

    def _open(self) -> None:
        if self._num_rows:
            self._account.reserve(self, self._num_rows * self._num_tokens)

    def _make_way(self, num_tokens: int) -> None:
        """Gives the rows up for a waiting sequence that needs their room."""
        if num_tokens > self._account.capacity - self.room:
            self._tidy()
            for sequence, _ in self._held:
                with Failure():
                    self.take_out(sequence, is_view=True)
                self._scheduler.make_way(sequence)
            self.close()

    def _admit(self, sequences: Items[Sequence]) -> None:
        self._tidy()
        for sequence in sequences:
            if not self.room or len(self._held) == self._num_rows:
                return
            if self._may_enter(sequence):
                with Failure():  # it stays in its own cache
                    self._enter(sequence)
                if self._memory is None:  # out of memory
                    self._num_rows = 0
                    self.close()

    def _groups(self) -> list[list[Sequence]]:
        self._tidy()
        together = [sequence for sequence, _ in self._held]
        if self._exact or any(sequence.is_alone for sequence in together):
            return [[sequence] for sequence in together]
        return [together] if together else []

    def _tidy(self) -> None:
        """Frees the rows of sequences that left, and moves the last rows into them."""
        for row in reversed(range(len(self._held))):
            sequence, own = self._held[row]
            if sequence.cache is own:
                continue
            last = self._held[-1]
            if row < len(self._held) - 1:
                assert self._memory is not None
                self._memory.move(last[1].row, row)
                last[1].row, self._held[row] = row, last
            self._held.pop()

    def _may_enter(self, sequence: Sequence) -> bool:
        request = sequence.request
        whole = len(request.prompt_ids) + request.max_new_tokens
        return (
            not isinstance(sequence.cache, InRow)
            and request.adapter is None
            and not request.pictures
            and min(whole, sequence.num_computed + PIECE) <= self._num_tokens
        )

    def _enter(self, sequence: Sequence) -> None:
        cache = sequence.cache
        assert cache is not None
        if self._memory is None:
            self._memory = self._passes.new_rows(cache, self._num_rows, self._num_tokens)
        own = InRow(len(self._held))
        self._memory.write(own.row, cache, sequence.num_computed)
        self._held.append((sequence, own))
        sequence.cache, sequence.room = own, 0
        self._account.release(sequence)
