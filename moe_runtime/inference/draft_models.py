"""A small model that drafts tokens for another model.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).

Shape suffixes: B texts, N tokens of all texts in a pass, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint, read_vocabulary
from moe_runtime.checkpoints.transformers_private import attention_names, cache_name
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.budget import (
    context_step_bytes,
    known_positions,
    reserve_for,
    room_for,
)
from moe_runtime.inference.cpu.attention import EAGER_ATTENTION
from moe_runtime.inference.drafted_steps import MOST_ROWS
from moe_runtime.inference.drafts import MOST_DRAFTED, Offer
from moe_runtime.inference.known_classes import can_share_a_pass, keeps_states
from moe_runtime.inference.loading import finish_dense, load, signature_of
from moe_runtime.inference.rows_alone import can_join
from moe_runtime.inference.sequence_cache import (
    BatchCache,
    make_room,
    new_cache,
)
from moe_runtime.inference.steps import most_in_pass

CPU = torch.device("cpu")
READY = 16
"""Most missing tokens at the start of a draft; more are computed before, in pieces."""
PIECE, CONTEXT = 64, 1024
"""Tokens of a piece; and latest tokens of a text that a model begins with."""
IN_PASS = READY * MOST_ROWS // 2
"""Most tokens of a pass: verifying takes at least two rows of each text."""


class DraftPlan:
    """A checkpoint that drafts for another: its headers and memory."""

    def __init__(
        self, path_or_id: str | Path, target: Checkpoint, progress: Progress | None = None
    ) -> None:
        """Raises CheckpointError: it cannot be read. Raises UnsupportedModelError: it has another
        tokenizer than the target, or its cache cannot drop tokens."""
        self._checkpoint = open_checkpoint(path_or_id, "auto", progress=progress)
        self._name = str(path_or_id)
        self._require_tokens_of(target)
        self._model = build_on_meta(self._checkpoint)
        config = self._checkpoint.config
        if not self._model.can_generate() or keeps_states(config) or not can_share_a_pass(config):
            raise UnsupportedModelError(
                f"draft {self._name}: expected a language model that keeps a key and a value of "
                f"each token and nothing else, got {type(self._model).__name__}"
            )
        self._experts = map_experts(self._model, self._checkpoint, may_be_dense=True)
        # a Mixture-of-Experts model is loaded as usual, with memory for passes of prompts
        self._in_pass = most_in_pass(self._model, CPU) if self._experts.modules else IN_PASS
        # models with the same tokenizer may pad embeddings to different sizes
        both = (config, target.config)
        self._num_known = min(each.get_text_config().vocab_size for each in both)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of all weights, and of the reserve for texts of ``num_tokens`` in all."""
        experts, signature = self._experts, signature_of(self._checkpoint, self._experts)
        dense_bytes = experts.dense_bytes(self._checkpoint.dtype)
        sizes: dict[str, Any] = {"max_tokens": num_tokens, "dense_bytes": dense_bytes}
        sizes["in_pass"] = self._in_pass
        slots_bytes = len(experts.layouts) * experts.slot_bytes if experts.layouts else 0
        reserve_bytes = reserve_for(self._checkpoint, experts, signature, **sizes)
        return dense_bytes + slots_bytes + reserve_bytes

    @property
    def context_step_bytes(self) -> int:
        """Bytes per further `CONTEXT_STEP` of tokens."""
        config, dtype = self._checkpoint.config, self._checkpoint.dtype
        return context_step_bytes(config, dtype, self._experts.top_k, in_pass=self._in_pass)

    def load(self, target: Any, max_tokens: int, progress: Progress | None = None) -> CachedDrafts:
        """Loads all weights, for texts of ``max_tokens`` in all."""
        model: Any = self._model
        if self._experts.modules:
            budget = self.bytes_for(max_tokens)
            model = load(
                self._checkpoint,
                device=CPU,
                host_memory=budget,
                max_tokens=max_tokens,
                warm_up=True,
                progress=progress,
            )
        else:
            finish_dense(model, self._checkpoint, self._experts, CPU, progress)
            self._checkpoint.require_unchanged()
        return ModelDrafts(model, max_tokens, self._num_known)

    def _require_tokens_of(self, target: Checkpoint) -> None:
        own, theirs = read_vocabulary(self._checkpoint.folder), read_vocabulary(target.folder)
        found = ""
        if (own is None) != (theirs is None):
            found = f"{self._name if own is None else target.folder} has no tokenizer"
        elif own is not None and theirs is not None and own != theirs:
            word = min(dict(own.items() ^ theirs.items()))
            found = f"{word!r} is token {own.get(word)} there and {theirs.get(word)} here"
        elif own is None:
            sizes = [
                each.config.get_text_config().vocab_size for each in (self._checkpoint, target)
            ]
            if sizes[0] != sizes[1]:
                found = "it has {} tokens and the model {}".format(*sizes)
        if found:
            raise UnsupportedModelError(
                f"draft {self._name}: expected the tokenizer of {target.folder}, but {found}; give "
                "a model with the same tokenizer, or leave draft out"
            )


