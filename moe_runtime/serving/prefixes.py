"""Keys and values of beginnings of texts: in memory that no sequence needs, and on the disk."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

import torch
from transformers.cache_utils import DynamicCache

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.serving.caches.kv_account import KVAccount
from moe_runtime.serving.caches.prefix_files import PrefixDisk, PrefixFiles
from moe_runtime.serving.caches.sequence_cache import BlockCopies, set_room
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import GenerationRequest
from moe_runtime.serving.sequences import Sequence

LEAST_SHARED = 64
"""A sequence waits for another that computes so many tokens of its beginning; fewer are worth no
waiting."""
_PARTS = 8
"""Keys and values that move from one place to another do so in so many parts."""


class Prefixes:
    """What is known of the beginnings of texts, in blocks of tokens.

    Attributes:
        num_disk_tokens: tokens that were found on the disk.
    """

    def __init__(
        self,
        account: KVAccount[torch.Tensor],
        passes: ModelPasses,
        *,
        exact: bool,
        disk: PrefixDisk | None,
    ) -> None:
        """Knows what the disk has.

        Args:
            account: of the memory, which knows how many tokens a block has.
            passes: of the model.
            exact: leaves out answers, which other kernels compute.
            disk: where blocks are kept too, but for those of adapters.

        Raises:
            UnsupportedModelError: the account keeps no prefixes, and there is a disk for them.
            ValueError: the disk has no room for a block, or its folder cannot be made.
        """
        self._account = account
        self._exact = exact
        self._copies = BlockCopies(account.block_tokens)
        self._files: PrefixFiles | None = None
        self.num_disk_tokens = 0
        if disk is None:
            return
        if not account.block_tokens:
            raise UnsupportedModelError(
                "the model keeps no prefixes (it has windows or running states), so there are none "
                "for a disk; leave --prefix-disk out"
            )
        block_bytes = self._copies.learn(passes.cache_of_one_token())
        self._files = PrefixFiles(disk, block_tokens=account.block_tokens, block_bytes=block_bytes)

    @property
    def num_disk_failures(self) -> int:
        """Times that blocks could not be written to the disk."""
        return 0 if self._files is None else self._files.num_failures

    def look_up(self, sequence: Sequence) -> None:
        """Finds a sequence's beginning before it gets room, which may be that very memory."""
        sequence.found = self._account.find(self._wanted(sequence), sequence.root)

    def are_coming(self, sequence: Sequence, running: Items[Sequence]) -> bool:
        """Whether a sequence better waits until one that runs has computed its beginning.

        That one's prompt comes first in any case. When it is read, or given up, nobody waits for it
        any more, whatever was kept.

        Args:
            sequence: waits.
            running: all that run.
        """
        size, num_wanted = self._account.block_tokens, self._num_wanted(sequence)
        for other in running if size else ():
            end = -(-(other.num_found + LEAST_SHARED) // size) * size
            # one that tells of its prompt's log-probabilities computes what is known already, too
            is_first = other.is_reading and not other.wants_prompt_logprobs
            is_before = is_first and other.order < sequence.order
            if (
                is_before
                and other.root == sequence.root
                and end <= min(num_wanted, other.read_end)
                and sequence.tokens[:end] == other.tokens[:end]
            ):
                return True
        return False

    def fill(self, sequence: Sequence, cache: DynamicCache, room: int) -> int:
        """Puts the longest known beginning of a sequence into its empty cache.

        Where the cache's room was taken from the very blocks that were found, it grows as these are
        let go of: both are never there at once.

        Args:
            sequence: what memory had of it was looked up, and is let go of.
            cache: the sequence's.
            room: tokens that the cache is given room for, if anything is put into it.

        Returns:
            Tokens that it has now.
        """
        tokens, root = self._wanted(sequence), sequence.root
        found, sequence.found = sequence.found[::-1], []
        size, num_cached = self._account.block_tokens, 0
        is_given_up = len(self._account.find(tokens, root)) < len(found)
        at_once = -(-len(found) // _PARTS) if is_given_up else len(found)
        while found:
            grown = num_cached + at_once * size if len(found) > at_once else room
            set_room(cache, grown)
            for _ in range(min(at_once, len(found))):
                self._append(cache, found.pop(), num_cached, grown)
                num_cached += size
        if self._files is not None and sequence.request.adapter is None:
            owner = sequence.request.prefix_owner
            for block in self._files.find(tokens, num_cached // size, owner):
                self._append(cache, block, num_cached, room)
                num_cached += size
                self.num_disk_tokens += size
        return num_cached

    def keep(self, sequence: Sequence) -> None:
        """Keeps the whole blocks that are computed of a sequence, as far as there is place."""
        cache, tokens = sequence.cache, self._computed(sequence)
        if cache is None or not self._account.block_tokens:
            return
        self._account.keep(tokens, lambda index: self._copies.copy(cache, index), sequence.root)
        self._write(cache, tokens, sequence.request)

    def take_over(self, sequence: Sequence, release: Callable[[], None]) -> None:
        """Keeps the whole blocks of a sequence that ends, whose room becomes theirs.

        Where there is no other place for them, the cache shrinks as they are copied, from its end.

        Args:
            sequence: needs its cache no more.
            release: takes its room back.
        """
        cache, size = sequence.cache, self._account.block_tokens
        if cache is None or not size:
            return
        tokens, root = self._computed(sequence), sequence.root
        count, known = len(tokens) // size, len(self._account.find(tokens, root))
        # a row's room is nobody's who ends
        if count * size <= self._account.available or not self._account.room_of(sequence):
            self.keep(sequence)
            return
        self._write(cache, tokens, sequence.request)
        blocks: dict[int, torch.Tensor] = {}
        at_once = -(-(count - known) // _PARTS)
        for end in range(count, known, -at_once):
            first = max(end - at_once, known)
            blocks |= {index: self._copies.copy(cache, index) for index in range(first, end)}
            set_room(cache, first * size)
        release()
        self._account.keep(tokens, blocks.__getitem__, root)

    def _wanted(self, sequence: Sequence) -> Items[int]:
        """Tokens that may be known: the last one is computed in any case, for what follows it."""
        whole = sequence.request.prompt_ids if self._exact else sequence.tokens
        return whole[: self._num_wanted(sequence)]

    def _num_wanted(self, sequence: Sequence) -> int:
        if sequence.wants_prompt_logprobs:
            return 0
        return len(sequence.request.prompt_ids if self._exact else sequence.tokens) - 1

    def _computed(self, sequence: Sequence) -> Items[int]:
        end = sequence.num_computed
        return sequence.tokens[: min(end, sequence.read_end) if self._exact else end]

    def _write(self, cache: DynamicCache, tokens: Items[int], request: GenerationRequest) -> None:
        if self._files is not None and request.adapter is None:
            make = partial(self._copies.copy, cache)
            self._files.keep(tokens, make, request.prefix_owner)

    def _append(self, cache: DynamicCache, block: torch.Tensor, num_cached: int, room: int) -> None:
        self._copies.append(cache, block)
        if not num_cached:  # now that the cache has tensors
            set_room(cache, room)
