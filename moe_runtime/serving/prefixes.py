"""Keys and values of beginnings of texts: in memory that no sequence needs, and on the disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import DynamicCache

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.serving.kv_account import KVAccount
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.prefix_files import PrefixDisk, PrefixFiles
from moe_runtime.serving.sequence_cache import BlockCopies, set_room


class Prefixes:
    """What is known of the beginnings of texts, in blocks of tokens.

    Attributes:
        num_disk_tokens: tokens that were found on the disk.
    """

    def __init__(
        self, account: KVAccount[torch.Tensor], passes: ModelPasses, disk: PrefixDisk | None
    ) -> None:
        """Knows what the disk has.

        Args:
            account: of the memory, which knows how many tokens a block has.
            passes: of the model.
            disk: where blocks are kept too, but for those of adapters.

        Raises:
            UnsupportedModelError: the account keeps no prefixes, and there is a disk for them.
            ValueError: the disk has no room for a block.
            OSError: its folder cannot be made or read.
        """
        self._account = account
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
        """Blocks that could not be written to the disk."""
        return 0 if self._files is None else self._files.num_failures

    def fill(self, cache: DynamicCache, tokens: Sequence[int], root: int, room: int) -> int:
        """Puts the longest known beginning of some tokens into an empty cache.

        Args:
            cache: of the sequence.
            tokens: from its beginning.
            root: 0, or another number of what else computes them.
            room: tokens that the cache is given room for, if anything is put into it.

        Returns:
            Tokens that it has now.
        """
        size, num_cached = self._account.block_tokens, 0
        for block in self._account.find(tokens, root):
            self._append(cache, block, num_cached, room)
            num_cached += size
        if self._files is not None and not root:
            for block in self._files.find(tokens, num_cached // size):
                self._append(cache, block, num_cached, room)
                num_cached += size
                self.num_disk_tokens += size
        return num_cached

    def keep(self, cache: DynamicCache, tokens: Sequence[int], root: int) -> None:
        """Keeps the whole blocks of some tokens of a cache, as far as there is place for them."""

        def copy(index: int) -> torch.Tensor:
            return self._copies.copy(cache, index)

        self._account.keep(tokens, copy, root)
        if self._files is not None and not root:
            self._files.keep(tokens, copy)

    def _append(self, cache: DynamicCache, block: torch.Tensor, num_cached: int, room: int) -> None:
        self._copies.append(cache, block)
        if not num_cached:  # now that the cache has tensors
            set_room(cache, room)
