"""The prefix cache: keys and values of beginnings of texts, in spare memory and on disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from moe_runtime.config import format_bytes
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.cache_copies import BlockCopies, drop_after
from moe_runtime.inference.sequence_cache import set_room
from moe_runtime.serving.digest_files import DIGEST_BYTES, SUM_BYTES, DigestFiles, on_disk
from moe_runtime.serving.kv_account import KVAccount, digests_of
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.scheduling import Sequence

_CHECKPOINT_FILES = ("*.safetensors", "*.gguf", "*.json")
_PACKAGES = ("moe-runtime", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class PrefixDisk:
    """A folder for a model's prefixes.

    Attributes:
        folder: made if it is absent; models and processes may share it.
        most_bytes: limit of all files in it, also of other processes.
        identity: the model and settings that compute keys and values; see `identity_of`.
    """

    folder: Path
    most_bytes: int
    identity: bytes


def identity_of(checkpoint: str | os.PathLike[str], *settings: str) -> bytes:
    """A digest of the checkpoint's files, the packages and settings: keys and values depend on
    them and on the tokens."""
    place = Path(checkpoint)
    files = [place]
    if place.is_dir():
        files = sorted(file for pattern in _CHECKPOINT_FILES for file in place.glob(pattern))
    facts = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    for file in files:
        found = file.stat()
        facts.append(f"{file.name} {found.st_size} {found.st_mtime_ns}")
    text = "\n".join((*facts, *settings))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


class PrefixFiles(DigestFiles):
    """Blocks of tokens, each in a file named by a digest of all tokens up to its end. A damaged
    file is an unknown block.

    Raises:
        ValueError: there is no room for a single block, or the folder cannot be made.
    """

    def __init__(
        self, disk: PrefixDisk, *, block_tokens: int, block_bytes: int, state_bytes: int = 0
    ) -> None:
        self._block_tokens = block_tokens
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        state = on_disk(state_bytes) if state_bytes else 0
        self.most_blocks = (disk.most_bytes - state) // on_disk(block_bytes)
        if self.most_blocks <= 0:
            least = on_disk(block_bytes) + state
            raise ValueError(
                f"--prefix-disk must be at least {format_bytes(least)}, which "
                f"{block_tokens} tokens take, got {format_bytes(disk.most_bytes)}"
            )
        text = f"{block_tokens} {block_bytes} {state_bytes}".encode()
        self._root = hashlib.blake2b(disk.identity + text, digest_size=DIGEST_BYTES).digest()
        super().__init__(disk.folder, disk.most_bytes, "prefixes")

    def find(
        self, tokens: Items[int], first: int, owner: str = "", *, with_rest: bool = False
    ) -> Iterator[torch.Tensor]:
        """The known blocks of the beginning of some tokens from number ``first`` on, as bytes.

        Blocks of another ``owner`` are not found. With the rest, the last may have fewer tokens.
        """
        path: list[Path] = []
        for index, file in enumerate(self._files(tokens, owner, with_rest=with_rest)):
            if index < first:
                continue
            block = self.read(file, self._block_bytes)
            if block is None:
                break
            path.append(file)
            yield block
        self.use(path)

    def knows(self, tokens: Items[int], index: int, owner: str) -> bool:
        """Whether there is a file of the block with a number."""
        file = next(itertools.islice(self._files(tokens, owner), index, None), None)
        return file is not None and file.exists()

    def last_state(self, tokens: Items[int], owner: str = "") -> int:
        """Blocks of the longest beginning of some tokens after which there is a state."""
        path = [*self._files(tokens, owner)]
        for num_blocks in range(len(path), 0, -1):
            if _state_file(path[num_blocks - 1]).exists():
                return num_blocks
        return 0

    def find_state(
        self, tokens: Items[int], owner: str = "", *, with_rest: bool = False
    ) -> torch.Tensor | None:
        """The state after some tokens as bytes: after their whole blocks, or with the rest."""
        *_, last = self._files(tokens, owner, with_rest=with_rest)
        file = _state_file(last)
        self.use([file])
        return self.read(file, self._state_bytes)

    def keep(
        self,
        tokens: Items[int],
        make: Callable[[int], torch.Tensor],
        owner: str = "",
        states: Mapping[int, torch.Tensor] | None = None,
        *,
        with_rest: bool = False,
    ) -> None:
        """Writes the missing whole blocks of some tokens, as far as there is room, and if asked the
        rest. ``states`` are by the number of tokens before each."""
        files = self._files(tokens, owner, with_rest=with_rest)
        path = list(itertools.islice(files, self.most_blocks))
        try:
            self.use([file for file in path if file.exists()])  # or they give way to what follows
            for index, file in enumerate(path):
                if not file.exists():
                    self.write(file, make(index).cpu().numpy().data)
            for end, state in (states or {}).items():
                if (index := -(-end // self._block_tokens) - 1) < len(path):
                    file = _state_file(path[index])
                    if not file.exists():
                        self.write(file, state.cpu().numpy().data)
                    self.use([file])
        except OSError as error:
            self.failed(error)
        self.use(path)

    def forget(self, tokens: Items[int], owner: str) -> None:
        """Removes the blocks and states of some tokens and of their rest."""
        for file in self._files(tokens, owner, with_rest=True):
            for each in (file, _state_file(file)):
                with contextlib.suppress(OSError):
                    each.unlink(missing_ok=True)

    def _files(self, tokens: Items[int], owner: str, *, with_rest: bool = False) -> Iterator[Path]:
        root = self._root
        if owner:
            root = hashlib.blake2b(root + owner.encode(), digest_size=DIGEST_BYTES).digest()
        size = self._block_tokens
        for digest in digests_of(tokens, size, root, DIGEST_BYTES, with_rest=with_rest):
            yield self.folder / digest.hex()


def _state_file(file: Path) -> Path:
    """The file of the state after a block, by the block's."""
    name = hashlib.blake2b(b"state", digest_size=DIGEST_BYTES, key=bytes.fromhex(file.name))
    return file.with_name(name.hexdigest())


