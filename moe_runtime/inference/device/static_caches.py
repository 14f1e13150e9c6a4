"""Static caches of keys and values at fixed addresses, as recorded steps need them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import (
    DynamicCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

_MASKED_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Layer types of configurations whose masks fit a cache of all tokens."""
_LEAST_STEP = 64
"""Lengths of caches are multiples of 64, or of an eighth of the power of two below them."""


class StaticCaches:
    """The caches of one model's calls of `generate`. A call of the same size reuses the last cache,
    whose step is already recorded. Only the recording keeps a free cache alive."""

    def __init__(self) -> None:
        self._made, self.in_use = weakref.WeakSet[Any](), weakref.WeakSet[Any]()
        self._free: list[weakref.ref[Any]] = []  # one at most

    def take(self, config: Any, num_sequences: int, num_tokens: int, most: int) -> Any:
        """An empty cache, which the caller owns until `give_back`.

        Its length is rounded up, to ``most`` tokens at most. None if layers keep anything but keys
        and values of all tokens.
        """
        length = max(num_tokens, min(_rounded(num_tokens), most))
        cache = None
        with contextlib.suppress(IndexError):  # atomic between threads
            cache = self._free.pop()()
        if cache is not None and _fits(cache, num_sequences, length):
            cache.reset()
        else:
            del cache  # frees its memory first
            cache = static_cache(config, length)
        if cache is not None:
            self._made.add(cache)
            self.in_use.add(cache)
        return cache

    def give_back(self, cache: Any) -> None:
        """Offers a cache for reuse; ignores caches that are not from `take`."""
        if self.is_own(cache):
            self.in_use.discard(cache)
            self._free[:] = [weakref.ref(cache)]

    def is_own(self, cache: Any) -> bool:
        return cache is not None and cache in self._made


def static_cache(config: Any, num_tokens: int) -> Any:
    """A static cache of ``num_tokens`` in every layer, sliding windows included; None if layers
    keep anything else."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    cache = StaticCache(config, max_cache_len=num_tokens)
    known = StaticLayer, StaticSlidingWindowLayer
    if {*kinds} - _MASKED_KINDS or any(type(layer) not in known for layer in cache.layers):
        return None
    cache.layers[:] = [StaticLayer(num_tokens) for _ in cache.layers]
    return cache


def is_static(cache: Any) -> bool:
    """Whether every layer of the cache counts its tokens on the device."""
    return type(cache) is StaticCache and all(type(e) is StaticLayer for e in cache.layers)


def is_filled(cache: Any) -> bool:
    """Whether it is a static cache with memory, or a cache of rows."""
    if type(cache) is RowCache:
        return True
    return is_static(cache) and all(layer.is_initialized for layer in cache.layers)


def grown(cache: Any) -> Any:
    """A dynamic cache with the tokens of a static one."""
    found = DynamicCache()
    for index, layer in enumerate(cache.layers):
        length = int(layer.cumulative_length)
        found.update(layer.keys[:, :, :length], layer.values[:, :, :length], index)
    return found


def _rounded(num_tokens: int) -> int:
    step = max(_LEAST_STEP, 2 ** max(0, num_tokens.bit_length() - 4))
    return -(-num_tokens // step) * step


def _fits(cache: Any, num_sequences: int, length: int) -> bool:
    """Whether it equals a new filled cache of this length, in the current inference mode."""
    return is_filled(cache) and all(
        layer.batch_size == num_sequences
        and layer.max_cache_len == length
        and layer.keys.is_inference() == torch.is_inference_mode_enabled()
        for layer in cache.layers
    )


class RowLayer(StaticLayer):
    """Keys and values of one layer, with one row of places per sequence.

    A token goes to its sequence's place in ``cumulative_length``. The caller sets the places before
    each step, so a failed step leaves no trace.
    """

    def __init__(self, keys_BGLD: Any, values_BGLV: Any, places_B: torch.Tensor) -> None:
        super().__init__(keys_BGLD.shape[2])
        self.keys, self.values, self.cumulative_length = keys_BGLD, values_BGLV, places_B
        self.dtype, self.device = keys_BGLD.dtype, keys_BGLD.device
        self.batch_size, self.num_heads = keys_BGLD.shape[:2]
        self.k_head_dim, self.v_head_dim = keys_BGLD.shape[-1], values_BGLV.shape[-1]
        self.is_initialized = True
        self._rows_B = torch.arange(len(places_B), device=self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token of each sequence, ``[B, G, 1, D]``; returns all places."""
        keys, values = cast(tuple[torch.Tensor, torch.Tensor], (self.keys, self.values))
        for cached, new in ((keys, key_states), (values, value_states)):
            cached[self._rows_B, :, self.cumulative_length] = new.squeeze(2)
        return keys, values


class RowCache(StaticCache):
    """A static cache of `RowLayer`, for steps of one token per sequence. ``num_cached`` is the mean
    number of tokens of a sequence, counted on the host."""

    def __init__(self, config: Any, layers: Sequence[RowLayer]) -> None:
        super().__init__(config, max_cache_len=1)
        self.layers[:] = layers
        self.num_cached = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The host's count; does not wait for the device."""
        return self.num_cached
