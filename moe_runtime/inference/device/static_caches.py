"""Static caches of keys, values and recurrent states at fixed addresses, as recorded steps need
them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from moe_runtime.inference.known_classes import KEEPS_NOTHING

_MASKED_KINDS = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "conv", "moe", "mlp"}
)
"""Layer types of configurations whose masks fit a cache of all tokens, or that need none."""
_LEAST_STEP = 64
"""Lengths of caches are multiples of 64, or of an eighth of the power of two below them."""


class StaticCaches:
    """The caches of one model's calls of `generate`. A call of the same size reuses the last cache,
    whose step is already recorded. Only the recording keeps a free cache alive."""

    def __init__(self) -> None:
        self._made, self.in_use = weakref.WeakSet[Any](), weakref.WeakSet[Any]()
        self.unseen = weakref.WeakSet[Any]()  # caches of calls that return no cache
        self._free: list[weakref.ref[Any]] = []  # one at most

    def take(self, config: Any, num_sequences: int, num_tokens: int, most: int) -> Any:
        """An empty cache, which the caller owns until `give_back`.

        Its length is rounded up, to ``most`` tokens at most. None as from `static_cache`.
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
            self.unseen.discard(cache)
            self._free[:] = [weakref.ref(cache)]

    def is_own(self, cache: Any) -> bool:
        return cache is not None and cache in self._made


def static_cache(config: Any, num_tokens: int) -> Any:
    """A static cache of ``num_tokens`` in every layer of attention, sliding windows included. None
    if no layer attends, or one keeps more than keys and values, or than recurrent states."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if {*kinds} - _MASKED_KINDS:
        return None
    cache = StaticCache(config, max_cache_len=num_tokens)
    cache.layers[:] = [
        StaticLayer(num_tokens) if type(layer) is StaticSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    return cache if is_static(cache) else None


def is_static(cache: Any) -> bool:
    """Whether every layer of attention counts its tokens on the device, and states never move."""
    if type(cache) is not StaticCache or not attention_layers(cache):
        return False
    others = (layer for layer in cache.layers if type(layer) is not StaticLayer)
    return all(
        type(layer).__name__ == KEEPS_NOTHING
        or (type(layer) is LinearAttentionLayer and not layer.record_past)
        for layer in others
    )


def attention_layers(cache: Any) -> list[Any]:
    """The layers that keep keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, StaticLayer)]


def state_layers(cache: Any) -> list[Any]:
    """The layers that keep recurrent states, which no step can take back."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]


def tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """All that a step reads or writes."""
    for layer in attention_layers(cache):
        yield from (layer.keys, layer.values, layer.cumulative_length)
    for layer in state_layers(cache):
        yield from _states_of(layer)


def _states_of(layer: Any) -> Iterator[torch.Tensor]:
    both = layer.conv_states.values(), layer.recurrent_states.values()
    return (state for state in itertools.chain(*both) if state is not None)


def is_filled(cache: Any) -> bool:
    """Whether it is a static cache with memory and states, or a cache of rows."""
    if type(cache) is RowCache:
        return True
    return (
        is_static(cache)
        and all(layer.is_initialized for layer in attention_layers(cache))
        and all(all(layer.has_previous_state.values()) for layer in state_layers(cache))
    )


def grown(cache: Any) -> Any:
    """A dynamic cache with the tokens of a static one."""
    found = DynamicCache()
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            found.layers.append(own := DynamicLayer())
            length = int(layer.cumulative_length)
            keys, values = cast(tuple[torch.Tensor, torch.Tensor], (layer.keys, layer.values))
            own.update(keys[:, :, :length], values[:, :, :length])
            continue
        found.layers.append(own := copy.copy(layer))
        for name, value in [*vars(own).items()]:
            if isinstance(value, dict):  # by the number of the state
                setattr(own, name, {number: _copied(part) for number, part in value.items()})
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _rounded(num_tokens: int) -> int:
    step = max(_LEAST_STEP, 2 ** max(0, num_tokens.bit_length() - 4))
    return -(-num_tokens // step) * step


def _fits(cache: Any, num_sequences: int, length: int) -> bool:
    """Whether it equals a new filled cache of this length, in the current inference mode."""
    if not is_filled(cache):
        return False
    layers, is_inference = attention_layers(cache), torch.is_inference_mode_enabled()
    states = itertools.chain.from_iterable(map(_states_of, state_layers(cache)))
    kept = *(layer.keys for layer in layers), *states
    return all(layer.max_cache_len == length for layer in layers) and all(
        (len(part), part.is_inference()) == (num_sequences, is_inference) for part in kept
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
