"""transformers' dynamic cache with keys and values that grow in place, and masks of prompts.

``DynamicCache`` concatenates, which copies the whole context for every token. Masks of prompts take
no memory: they store only the offset and the window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from moe_runtime.checkpoints.transformers_private import (
    CACHE_NAMES,
    attention_name,
    cache_name,
    window_of_mask,
)
from moe_runtime.errors import UnsupportedModelError, UnsupportedUseError
from moe_runtime.inference.budget import room_for
from moe_runtime.inference.known_classes import KEEPS_NOTHING
from moe_runtime.kernels.decode_step.prompt_attention import Sight
from moe_runtime.kernels.decode_step.rounded_rows import GROUP, round_rows, widen_rows
from moe_runtime.kernels.native import native_library

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cache_of(named: Mapping[str, Any]) -> Any:
    """The cache among the arguments or outputs of a model or layer, or None."""
    new, old = CACHE_NAMES
    return named[new] if new in named else named.get(old)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Keys and values in int8, see `rounded_rows`.

    Attributes:
        attention: the attention that takes rounded rows directly; None to widen them in each step.
    """

    attention: str | None

    def gives_rows(self, model: Any) -> bool:
        return self.attention is not None and attention_name(model) == self.attention


def require_roundable(model: PreTrainedModel, kv_cache: str) -> None:
    """Raises UnsupportedModelError: ``kv_cache`` is int8, and the cache of the model is not plain
    keys and values."""
    if kv_cache == "exact":
        return
    layers = DynamicCache(config=model.config).layers
    filled = [layer for layer in layers if isinstance(layer, DynamicLayer)]
    widths = {getattr(m, name, 0) for m in model.modules() for name in ("head_dim", "v_head_dim")}
    odd = sorted(width for width in widths if isinstance(width, int) and width % GROUP)
    found = None
    if any(hasattr(type(module), "expand_kv") for module in model.modules()):
        found = "latents, which keys and values are made of"
    elif any(hasattr(module, "indexer") for module in model.modules()):
        found = "an index beside keys and values"
    elif not filled:
        found = "states, and no keys and values"
    elif any(type(layer) not in GROWING for layer in filled):
        found = "keys, values and states in one layer"
    elif odd:
        found = f"heads of {odd[0]} values, which are not groups of {GROUP}"
    if found is not None:
        raise UnsupportedModelError(
            f"kv_cache int8 rounds keys and values, and {type(model).__name__} keeps {found}; "
            "expected kv_cache exact"
        )


def grow_cache_in_place(model: PreTrainedModel, rounding: Rounding | None = None) -> None:
    """Makes dynamic caches in calls of a model grow in place, in int8 if there is a ``rounding``.
    Other caches stay as they are; with a rounding they raise UnsupportedUseError."""
    cast(Any, model)._kv_rounding = rounding

    # takes the model as an argument: a closure would keep it alive
    def prepare(model: Any, args: Any, options: dict[str, Any]) -> Any:
        cache = cache_of(options)
        for layer in getattr(cache, "layers", ()):
            is_rounded = hasattr(layer, "gives_rows")
            if hasattr(layer, "growing_keys") and is_rounded is (rounding is None):
                raise UnsupportedUseError(
                    "the cache was filled by a model with another kv_cache; give a new one"
                )
        if rounding is None:
            return give_room(cache)
        is_cached = options.get("use_cache")
        is_cached = model.config.use_cache if is_cached is None else is_cached
        if cache is None and is_cached and not torch.is_grad_enabled():
            cache = DynamicCache(config=model.config)
            options = {**options, cache_name(model.forward): cache}
        elif cache is not None and _is_foreign(cache):
            raise UnsupportedUseError(
                f"kv_cache int8 rounds what a DynamicCache keeps, got a {type(cache).__name__}; "
                "give none, or load the model with kv_cache exact"
            )
        give_room(cache, model)
        return args, options

    model.register_forward_pre_hook(prepare, with_kwargs=True)


