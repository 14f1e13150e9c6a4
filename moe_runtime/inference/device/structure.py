"""What a recorded step takes for granted of its model and its cache, beside its arguments."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from moe_runtime.checkpoints.transformers_private import attention_name

_OF_MODULES = frozenset(vars(torch.nn.Module()))


class Structure:
    """The modules of a model, their parameters and their settings."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Takes note of a model as it is."""
        every = [*model.modules()]
        members = [part for m in every for part in (m._parameters, m._buffers, m._modules)]
        # those of the model itself are called around a recording
        hooks = [part for m in every[1:] for part in (m._forward_hooks, m._forward_pre_hooks)]
        self._members = [part for part in members if part]
        self._empty = [part for part in members if not part] + hooks
        self._model: Any = model
        self._attention = attention_name(self._model)
        # held, so that nothing else gets their names
        self._held = [*self._now()]
        self._weights = [p for p in self._held if type(p) is torch.nn.Parameter]
        self._addresses = [*map(torch.Tensor.data_ptr, self._weights)]
        # numbers that are part of a recording: how many are chosen, the scale of an adapter
        inner = [m for m in every[1:] if not type(m).__module__.startswith("torch.nn.")]
        own = [(vars(m), name) for m in inner for name in vars(m) if name not in _OF_MODULES]
        parts = [owner[name] for owner, name in own]
        own += [(part, name) for part in parts if type(part) is dict for name in part]
        self._owners = [owner for owner, _ in own]
        self._settings = [name for _, name in own]
        self._values = [*map(dict.get, self._owners, self._settings)]
        self._sized = [
            *self._members,
            *map(vars, every[1:]),
            *(part for part in parts if isinstance(part, (dict, list))),
        ]
        self._sizes = [*map(len, self._sized)]

    def holds(self) -> bool:
        """Whether all are the same, where they were, and nobody looks into a module."""
        return (
            not any(self._empty)
            and not torch.nn.modules.module._has_any_global_hook()
            and [*map(len, self._sized)] == self._sizes
            and all(map(operator.is_, self._now(), self._held))
            and [*map(torch.Tensor.data_ptr, self._weights)] == self._addresses
            and attention_name(self._model) == self._attention
            and all(map(operator.is_, map(dict.get, self._owners, self._settings), self._values))
        )

    def _now(self) -> itertools.chain[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._members))


def memory_of(cache: Any) -> list[int]:
    """Where a static cache has its tensors: beams, for one, move them."""
    return [
        tensor.data_ptr()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values, layer.cumulative_length)
    ]


def is_own(code: Any) -> bool:
    """Whether a class or a function is of this package or of transformers, which leave a model as
    it is while it generates."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in ("moe_runtime", "transformers")
