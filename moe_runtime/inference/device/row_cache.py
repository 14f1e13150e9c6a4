"""A static cache whose sequences have lengths of their own, which the caller says.

Shape suffixes: B sequences, G key heads, L places, D key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import StaticCache, StaticLayer


class RowLayer(StaticLayer):
    """Keys and values of one layer, one row of places for each sequence.

    A token is written to the place that ``cumulative_length`` has for its sequence. Nothing is
    counted here: the caller says the places of every step, so that a step that failed is forgotten.
    """

    def __init__(self, keys_BGLD: Any, values_BGLV: Any, places_B: torch.Tensor) -> None:
        """Takes memory that is there.

        Args:
            keys_BGLD: contiguous.
            values_BGLV: likewise.
            places_B: int64, of the next token of each sequence, on the device.
        """
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
        """Writes one token of each sequence, ``[B, G, 1, D]``; gives all places."""
        keys, values = cast(tuple[torch.Tensor, torch.Tensor], (self.keys, self.values))
        for cached, new in ((keys, key_states), (values, value_states)):
            cached[self._rows_B, :, self.cumulative_length] = new.squeeze(2)
        return keys, values


class RowCache(StaticCache):
    """A static cache of such layers, for steps of one token a sequence.

    Attributes:
        num_cached: tokens of a sequence in the mean, as the host knows them.
    """

    def __init__(self, config: Any, layers: Sequence[RowLayer]) -> None:
        """Takes layers.

        Args:
            config: of the model.
            layers: one for each that it has.
        """
        super().__init__(config, max_cache_len=1)
        self.layers[:] = layers
        self.num_cached = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What the host knows: nobody waits for the device."""
        return self.num_cached
