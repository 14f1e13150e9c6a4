"""Running states of a sequence (linear attention, Mamba, short convolutions), and of several.

Shape suffixes: B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from moe_runtime.inference.budget import kv_bytes_per_token

_OF_EACH_STATE = (
    *("is_conv_states_initialized", "is_recurrent_states_initialized"),
    *("has_previous_state", "conv_kernel_size"),
)
_States = dict[int, torch.Tensor | None]


class BatchStates(LinearAttentionLayer):
    """The states of one layer of several caches, one row of the batch for each.

    Models write states in place, so those of the sequences are rows of the batch's from here on:
    nothing is copied behind a pass, nor before the next one of the same sequences.
    """

    def __init__(self, layers: Sequence[LinearAttentionLayer]) -> None:
        """Joins layers whose sequences have been read."""
        first = layers[0]
        super().__init__(number_of_states=first.number_of_states)
        self.dtype, self.device = first.dtype, first.device
        for name in _OF_EACH_STATE:
            setattr(self, name, dict(getattr(first, name)))
        self.conv_states = _join([layer.conv_states for layer in layers])
        self.recurrent_states = _join([layer.recurrent_states for layer in layers])


def _join(states: Sequence[_States]) -> _States:
    """Each state of all sequences, whose own become rows of it."""
    joined: _States = {}
    for index in states[0]:
        rows = [row for own in states if (row := own[index]) is not None]
        joined[index] = whole = _whole(rows) if rows else None
        if rows and whole is None:
            joined[index] = whole = torch.cat(rows)
            for own, row in zip(states, whole.split(1), strict=True):
                own[index] = row
    return joined


def _whole(rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that has just these rows in this order, if there is one."""
    first = rows[0]
    storage, stride = first.untyped_storage(), first.stride(0)
    if storage.nbytes() != len(rows) * stride * first.itemsize:
        return None
    for index, row in enumerate(rows):
        is_next = row.storage_offset() == index * stride and row.stride() == first.stride()
        if not is_next or row.untyped_storage().data_ptr() != storage.data_ptr():
            return None
    return first.as_strided((len(rows), *first.shape[1:]), first.stride())


def own_states(cache: DynamicCache) -> None:
    """Gives a sequence that goes on alone tensors of its own, so that no batch's stays for it."""
    for own in _states_of(cache):
        for index, row in own.items():
            if row is not None and row.untyped_storage().nbytes() > row.nbytes:
                own[index] = row.clone()


def have_close_states(cache: DynamicCache, other: DynamicCache, tolerance: float) -> bool:
    """Whether no state is further from the other's than a share of that one's norm."""
    pairs = zip(_tensors_of(cache), _tensors_of(other), strict=True)
    return all(
        torch.dist(state.float(), given.float()) <= tolerance * given.float().norm()
        for state, given in pairs
    )


def tokens_of_states(cache: DynamicCache, config: Any, dtype: torch.dtype) -> int:
    """Tokens whose room has place for the states of a sequence beside their keys and values.

    Memory is set aside as if every layer kept keys and values: what those with states leave of it
    is theirs.

    Args:
        cache: of a sequence with some tokens.
        config: of the model.
        dtype: that memory was set aside for.
    """
    states = sum(state.nbytes for state in _tensors_of(cache))
    filled: list[Any] = [
        layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized
    ]
    parts = [part for layer in filled for part in (layer.keys, layer.values)]
    used = sum(part.nbytes // max(part.shape[-2], 1) for part in parts)
    reserved = kv_bytes_per_token(config, dtype)
    left = reserved - used
    return -(-states // (left if left > 0 else reserved))


def _tensors_of(cache: DynamicCache) -> Iterator[torch.Tensor]:
    return (row for own in _states_of(cache) for row in own.values() if row is not None)


def _states_of(cache: DynamicCache) -> Iterator[_States]:
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            yield layer.conv_states
            yield layer.recurrent_states