class ModelText:
    """One text; the draft model caches its latest tokens.

    Attributes:
        is_known: all tokens of the text are among the ``num_known`` of the draft model.
    """

    def __init__(self, num_known: int = sys.maxsize) -> None:
        self.is_known, self._num_known = True, num_known
        self.tokens: list[int] = []
        self.cache: Any = None
        self.first = self.num_cached = 0  # the cache begins with token `first`
        self.tail: list[int] = []  # drafted tokens at the end of the cache

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.is_known &= max(tokens, default=0) < self._num_known

    def drop(self) -> None:
        """Frees the cache."""
        self.cache, self.tail, self.num_cached, self.first = None, [], 0, 0

    @property
    def earliest(self) -> int:
        """The earliest token that a cache may begin with."""
        return 0

    @property
    def lacks_states(self) -> bool:
        """Whether the verifying model must compute states first."""
        return False

    def offer(self, most: int) -> Offer:
        return Offer(min(most, MOST_DRAFTED) if self.is_known else 0, 0)

    @property
    def num_behind(self) -> int:
        return len(self.tokens) - self.first - self.num_cached

    def settle(self) -> None:
        """Keeps drafted tokens that the text continued with, and removes the others."""
        follow = self.tokens[self.first + self.num_cached :]
        pairs = zip(self.tail, follow, strict=False)
        num_right = next((i for i, (own, given) in enumerate(pairs) if own != given), None)
        if num_right is None:
            num_right = min(len(self.tail), len(follow))
        wrong, self.tail = len(self.tail) - num_right, []
        self.num_cached += num_right
        for layer in self.cache.layers if wrong else ():
            layer.give_back(wrong)


@contextlib.contextmanager
def _kept_whole(texts: Sequence[ModelText]) -> Iterator[None]:
    """Frees the caches of texts after a failure."""
    is_done = False
    try:
        with torch.inference_mode():
            yield
        is_done = True
    finally:
        for text in () if is_done else texts:
            text.drop()