def _is_foreign(cache: Any) -> bool:
    """Whether it is a cache of transformers that would keep unrounded values."""
    is_theirs = type(cache).__module__.startswith("transformers.")
    return is_theirs and (type(cache) is not DynamicCache or cache.offloading)


def take_place(
    cache: Any, layer_index: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Appends one unwritten token to a layer's keys and values.

    Returns keys ``[B, G, S, D]`` and values ``[B, G, S, V]``; None if the cache has another kind or
    dtype, or no room.
    """
    layers = getattr(cache, "layers", ())
    if not layer_index < len(layers) or getattr(cache, "offloading", False):
        return None
    layer = layers[layer_index]
    return layer.take_place() if can_take_place(layer, dtype) else None


def can_take_place(layer: Any, dtype: torch.dtype) -> bool:
    """Whether kernels can read and write a layer's keys and values in place."""
    if not isinstance(layer, GrowingLayer) or not layer.is_initialized:
        return False
    keys, values = cast(torch.Tensor, layer.keys), cast(torch.Tensor, layer.values)
    return keys.dtype is values.dtype and (keys.dtype is dtype or hasattr(layer, "gives_rows"))


def can_give_back(cache: Any) -> bool:
    """Whether tokens can be removed from a cache and restored."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(
        any(layer.has_previous_state.values())
        if type(layer) is LinearAttentionLayer
        else isinstance(layer, GrowingLayer) and layer.is_initialized and not layer.record_past
        for layer in layers
        if type(layer).__name__ != KEEPS_NOTHING
    )


def give_room(cache: Any, model: Any = None) -> None:
    """Makes a dynamic cache grow in place, in int8 if the ``model`` has a rounding. Leaves other
    caches, and None, as they are."""
    if type(cache) is not DynamicCache:
        return
    rounding: Rounding | None = getattr(model, "_kv_rounding", None)
    growing = GROWING if rounding is None else ROUNDED
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = growing[DynamicLayer]
    gives_rows = rounding is not None and rounding.gives_rows(model)
    for index, layer in enumerate(cache.layers):
        if type(layer) in growing and getattr(layer, "sliding_window", 2) > 1:
            taken: Any = object.__new__(growing[type(layer)])
            cache.layers[index] = taken
            vars(taken).update(vars(layer), growing_keys=_Growing(), growing_values=_Growing())
            if rounding is not None and taken.is_initialized:
                taken.keys, taken.values = round_rows(taken.keys), round_rows(taken.values)
        if rounding is not None and hasattr(cache.layers[index], "gives_rows"):
            cast(Any, cache.layers[index]).gives_rows = gives_rows


class GrowingLayer(DynamicLayer):
    """Keys and values are views of tensors with room after them. Cropped, reordered or copied views
    move into new tensors with the next token."""

    record_past = False  # transformers sets it to keep tokens that leave a window

    def __init__(self) -> None:
        super().__init__()
        self.growing_keys = _Growing()
        self.growing_values = _Growing()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends ``[B, G, Q, D]`` keys and values; returns all that the tokens attend to."""
        if key_states.requires_grad or value_states.requires_grad or self.record_past:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = self.growing_keys.append(cast(torch.Tensor, self.keys), key_states)
        values = self.growing_values.append(cast(torch.Tensor, self.values), value_states)
        self._append(keys, values, key_states.shape[-2])
        return keys, values

    def take_place(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Appends an unwritten token if there is room."""
        keys = None if self.record_past else self.growing_keys.take_place(self.keys)
        values = None if keys is None else self.growing_values.take_place(self.values)
        if keys is None or values is None:
            return None
        self._append(keys, values, 1)
        return keys, values

    def _append(self, keys: torch.Tensor, values: torch.Tensor, num_new: int) -> None:
        """Sets keys and values, and drops tokens that left a window."""
        self.keys, self.values = keys, values
        if self.is_sliding:
            layer = cast(Any, self)
            layer.cumulative_length += num_new
            self.keys = self.growing_keys.keep_last(layer.sliding_window - 1)
            self.values = self.growing_values.keep_last(layer.sliding_window - 1)

    @property
    def is_as_left(self) -> bool:
        """Whether nothing replaced the keys and values since the last update."""
        views = self.growing_keys.view, self.growing_values.view
        return self.keys is views[0] and self.values is views[1]

    def give_back(self, num_tokens: int) -> None:
        """Removes the last tokens; `take_place` restores them until others are appended."""
        kept, layer = sys.maxsize, cast(Any, self)
        if self.is_sliding:
            layer.cumulative_length -= num_tokens
            kept = layer.sliding_window - 1
        self.keys = self.growing_keys.give_back(num_tokens, kept)
        self.values = self.growing_values.give_back(num_tokens, kept)


class GrowingSlidingLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """The last tokens of tensors with room after them."""


class RoundedLayer(GrowingLayer):
    """Keys and values in int8. They are rounded before attention, so tokens of the same pass see
    the same values as later ones."""

    gives_rows = False  # attention takes rounded rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends ``[B, G, Q, D]`` keys and values, or rounded rows; returns all of them, as rows
        or in the given type."""
        if key_states.dtype is torch.uint8:
            return super().update(key_states, value_states, *args, **kwargs)
        if key_states.requires_grad or value_states.requires_grad:
            raise UnsupportedUseError(
                "kv_cache int8 has no gradients: call the model with use_cache=False, or load "
                "it with kv_cache exact"
            )
        new = round_rows(key_states), round_rows(value_states)
        keys, values = super().update(*new, *args, **kwargs)
        if self.gives_rows and not torch.compiler.is_compiling():
            return keys, values
        return widen_rows(keys, key_states.dtype), widen_rows(values, value_states.dtype)


class RoundedSlidingLayer(RoundedLayer, GrowingSlidingLayer):
    """The last tokens of tensors in int8 with room after them."""


GROWING: dict[type, type[GrowingLayer]] = {
    DynamicLayer: GrowingLayer,
    DynamicSlidingWindowLayer: GrowingSlidingLayer,
}
ROUNDED: dict[type, type[GrowingLayer]] = {
    DynamicLayer: RoundedLayer,
    DynamicSlidingWindowLayer: RoundedSlidingLayer,
}
"""Our classes for transformers' layers, exact and in int8."""


class _Growing:
    """A tensor ``[..., tokens, D]`` that grows along its tokens and can drop the first ones. Only
    ``view``, the last returned view, grows in place: tensors that callers hold never change."""

    def __init__(self) -> None:
        self.room: torch.Tensor | None = None
        self.view: torch.Tensor | None = None
        self.start = 0  # of the view in the room

    def append(self, cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """``torch.cat((cached, new), -2)``; ``cached`` may be empty, of any shape."""
        num_cached = cached.shape[-2] if cached.numel() else 0
        num_tokens = num_cached + new.shape[-2]
        dtype = new.dtype
        if num_cached and cached.dtype is not dtype:  # autocast in some steps only
            dtype = torch.promote_types(cached.dtype, dtype)
        room = self.room
        if (
            room is None
            or cached is not self.view
            or room.dtype is not dtype
            or self.start + num_tokens > room.shape[-2]
            or (room.is_inference() and not torch.is_inference_mode_enabled())
        ):
            self.start = 0
            num_room = room_for(num_tokens, len(new)) if num_cached else num_tokens
            shape = (*new.shape[:-2], num_room, new.shape[-1])
            room = self.room = new.new_empty(shape, dtype=dtype)
            if num_cached:
                room.narrow(-2, 0, num_cached).copy_(cached)
        # .data: autograd would see a change of views that it saved for a backward pass
        room.data.narrow(-2, self.start + num_cached, new.shape[-2]).copy_(new)
        self.view = room.narrow(-2, self.start, num_tokens)
        return self.view

    def take_place(self, cached: torch.Tensor | None) -> torch.Tensor | None:
        """``cached`` with one unwritten token more; None if it cannot grow in place."""
        room = self.room
        if room is None or cached is None or cached is not self.view:
            return None
        num_tokens = cached.shape[-2] + 1
        if self.start + num_tokens > room.shape[-2]:
            return None
        if room.is_inference() and not torch.is_inference_mode_enabled():  # cannot be written to
            return None
        self.view = room.narrow(-2, self.start, num_tokens)
        return self.view

    def keep_last(self, num_tokens: int) -> torch.Tensor:
        """Drops all but the last tokens."""
        view = cast(torch.Tensor, self.view)
        dropped = max(view.shape[-2] - num_tokens, 0)
        if dropped:
            self.start += dropped
            self.view = view = view.narrow(-2, dropped, num_tokens)
        return view

    def give_back(self, num_tokens: int, num_kept: int = sys.maxsize) -> torch.Tensor:
        """Removes the last tokens. A window gets earlier ones back, up to ``num_kept``."""
        room, view = cast(torch.Tensor, self.room), cast(torch.Tensor, self.view)
        end = self.start + view.shape[-2] - num_tokens
        self.start = max(end - num_kept, 0)
        self.view = room.narrow(-2, self.start, end - self.start)
        return self.view


class SeenKeys(torch.Tensor):
    """A mask ``[B, 1, Q, S]``, bool or added to scores.

    Our attention takes ``sight``. Any other operation materialises the mask, which may then be
    changed, and ``sight`` becomes None.
    """

    sight: Sight | None
    _made: torch.Tensor

    @staticmethod
    def __new__(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, sight: Sight) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        made.sight = sight
        return made

    def __repr__(self, **_: Any) -> str:
        return f"SeenKeys({list(self.shape)}, {self.dtype}, {self.sight})"

    def made(self) -> torch.Tensor:
        """The mask itself."""
        if self.sight is not None:
            allowed = self.sight.allows(*self.shape[2:])
            if self.dtype != torch.bool:
                lowest = torch.finfo(self.dtype).min
                allowed = torch.zeros_like(allowed, dtype=self.dtype).masked_fill(~allowed, lowest)
            self._made, self.sight = allowed.expand(self.shape).contiguous(), None
        return self._made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.made, (args, kwargs or {}))
        return func(*args, **kwargs)


def as_seen_keys(make_mask: Callable[..., Any], *, adds: bool) -> Callable[..., Any]:
    """Wraps transformers' ``make_mask``: prompts without padding get `SeenKeys`. ``adds`` means
    masks that are added to scores."""

    def mask(*given: Any, **asked: Any) -> Any:
        seen = None if given else _seen_keys(asked, adds=adds)
        return make_mask(*given, **asked) if seen is None else seen

    return mask


def _seen_keys(asked: dict[str, Any], *, adds: bool) -> SeenKeys | None:
    num_new, num_keys = asked["q_length"], asked["kv_length"]
    first, first_key = asked.get("q_offset", 0), asked.get("kv_offset", 0)
    if num_new == 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not (isinstance(first, int) and isinstance(first_key, int)) or native_library() is None:
        return None
    if torch.device(asked.get("device", "cpu")).type != "cpu" or first < first_key:
        return None
    is_plain, window = window_of_mask(asked.get("mask_function"))
    if not is_plain:
        return None
    padding, end = asked.get("attention_mask"), first + num_new
    if padding is not None and not (padding.shape[-1] >= end and bool(padding[..., :end].all())):
        return None
    if not adds and num_new == num_keys and (window is None or window >= num_keys):
        return None  # SDPA needs none
    dtype = asked["dtype"] if adds else torch.bool
    return SeenKeys(
        (asked["batch_size"], 1, num_new, num_keys), dtype, Sight(first - first_key, window)
    )
