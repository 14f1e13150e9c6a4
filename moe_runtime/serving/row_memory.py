"""Keys and values of sequences that decode on a GPU, in rows of equal length that stay in place.

Shape suffixes: B sequences, G key heads, L places of a row, D width of a key or of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from moe_runtime.inference.device.static_caches import RowCache, RowLayer
from moe_runtime.memory.device.device import Device


class RowStep(NamedTuple):
    """What steps of some rows are called with, in memory that stays in place.

    ``numbers_3B`` are int64: tokens, their places, and rows of the tables of masks.
    """

    cache: RowCache
    numbers_3B: torch.Tensor


class RowMemory:
    """Rows of ``num_tokens`` places for tokens in every layer of a model."""

    def __init__(
        self, config: Any, device: Device, like: DynamicCache, num_rows: int, num_tokens: int
    ) -> None:
        self.num_tokens = num_tokens
        self._config, self._device = config, device
        filled: list[Any] = [*like.layers]
        pairs = [(layer.keys, layer.values) for layer in filled]
        self._layers = [
            tuple(p.new_zeros((num_rows, p.shape[1], num_tokens, p.shape[3])) for p in pair)
            for pair in pairs
        ]
        self._steps: dict[tuple[int, int], RowStep] = {}
        windows = {layer.sliding_window if layer.is_sliding else None for layer in filled}
        self._tables = {window: self._table(window) for window in windows}

    def write(self, row: int, cache: DynamicCache, num_tokens: int) -> None:
        """Copies so many tokens of a sequence into a row; windows keep the last ones."""
        layers: list[Any] = [*cache.layers]
        for pair, layer in zip(self._layers, layers, strict=True):
            for rows, own in zip(pair, (layer.keys, layer.values), strict=True):
                # what was there may be no number, which even a masked token must be
                rows[row].zero_()
                rows[row, :, num_tokens - own.shape[2] : num_tokens].copy_(own[0])

    def move(self, row: int, to: int) -> None:
        for pair in self._layers:
            for rows in pair:
                rows[to].copy_(rows[row])

    def read(self, row: int, num_tokens: int, cache: DynamicCache) -> DynamicCache:
        for index, pair in enumerate(self._layers):
            cache.update(*(rows[row, None, :, :num_tokens] for rows in pair), index)
        return cache

    def look_into(self, row: int, num_tokens: int, cache: DynamicCache) -> DynamicCache:
        """Makes an empty cache a view of a row's tokens; for layers that keep every token, until it
        changes."""
        layers: list[Any] = [*cache.layers]
        for layer, pair in zip(layers, self._layers, strict=True):
            layer.keys, layer.values = (rows[row, None, :, :num_tokens] for rows in pair)
            layer.is_initialized = True
        return cache

    def step(
        self, first: int, tokens: Sequence[int], places: Sequence[int]
    ) -> tuple[RowCache, dict[str, Any]]:
        """Arguments of the model for one token more of neighbouring rows: the cache, and others by
        name.

        ``places`` are the tokens that each row has.
        """
        size = len(tokens)
        step = self._steps.get((first, size))
        if step is None:
            step = self._steps[first, size] = self._new_step(first, size)
        table_rows = [self.num_tokens - 1 - place for place in places]
        self._device.upload(np.array([tokens, places, table_rows]), step.numbers_3B)
        step.cache.num_cached = sum(places) // size
        ids_B, places_B, table_B = step.numbers_3B
        masks = {
            "full_attention" if window is None else "sliding_attention": table.index_select(
                0, table_B
            )[:, None, None]
            for window, table in self._tables.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return step.cache, {
            "input_ids": ids_B[:, None],
            "position_ids": places_B[:, None],
            "attention_mask": mask,
        }

    def _new_step(self, first: int, size: int) -> RowStep:
        some: Any = self._layers[0][0]
        numbers_3B = torch.zeros((3, size), dtype=torch.int64, device=some.device)
        layers = [
            RowLayer(keys[first : first + size], values[first : first + size], numbers_3B[1])
            for keys, values in self._layers
        ]
        return RowStep(RowCache(self._config, layers), numbers_3B)

    def _table(self, window: int | None) -> torch.Tensor:
        """What is added to scores of all places: row L - 1 - p is for a token at place p."""
        some: Any = self._layers[0][0]
        length = self.num_tokens
        behind = torch.arange(1 - length, length, device=some.device)  # from the token
        is_hidden = behind > 0
        if window is not None:
            is_hidden |= behind <= -window
        ramp = torch.zeros(len(behind), dtype=some.dtype, device=some.device)
        return ramp.masked_fill_(is_hidden, -torch.inf).unfold(0, length, 1)