class CachedDrafts(ABC):
    """A `Source` with a cache per text, which drafts the most likely tokens.

    Attributes:
        context: latest tokens of a text that a new cache begins with.
    """

    def __init__(self, model: Any, max_tokens: int) -> None:
        self._model: Any = model
        self._max_tokens = max_tokens
        known = known_positions(model.config)
        self._most = max_tokens if known is None else min(max_tokens, known)
        self.context = min(CONTEXT, self._most // 2)
        # most tokens that each text's cache had; in order of the last use
        self._held: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Frees the caches and the model; there are no more drafts."""
        for text in [*self._held]:
            text.drop()
        self._model = None

    @abstractmethod
    def new(self) -> Any:
        """The state of a new text."""

    @abstractmethod
    def passed(self, drafters: Sequence[Any], firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """The verifying model has computed tokens of texts."""

    def catch_up(self, drafters: Sequence[Any]) -> bool:
        with _kept_whole(drafters):
            return sum(self._piece_of(text, drafters) for text in drafters) > 0

    def draft(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        with _kept_whole(drafters):
            return self._drafted(drafters, counts)

    def _piece_of(self, text: Any, kept: Sequence[Any]) -> bool:
        if self._is_ready(text) or text.lacks_states:
            return False
        is_new = text.cache is None
        first = max(len(text.tokens) - self.context, text.earliest) if is_new else text.first
        if not self._has_place(text, len(text.tokens) - first + MOST_DRAFTED, kept):
            return False
        if is_new:
            text.cache, text.first = new_cache(self._model, grows=True), first
            text.num_cached = 0
        size = min(PIECE, max(text.num_behind - 1, 1))  # the first pass makes the cache
        self._pass([text], [text.tokens[text.first + text.num_cached :][:size]])
        text.num_cached += size
        return True

    def _drafted(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in drafters]
        left = {
            index: count
            for index, (text, count) in enumerate(zip(drafters, counts, strict=True))
            if count and self._is_ready(text) and text.num_behind and not text.lacks_states
        }
        new = {index: drafters[index].tokens[-drafters[index].num_behind :] for index in left}
        chosen = [drafters[index] for index in left]
        for index, count in [*left.items()]:
            text, size = drafters[index], len(new[index]) + count - 1
            if self._has_place(text, text.num_cached + size, chosen):
                make_room(text.cache, size)
            else:
                del left[index]
        while left:
            texts = [drafters[index] for index in left]
            found = self._pass(texts, [new[index] for index in left])
            for index, token in zip(left, found, strict=True):
                text = drafters[index]
                if drafts[index]:
                    text.tail.append(drafts[index][-1])
                else:
                    text.num_cached += len(new[index])
                drafts[index].append(token)
                new[index] = [token]
            left = {index: count for index, count in left.items() if count > len(drafts[index])}
        return drafts

    def _is_ready(self, text: ModelText) -> bool:
        """Whether a draft can begin. A text that is too long for its cache gets a new one."""
        if text.cache is not None:
            text.settle()
            num_tokens = len(text.tokens) - text.first + MOST_DRAFTED
            if num_tokens > self._most or text.num_behind > self.context:
                text.drop()
        return text.cache is not None and text.num_behind <= READY

    def _has_place(self, text: Any, num_tokens: int, kept: Sequence[Any]) -> bool:
        """Reserves room for ``num_tokens`` of a text, or frees its cache if there is not enough.
        Caches of other texts are freed first, in order of their last use, except ``kept``."""
        held = self._held.pop(text, 0)
        most = num_tokens if text.cache is None else max(num_tokens, held)
        others = {other: held for other, held in self._held.items() if other.cache is not None}
        left = room_for(self._max_tokens) - sum(map(room_for, (most, *others.values())))
        for other, held in others.items():
            if left < 0 and other not in kept:
                other.drop()
                left += room_for(held)
        if left < 0:
            text.drop()
        else:
            self._held[text] = most
        return left >= 0

    @abstractmethod
    def _pass(self, texts: Sequence[Any], new: Sequence[Sequence[int]]) -> list[int]:
        """Computes tokens of each text; returns the most likely next ones."""


class ModelDrafts(CachedDrafts):
    """Drafts from a small model."""

    def __init__(self, model: Any, max_tokens: int, num_known: int) -> None:
        """``num_known`` tokens are common to both models."""
        super().__init__(model, max_tokens)
        self._num_known = num_known
        self._cache_name = cache_name(model.forward)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._adds_mask = attention_names(model) == {EAGER_ATTENTION}
        self._can_join = can_join(model)

    def new(self) -> ModelText:
        return ModelText(self._num_known)

    def passed(self, drafters: Sequence[Any], firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """Needs only tokens."""

    def close(self) -> None:
        if hasattr(self._model, "moe"):
            self._model.moe.close()
        super().close()

    def _pass(self, texts: Sequence[Any], new: Sequence[Sequence[int]]) -> list[int]:
        if len(texts) > 1 and not self._can_join:
            pairs = zip(texts, new, strict=True)
            return [token for text, own in pairs for token in self._pass([text], [own])]
        caches, sizes = [text.cache for text in texts], [len(own) for own in new]
        ids_N = torch.tensor([token for own in new for token in own])
        firsts = [text.num_cached + len(text.tail) for text in texts]
        pairs = zip(firsts, sizes, strict=True)
        places_N = torch.cat([torch.arange(first, first + size) for first, size in pairs])
        ends_B = torch.tensor(sizes).cumsum(0) - 1
        rows, inputs = (1, -1), dict[str, Any]()
        if len(texts) == 1:
            cache = caches[0]
        elif max(sizes) == 1:
            cache, rows = BatchCache(caches, adds_mask=self._adds_mask), (-1, 1)
        else:
            cache = BatchCache(caches, sizes, adds_mask=self._adds_mask)
        inputs[self._cache_name] = cache
        inputs |= {"input_ids": ids_N.view(rows), "position_ids": places_N.view(rows)}
        if self._keeps_rows:
            inputs["logits_to_keep"] = ends_B if rows == (1, -1) else 1
        logits_NV = self._model(**inputs, use_cache=True, return_dict=True).logits.flatten(0, 1)
        found_BV = logits_NV if self._keeps_rows else logits_NV[ends_B]
        return found_BV[:, : self._num_known].argmax(-1).tolist()
