"""Multi-head latent attention on a CPU: caches hold what keys and values are expanded from.

Models call ``expand_kv`` with all that is cached, at every step. Here an attention layer gets one
of its own, which also takes the latents of several sequences.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_latents(model: PreTrainedModel) -> None:
    """Gives the latent attention layers of a model that uses ``attend`` an ``expand_kv``."""
    for layer in model.modules():
        if hasattr(type(layer), "expand_kv"):
            vars(layer)["expand_kv"] = ExpandLatents(layer)


class ExpandLatents:
    """The ``expand_kv`` of an attention layer."""

    def __init__(self, layer: Any) -> None:
        """Takes the place of the method; the layer's own stays in its class."""
        self._layer = layer

    def __call__(self, latents: Any, rotated: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Keys and values of all heads.

        Args:
            latents: ``[B, 1, S, R]``; or what knows those of several caches, see serving.
            rotated: the part of the keys with positions, ``[B, 1, S, P]``.

        Returns:
            ``[B, H, S, D]`` and ``[B, H, S, V]``; or what expands those of each cache.
        """
        if isinstance(latents, torch.Tensor):
            return type(self._layer).expand_kv(self._layer, latents, rotated)
        return dataclasses.replace(latents, expand=self), rotated