LEAST_SHARED = 64
"""A sequence waits for another that computes at least this many tokens of its beginning."""
_PARTS = 8
"""Keys and values are moved in this many parts, so that both copies are never whole."""
STATE_TOKENS = 2048
"""Tokens of a long prompt between two kept states."""
ANSWER_TOKENS = 64
"""Tokens of an answer between two copies of its state; later tokens are read again."""
TAIL_TOKENS = 16
"""Tokens between a kept state and the prompt's end, which the next turn may write differently."""


def account_for(
    passes: ModelPasses, capacity: int, *, block_tokens: int
) -> KVAccount[torch.Tensor]:
    """Room for ``capacity`` tokens. Memory is reserved as if all layers kept each token, so blocks
    of fewer layers take less room."""
    block_room, state_room = block_tokens, 0
    if block_tokens and passes.states is not None:
        reserved = passes.reserved_bytes
        block_room = max(1, -(-block_tokens * passes.token_bytes // reserved))
        state_room = -(-passes.states.num_bytes // reserved)
    return KVAccount(
        capacity,
        block_tokens=block_tokens,
        least_tokens=passes.state_tokens,
        block_room=block_room,
        state_room=state_room,
    )


class Filled(NamedTuple):
    """A cache with the beginning of a text.

    Attributes:
        room: tokens that it has room for.
        num_cached: tokens in it.
        state: the state after them, which is not in the cache yet; None for none.
        num_read: tokens that came from disk.
    """

    cache: DynamicCache
    room: int
    num_cached: int
    state: torch.Tensor | None
    num_read: int = 0


class Prefixes:
    """Known beginnings of texts, in blocks of tokens, in memory and on disk.

    If the model has windows or running states, a beginning ends where these were copied: in prompts
    where `begin` plans it, in answers at their end.

    Raises:
        UnsupportedModelError: the account keeps no prefixes, and there is a disk for them.
    """

    def __init__(
        self,
        account: KVAccount[torch.Tensor],
        passes: ModelPasses,
        *,
        exact: bool,
        disk: PrefixDisk | None,
    ) -> None:
        self._account = account
        self._exact = exact
        self._copies = BlockCopies(account.block_tokens)
        self._states = passes.states if account.block_tokens else None
        self._files: PrefixFiles | None = None
        self._secret = secrets.token_hex(SUM_BYTES)
        self.num_disk_tokens = 0
        if disk is None:
            return
        if not account.block_tokens:
            raise UnsupportedModelError(
                "no prefixes are kept (they are switched off, or the model cannot go on from "
                "them), so there are none for a disk; leave --prefix-disk out"
            )
        self._files = PrefixFiles(
            disk,
            block_tokens=account.block_tokens,
            block_bytes=self._copies.learn(passes.cache_of_one_token()),
            state_bytes=0 if self._states is None else self._states.num_bytes,
        )

    @property
    def num_disk_failures(self) -> int:
        return 0 if self._files is None else self._files.num_failures

    def look_up(self, sequence: Sequence) -> None:
        """Finds a sequence's beginning before it gets room, which may evict that beginning."""
        tokens = self._wanted(sequence)
        sequence.found = self._account.find(tokens, sequence.root)
        while picture := sequence.picture_around(len(sequence.found) * self._account.block_tokens):
            tokens = tokens[: picture.first]
            sequence.found = self._account.find(tokens, sequence.root)
        if self._states is not None:
            tokens = tokens[: len(sequence.found) * self._account.block_tokens]
            sequence.found_state = self._account.state_after(tokens, sequence.root)

    def should_wait(self, sequence: Sequence, running: Items[Sequence]) -> bool:
        """Whether a sequence should wait until a running one has computed its beginning."""
        size, num_wanted = self._account.block_tokens, self._num_wanted(sequence)
        for other in running if size else ():
            end = -(-(other.num_found + LEAST_SHARED) // size) * size
            # log-probabilities of a prompt need a pass over tokens that are known already
            is_first = other.is_reading and not other.wants_prompt_logprobs
            is_before = is_first and other.order < sequence.order
            if (
                is_before
                and other.root == sequence.root
                and end <= min(num_wanted, other.read_end)
                and sequence.keys[:end] == other.keys[:end]
            ):
                if self._states is None:
                    return True
                pairs = zip(sequence.keys[:num_wanted], other.keys, strict=False)
                common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._plan(other, common)
                if any(end <= planned <= common for planned in other.cut_ends):
                    return True
        return False

    def fill(self, sequence: Sequence, cache: DynamicCache, room: int) -> Filled:
        """Copies the longest known beginning of a sequence into its empty cache, from memory.

        If the cache's room was taken from the found blocks, it grows as these are freed.
        """
        found, sequence.found = sequence.found[::-1], []
        state, sequence.found_state = sequence.found_state, None
        size, num_cached = self._account.block_tokens, 0
        is_given_up = len(self._account.find(self._wanted(sequence), sequence.root)) < len(found)
        at_once = -(-len(found) // _PARTS) if is_given_up else len(found)
        while found:
            grown = num_cached + at_once * size if len(found) > at_once else room
            set_room(cache, grown)
            for _ in range(min(at_once, len(found))):
                self._append(cache, found.pop(), num_cached, grown)
                num_cached += size
        return Filled(cache, room, num_cached, state)

    def may_be_on_disk(self, sequence: Sequence, filled: Filled) -> bool:
        if self._files is None or sequence.left or not _is_plain(sequence):
            return self._files is not None and sequence.left > 0
        first = filled.num_cached // self._account.block_tokens
        return self._files.knows(self._wanted(sequence), first, sequence.request.prefix_owner)

    def read(self, sequence: Sequence, filled: Filled, is_dropped: Callable[[], bool]) -> Filled:
        """Appends blocks on disk to the cache, until ``is_dropped``; from a thread of its own."""
        if sequence.left > filled.num_cached:
            tokens, owner = sequence.keys[: sequence.left], self._owner_of(sequence)
            back = self._read(tokens, owner, filled, is_dropped, needs_all=True)
            if back is not filled:
                return back
        if not _is_plain(sequence) or is_dropped():
            return filled
        owner, tokens = sequence.request.prefix_owner, self._wanted(sequence)
        return self._read(tokens, owner, filled, is_dropped, needs_all=False)

    def begin(self, sequence: Sequence, filled: Filled) -> None:
        """Puts the state into a sequence's cache, and plans copies of later states."""
        num_cached, size = filled.num_cached, self._account.block_tokens
        self.num_disk_tokens += filled.num_read
        self.forget(sequence)
        if self._states is None:
            return
        if filled.state is not None:
            self._states.put(filled.state, filled.cache, num_cached)
        end = len(sequence.request.prompt_ids if self._exact else sequence.tokens) - TAIL_TOKENS
        sequence.num_computed = num_cached
        for each in (*range(STATE_TOKENS, end - STATE_TOKENS // 2, STATE_TOKENS), end):
            self._plan(sequence, each)
        # another text went on differently here
        num_known = self._account.num_known(self._wanted(sequence), sequence.root)
        self._plan(sequence, num_known * size)

    def swap_out(self, sequence: Sequence) -> None:
        """Writes a sequence that is preempted to disk, if there is room."""
        files, cache, end = self._files, sequence.cache, sequence.num_computed
        if files is None or cache is None or not end or sequence.computes_all:
            return
        if -(-end // self._account.block_tokens) > files.most_blocks:
            return
        states: dict[int, torch.Tensor] = {}
        if self._states is not None:
            states[end] = self._states.new()
            if not self._states.take(states[end], cache, end):
                return
        make = partial(self._copies.copy, cache)
        files.keep(sequence.keys[:end], make, self._owner_of(sequence), states, with_rest=True)
        sequence.left = end

    def forget(self, sequence: Sequence) -> None:
        """Removes the files that are for this sequence alone: it is back, or has ended."""
        end, sequence.left = sequence.left, 0
        if self._files is not None and end and (self._exact or not _is_plain(sequence)):
            self._files.forget(sequence.keys[:end], self._owner_of(sequence))

    def _owner_of(self, sequence: Sequence) -> str:
        """The owner of a preempted sequence's files: itself if others may not use them."""
        if self._exact or not _is_plain(sequence):
            return f"{self._secret} {sequence.number}"
        return sequence.request.prefix_owner

    def cut(self, chosen: Items[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Plans copies of states in a pass over prompts, as far as there is room. The pass may have
        to end sooner for a copy."""
        cut = []
        for sequence, num_new in chosen if self._states is not None else ():
            first = sequence.num_computed
            ends = sorted(end for end in sequence.cut_ends if first < end <= first + num_new)
            if ends and self._states is not None and not self._states.can_cut:
                ends, num_new = ends[:1], ends[0] - first
            for end in ends:
                self._keep_state(sequence, end)
            cut.append((sequence, num_new))
        return cut or [*chosen]

    def forget_cuts(self, sequence: Sequence) -> None:
        """Drops planned copies after a failed pass."""
        for end in sequence.cuts:
            self._account.drop_state(sequence.keys[:end], sequence.root)
        sequence.cuts.clear()

    def keep(self, sequence: Sequence) -> None:
        """Keeps the computed whole blocks of a sequence, as far as there is room."""
        cache, tokens = sequence.cache, self._computed(sequence)
        if cache is None or not self._account.block_tokens:
            return
        num_kept = self._account.keep(
            tokens, lambda index: self._copies.copy(cache, index), sequence.root
        )
        self._write(cache, tokens, sequence)
        self._drop_states(sequence, num_kept)

    def keep_answer(self, sequence: Sequence) -> None:
        """Replaces the copied state of an answer after every `ANSWER_TOKENS`."""
        is_here = sequence.cache is not None and sequence.cache.layers  # not in a row
        if is_here and not sequence.num_computed % ANSWER_TOKENS:
            self._take_last(sequence)
            sequence.cuts.clear()

    def take_over(self, sequence: Sequence, release: Callable[[], None]) -> None:
        """Keeps the whole blocks of a finished sequence, in its own room.

        If memory is short, the cache shrinks from its end as blocks are copied.
        """
        cache, size = sequence.cache, self._account.block_tokens
        if cache is None or not size:
            return
        self._take_last(sequence)
        tokens, root = self._computed(sequence), sequence.root
        count, known = len(tokens) // size, self._account.num_known(tokens, root)
        needed = count * self._account.block_room + self._account.state_room
        # the room of a row does not belong to the sequence in it
        if needed <= self._account.available or not self._account.room_of(sequence):
            self.keep(sequence)
            return
        self._write(cache, tokens, sequence)
        blocks: dict[int, torch.Tensor] = {}
        at_once = max(1, -(-(count - known) // _PARTS))
        for end in range(count, known, -at_once):
            first = max(end - at_once, known)
            blocks |= {index: self._copies.copy(cache, index) for index in range(first, end)}
            set_room(cache, first * size)
        release()
        self._drop_states(sequence, self._account.keep(tokens, blocks.__getitem__, root))

    def _plan(self, sequence: Sequence, end: int) -> None:
        """Plans a copy of the state after the last block before ``end``."""
        size = self._account.block_tokens
        while picture := sequence.picture_around(end := end // size * size):
            end = picture.first
        if end > sequence.num_computed:
            sequence.cut_ends.add(end)

    def _keep_state(self, sequence: Sequence, end: int) -> bool:
        def make() -> torch.Tensor:
            assert self._states is not None
            state = sequence.cuts[end] = self._states.new()
            return state

        is_kept = self._account.keep_state(sequence.keys[:end], make, sequence.root)
        if is_kept:
            sequence.state_end = end
        return is_kept

    def _take_last(self, sequence: Sequence) -> None:
        """Keeps the state after a sequence's last block instead of the last one in its answer."""
        size, last, cache = self._account.block_tokens, sequence.state_end, sequence.cache
        end = sequence.num_computed // size * size if size else 0
        if self._states is None or self._exact or end <= last or cache is None:
            return
        if not self._keep_state(sequence, end):
            return
        state, behind = sequence.cuts.get(end), sequence.num_computed - end
        if state is not None and not self._states.take(state, cache, end, behind):
            self._account.drop_state(sequence.keys[:end], sequence.root)
            del sequence.cuts[end]
            sequence.state_end = last
        elif last > sequence.read_end:
            self._account.drop_state(sequence.keys[:last], sequence.root)

    def _drop_states(self, sequence: Sequence, num_kept: int) -> None:
        """Drops states after blocks that found no room."""
        end = sequence.state_end
        for each in {*sequence.cuts, end} if self._states is not None and end else ():
            if each > num_kept * self._account.block_tokens:
                self._account.drop_state(sequence.keys[:each], sequence.root)
        sequence.cuts.clear()

    def _wanted(self, sequence: Sequence) -> Items[int]:
        """Tokens to look for; the last token is always computed."""
        return sequence.keys[: self._num_wanted(sequence)]

    def _num_wanted(self, sequence: Sequence) -> int:
        if sequence.computes_all:
            return 0
        return len(sequence.request.prompt_ids if self._exact else sequence.tokens) - 1

    def _computed(self, sequence: Sequence) -> Items[int]:
        """Computed tokens that others may use; the last state is after them."""
        end = sequence.num_computed
        end = min(end, sequence.read_end) if self._exact else end
        return sequence.keys[: end if self._states is None else sequence.state_end]

    def _read(
        self,
        tokens: Items[int],
        owner: str,
        filled: Filled,
        is_dropped: Callable[[], bool],
        *,
        needs_all: bool,
    ) -> Filled:
        """Appends the blocks of some tokens that are on disk; with ``needs_all`` all or none."""
        files, states, size = self._files, self._states, self._account.block_tokens
        assert files is not None
        if states is not None and not needs_all:
            tokens = tokens[: files.last_state(tokens, owner) * size]
        begin = end = filled.num_cached
        for block in files.find(tokens, begin // size, owner, with_rest=needs_all):
            if is_dropped():
                break
            count = min(size, len(tokens) - end)
            self._append(filled.cache, block, end, filled.room, count)
            end += count
        state, is_all = filled.state, end == len(tokens)
        if states is not None and end > begin:
            state = files.find_state(tokens, owner, with_rest=needs_all) if is_all else None
        if (needs_all and not is_all) or (states is not None and end > begin and state is None):
            drop_after(filled.cache, begin)
            set_room(filled.cache, filled.room)
            return filled
        return filled._replace(num_cached=end, state=state, num_read=end - begin)

    def _write(self, cache: DynamicCache, tokens: Items[int], sequence: Sequence) -> None:
        request = sequence.request
        if self._files is not None and _is_plain(sequence):
            make = partial(self._copies.copy, cache)
            self._files.keep(tokens, make, request.prefix_owner, sequence.cuts)

    def _append(
        self,
        cache: DynamicCache,
        block: torch.Tensor,
        num_cached: int,
        room: int,
        num_tokens: int | None = None,
    ) -> None:
        self._copies.append(cache, block, num_tokens)
        if not num_cached:  # the cache has tensors from now on
            set_room(cache, room)


def _is_plain(sequence: Sequence) -> bool:
    """Whether its prefixes may be on disk."""
    return sequence.request.adapter is None and not sequence.request.pictures
