"""Calls of a model that are decode steps with a static cache, as recordings know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from moe_runtime.checkpoints.transformers_private import CACHE_NAMES, cache_of
from moe_runtime.inference.device.static_caches import is_filled
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS

_ASKS_FOR_MORE = ("labels", "output_attentions", "output_hidden_states", "output_router_logits")


class CallKey(NamedTuple):
    """What two calls have in common that one recording is good for."""

    values: tuple[tuple[str, Any], ...]
    tensors: tuple[Any, ...]
    is_inference: bool


class StepCall(NamedTuple):
    """A call of a model.

    Attributes:
        key: of the call.
        tensors: by their names, all but what is in the cache.
        cache: the static cache.
    """

    key: CallKey
    tensors: dict[str, torch.Tensor]
    cache: Any

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the model is called with, but for the cache, with tensors of these names."""
        return {**_nested(tensors), **dict(self.key.values)}


def read_step(model: Any, kwargs: Mapping[str, Any]) -> StepCall | None:
    """A call that can be recorded, or None.

    Args:
        model: that is called.
        kwargs: its arguments by name.
    """
    ids_B1, config = kwargs.get("input_ids"), model.config
    cache = cache_of(kwargs)
    if (
        not isinstance(ids_B1, torch.Tensor)
        or ids_B1.shape[1:] != (1,)
        or not 0 < len(ids_B1) <= MAX_TOKENS
        or not is_filled(cache)
        or any(kwargs.get(name) for name in _ASKS_FOR_MORE)
        or any(getattr(config, name, False) for name in _ASKS_FOR_MORE)
        or not (config.return_dict if (kind := kwargs.get("return_dict")) is None else kind)
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(ids_B1.device.type)
        or model.training
    ):
        return None
    tensors, values = {}, []
    for name, value in kwargs.items():
        if name in CACHE_NAMES:
            continue
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, dict) and all(isinstance(v, torch.Tensor) for v in value.values()):
            tensors |= {f"{name}.{part}": tensor for part, tensor in value.items()}
        elif value is None or isinstance(value, (bool, int)):
            values.append((name, value))
        else:
            return None
    kinds = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
    key = CallKey(tuple(values), kinds, torch.is_inference_mode_enabled())
    return StepCall(key, tensors, cache)


def _nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments by name; those whose name has two parts are in a dictionary of the first."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        outer, _, inner = name.partition(".")
        if inner:
            found.setdefault(outer, {})[inner] = tensor
        else:
            found[name] = tensor
    return found
