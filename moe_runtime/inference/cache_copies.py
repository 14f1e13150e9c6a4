"""Copies of a sequence's cache, from which another sequence can continue.

Shape suffixes: G key heads, Q new tokens, S tokens, D key width, V value width.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from moe_runtime.inference.known_classes import LAYERS_WITH_STATES, class_name
from moe_runtime.inference.sequence_cache import STATE_FACTS, filled


def drop_after(cache: DynamicCache, num_tokens: int) -> None:
    """Cuts layers that keep every token to ``num_tokens``."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and not layer.is_sliding and layer.is_initialized:
            grown: Any = layer
            grown.keys, grown.values = (
                part[..., :num_tokens, :] for part in (grown.keys, grown.values)
            )


class BlockCopies:
    """Copies blocks of tokens out of caches of one model and into them, for layers that keep every
    token.

    A copy is one tensor of bytes, keys ``[1, G, S, D]`` and values ``[1, G, S, V]`` layer by layer:
    many small tensors would fragment memory.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._forms: list[tuple[torch.Size, torch.dtype]] = []

    def learn(self, cache: DynamicCache) -> int:
        """Takes shapes and types from a cache with tokens; returns the bytes of a block."""
        cached = self._cached(cache)
        size = self._num_tokens
        forms = [
            (torch.Size((*part.shape[:-2], size, part.shape[-1])), part.dtype) for part in cached
        ]
        assert self._forms in ([], forms), "caches of one model have different layers"
        self._forms = forms
        return sum(self._sizes())

    def copy(self, cache: DynamicCache, index: int) -> torch.Tensor:
        """The bytes of block ``index``; the last block may have fewer tokens."""
        num_bytes, size = self.learn(cache), self._num_tokens
        cached = self._cached(cache)
        device = cached[0].device if cached else None
        block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for place, part in zip(self._parts(block), cached, strict=True):
            count = min(size, part.shape[-2] - index * size)
            place.narrow(-2, 0, count).copy_(part.narrow(-2, index * size, count))
            place.narrow(-2, count, size - count).zero_()
        return block

    def append(
        self, cache: DynamicCache, block: torch.Tensor, num_tokens: int | None = None
    ) -> None:
        """Appends a copied block, or its first tokens, to a cache."""
        parts = [part[..., :num_tokens, :] for part in self._parts(block)]
        for place, index in enumerate(filled(cache, with_windows=False)):
            cache.update(parts[2 * place], parts[2 * place + 1], index)

    def _cached(self, cache: DynamicCache) -> list[torch.Tensor]:
        return [part for pair in filled(cache, with_windows=False).values() for part in pair]

    def _parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        forms = zip(block.split(self._sizes()), self._forms, strict=True)
        return [part.view(dtype).view(shape) for part, (shape, dtype) in forms]

    def _sizes(self) -> list[int]:
        return [shape.numel() * dtype.itemsize for shape, dtype in self._forms]


_ALIGNMENT = 64
"""Alignment of the parts of a state, in bytes."""


class _Part(NamedTuple):
    """The place of a layer's tensor in a state; windows have at most ``num_tokens``."""

    layer: int
    name: str
    number: int
    first: int
    shape: torch.Size
    dtype: torch.dtype
    num_tokens: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class StateCopies:
    """Copies the parts of caches that `BlockCopies` leaves: windows and running states.

    A copy is one tensor of bytes; its size does not depend on the length of the text.

    Attributes:
        num_bytes: of a copy; 0 if the caches have no such parts.
        can_cut: states after tokens within a pass can be copied.
    """

    def __init__(self, model: torch.nn.Module, cache: DynamicCache) -> None:
        """Takes shapes and types from a cache with tokens."""
        self.num_bytes = 0
        self._parts: list[_Part] = []
        self._facts: dict[int, dict[str, Any]] = {}
        self._device: torch.device | None = None
        grow = True
        for number, found in enumerate(cache.layers):
            layer: Any = found
            is_window = isinstance(found, DynamicLayer) and found.is_sliding
            if is_window and layer.is_initialized:
                grow = grow and hasattr(layer, "growing_keys")
                most = layer.sliding_window - 1
                for name in ("keys", "values"):
                    like = getattr(layer, name)
                    shape = torch.Size((*like.shape[:-2], most, like.shape[-1]))
                    self._add(number, name, 0, shape, like, most)
            if isinstance(found, LinearAttentionLayer):
                names = (*STATE_FACTS, "dtype", "device")
                self._facts[number] = {name: copy.copy(getattr(layer, name)) for name in names}
                for name in ("conv_states", "recurrent_states"):
                    for index, like in getattr(layer, name).items():
                        if like is not None:
                            self._add(number, name, index, like.shape, like)
        updating: list[Any] = [m for m in model.modules() if class_name(m) in LAYERS_WITH_STATES]
        self._layers = {module.layer_idx: module for module in updating}
        states: list[Any] = [cache.layers[number] for number in self._facts]
        self.can_cut = (
            grow
            and len(updating) == len(states)
            and self._layers.keys() == self._facts.keys()
            and all(layer.number_of_states == 1 for layer in states)
        )

    def new(self) -> torch.Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)

    def take(self, state: torch.Tensor, cache: DynamicCache, end: int, behind: int = 0) -> bool:
        """Copies windows and states after ``end`` tokens of a cache with ``behind`` more.

        Returns False if the cache no longer has them.
        """
        for part, place in self._places(state, end) if not behind else ():
            if part.num_tokens is None:
                place.copy_(getattr(cache.layers[part.layer], part.name)[part.number])
        return not (behind and self._facts) and self.take_windows(state, cache, end, behind)

    def take_windows(
        self, state: torch.Tensor, cache: DynamicCache, end: int, behind: int = 0
    ) -> bool:
        for part, place in self._places(state, end):
            if part.num_tokens is None:
                continue
            layer = cache.layers[part.layer]
            cached: Any = getattr(layer, part.name)
            growing = getattr(layer, f"growing_{part.name}", None)
            if growing is not None and cached is growing.view:  # its room has earlier tokens
                cached = growing.room[..., : growing.start + cached.shape[-2], :]
            first = cached.shape[-2] - behind - place.shape[-2]
            if first < 0:
                return False
            place.copy_(cached.narrow(-2, first, place.shape[-2]))
        return True

    @contextlib.contextmanager
    def within(
        self, cache: DynamicCache, first: int, states: Mapping[int, torch.Tensor]
    ) -> Iterator[None]:
        """Lets layers with states compute a pass from token ``first`` in parts, and copies running
        states in between.

        ``states`` has the copies by the number of tokens before them. Other layers compute the pass
        whole; windows are not copied.
        """
        layers = self._layers if states else {}
        own = {number: vars(module).get("forward") for number, module in layers.items()}

        def copy_states(number: int, end: int) -> None:
            for part, place in self._places(states[first + end], first + end):
                if part.layer == number and part.num_tokens is None:
                    place.copy_(getattr(cache.layers[number], part.name)[part.number])

        ends = [end - first for end in states]
        try:
            for number, module in layers.items():
                after = functools.partial(copy_states, number)
                read = functools.partial(_in_parts, module.forward, ends, after)
                vars(module)["forward"] = read
            yield
        finally:
            for number, forward in own.items():
                vars(layers[number]).pop("forward", None)
                if forward is not None:
                    vars(layers[number])["forward"] = forward

    def put(self, state: torch.Tensor, cache: DynamicCache, num_tokens: int) -> None:
        """Restores windows and states of a cache that has the blocks of ``num_tokens`` tokens."""
        for number, facts in self._facts.items():
            for name, fact in facts.items():
                setattr(cache.layers[number], name, copy.copy(fact))
        windows: dict[int, list[torch.Tensor]] = {}
        for part, place in self._places(state, num_tokens):
            layer: Any = cache.layers[part.layer]
            if part.num_tokens is None:
                getattr(layer, part.name)[part.number] = place.clone()
            else:
                windows.setdefault(part.layer, []).append(place)
        for number, (keys, values) in windows.items():
            cache.update(keys, values, number)
            layer = cache.layers[number]
            layer.cumulative_length = num_tokens

    def _add(
        self,
        layer: int,
        name: str,
        index: int,
        shape: torch.Size,
        like: torch.Tensor,
        num_tokens: int | None = None,
    ) -> None:
        first = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        part = _Part(layer, name, index, first, shape, like.dtype, num_tokens)
        self._parts.append(part)
        self.num_bytes, self._device = first + part.num_bytes, like.device

    def _places(self, state: torch.Tensor, end: int) -> Iterator[tuple[_Part, torch.Tensor]]:
        for part in self._parts:
            place = state[part.first : part.first + part.num_bytes].view(part.dtype)
            place = place.view(part.shape)
            if part.num_tokens is not None:
                place = place.narrow(-2, 0, min(end, part.num_tokens))
            yield part, place


def _in_parts(
    forward: Callable[..., Any],
    ends: Sequence[int],
    copy_states: Callable[[int], None],
    hidden_states: torch.Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    first, made = 0, []
    for end in sorted({*ends, hidden_states.shape[1]}):
        made.append(forward(hidden_states[:, first:end], *args, **options))
        first = end
        if end in ends:
            copy_states(end)
    if isinstance(made[0], tuple):
        return tuple(torch.cat(parts, dim=1) for parts in zip(*made, strict=True))
    return torch.cat(made, dim=1)
