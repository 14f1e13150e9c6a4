"""Caches of one sequence, and of several sequences in one forward pass.

Shape suffixes: B sequences, H query heads, G key heads, Q new tokens, S tokens, D key width, V
value width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
)

from moe_runtime.checkpoints.transformers_private import cache_name, is_experts_module
from moe_runtime.inference.device.static_caches import RowCache, RowLayer
from moe_runtime.inference.known_classes import keeps_states
from moe_runtime.inference.kv_cache import SeenKeys, can_take_place, give_room
from moe_runtime.kernels.decode_step.attention_step import AttentionWeights, attention_steps
from moe_runtime.kernels.decode_step.prompt_attention import Sight
from moe_runtime.memory.device.cuda_device import CudaDevice

STATE_FACTS = (
    *("is_conv_states_initialized", "is_recurrent_states_initialized"),
    *("has_previous_state", "conv_kernel_size"),
)
_States = dict[int, torch.Tensor | None]


_STATES = ("conv_states", "recurrent_states")


class _JoinedStates(LinearAttentionLayer):
    """A layer with the facts of others, without states."""

    def __init__(self, first: LinearAttentionLayer) -> None:
        super().__init__(number_of_states=first.number_of_states)
        self.dtype, self.device = first.dtype, first.device
        for name in STATE_FACTS:
            setattr(self, name, dict(getattr(first, name)))


class BatchStates(_JoinedStates):
    """The states of one layer of several caches, one row of the batch for each.

    Models write states in place, so the sequences' states become views of the batch's rows: nothing
    is copied after a pass, nor before the next pass of the same sequences.
    """

    def __init__(self, layers: Sequence[LinearAttentionLayer]) -> None:
        super().__init__(layers[0])
        for name in _STATES:
            setattr(self, name, _join([getattr(layer, name) for layer in layers]))


def _join(states: Sequence[_States]) -> _States:
    """Each state of all sequences; the sequences' own become rows of it."""
    joined: _States = {}
    for index in states[0]:
        rows = [row for own in states if (row := own[index]) is not None]
        joined[index] = whole = _whole(rows) if rows else None
        if rows and whole is None:
            joined[index] = whole = torch.cat(rows)
            for own, row in zip(states, whole.split(1), strict=True):
                own[index] = row
    return joined


class RowsOfStates(_JoinedStates):
    """States of one layer after each of the next tokens of several caches.

    A step function goes through the rows with `each_row`; each row begins with the state of the row
    before. A cache holds the last of its rows; `take_out` and `bring_back` move it to others.
    """

    def __init__(self, layers: Sequence[LinearAttentionLayer], rows: Sequence[int]) -> None:
        super().__init__(layers[0])
        for name in _STATES:
            states = getattr(layers[0], name)
            setattr(self, name, {i: _in_rows(layers, name, i, rows) for i in states})


def _in_rows(
    layers: Sequence[LinearAttentionLayer], name: str, index: int, rows: Sequence[int]
) -> torch.Tensor | None:
    """A tensor of all rows, with the first row of each cache filled."""
    like = getattr(layers[0], name)[index]
    if like is None:
        return None
    whole, first = like.new_empty((sum(rows), *like.shape[1:])), 0
    for layer, count in zip(layers, rows, strict=True):
        own = whole[first : first + count].split(1)
        own[0].copy_(getattr(layer, name)[index])
        getattr(layer, name)[index] = own[-1]
        vars(layer).setdefault(_ROWS, {})[name, index] = [*own]
        first += count
    setattr(whole, _ROWS, [*rows])
    return whole


_ROWS = "rows_of_texts"
"""Attribute of a tensor of states: the number of rows of each text. In a cache's layer: its rows,
by name and index of the state."""


def each_row(states: torch.Tensor) -> Iterator[torch.Tensor] | None:
    """Yields each row's state in turn, filled with the state of the row before; the caller updates
    it in place. None for states of one row per text."""
    rows = getattr(states, _ROWS, None)
    if rows is None:
        return None

    def one_by_one() -> Iterator[torch.Tensor]:
        for own in states.split([*rows]):
            before = own[:1]
            for row in own.split(1):
                if row.data_ptr() != before.data_ptr():
                    row.copy_(before)
                yield row
                before = row

    return one_by_one()


def take_out(cache: DynamicCache, num_tokens: int) -> None:
    """Removes the last tokens, which were rows of the last pass."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            _move_rows(layer, -num_tokens)
        elif isinstance(layer, DynamicLayer):  # other layers keep nothing
            cast(Any, layer).give_back(num_tokens)


def bring_back(cache: DynamicCache) -> None:
    """Restores the first of the removed tokens."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            _move_rows(layer, 1)
        elif isinstance(layer, DynamicLayer):
            assert cast(Any, layer).take_place() is not None, "the pass had room for its tokens"


def is_as_left(cache: DynamicCache) -> bool:
    """Whether only `take_out` and `bring_back` changed a cache since its rows were computed."""
    return all(
        all(_place_of(layer, *key) is not None for key in vars(layer).get(_ROWS, {}))
        if isinstance(layer, LinearAttentionLayer)
        else not isinstance(layer, DynamicLayer) or cast(Any, layer).is_as_left
        for layer in cache.layers
    )


def _place_of(layer: LinearAttentionLayer, name: str, index: int) -> int | None:
    rows, own = vars(layer)[_ROWS][name, index], getattr(layer, name)[index]
    return next((place for place, row in enumerate(rows) if row is own), None)


def _move_rows(layer: LinearAttentionLayer, num_tokens: int) -> None:
    for (name, index), rows in vars(layer)[_ROWS].items():
        place = _place_of(layer, name, index)
        assert place is not None, "the cache is as its rows were left"
        getattr(layer, name)[index] = rows[place + num_tokens]


def _whole(rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that consists of these rows in this order, if there is one."""
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
    """Copies the states of a sequence out of a batch's tensors, which can then be freed."""
    for layer in cache.layers:
        vars(layer).pop(_ROWS, None)
    for own in _states_of(cache):
        for index, row in own.items():
            if row is not None and row.untyped_storage().nbytes() > row.nbytes:
                own[index] = row.clone()


def have_close_states(cache: DynamicCache, other: DynamicCache, tolerance: float) -> bool:
    """Whether each state differs from the other's by at most ``tolerance`` times its norm."""
    pairs = zip(_tensors_of(cache), _tensors_of(other), strict=True)
    return all(
        torch.dist(state.float(), given.float()) <= tolerance * given.float().norm()
        for state, given in pairs
    )


def have_same_states(cache: DynamicCache, other: DynamicCache) -> bool:
    """Whether the states of two caches have the same bits."""
    return all(map(torch.equal, _tensors_of(cache), _tensors_of(other)))


def bytes_of_states(model: Any) -> int | None:
    """Bytes of a sequence's states, from a pass on the meta device. 0 without states; None if the
    model fails in such a pass."""
    if not keeps_states(model.config):
        return 0
    cache, own = DynamicCache(config=model.config), cache_name(model.forward)
    experts = [module for module in model.modules() if is_experts_module(module)]
    with contextlib.ExitStack() as stack, torch.inference_mode():
        for module in experts:  # their code may look at ids of experts
            vars(module)["forward"] = lambda hidden, *_, **__: hidden
            stack.callback(vars(module).pop, "forward")
        try:
            model(torch.zeros((1, 3), dtype=torch.int64, device="meta"), **{own: cache})
        except (RuntimeError, TypeError, ValueError):
            return None
    return sum(state.nbytes for state in _tensors_of(cache))


def tokens_of_states(cache: DynamicCache, reserved: int) -> int:
    """Tokens whose reserved memory has room for a sequence's states, besides keys and values.

    A token has ``reserved`` bytes, as if every layer kept keys and values. States use the part that
    layers without keys and values leave.
    """
    states = sum(state.nbytes for state in _tensors_of(cache))
    filled: list[Any] = [
        layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized
    ]
    parts = [part for layer in filled for part in (layer.keys, layer.values)]
    used = sum(part.nbytes // max(part.shape[-2], 1) for part in parts)
    left = reserved - used
    return -(-states // (left if left > 0 else reserved))


def _tensors_of(cache: DynamicCache) -> Iterator[torch.Tensor]:
    return (row for own in _states_of(cache) for row in own.values() if row is not None)


def _states_of(cache: DynamicCache) -> Iterator[_States]:
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            yield layer.conv_states
            yield layer.recurrent_states


def new_cache(model: Any, *, grows: bool) -> DynamicCache:
    """An empty cache for a model. It grows in place if ``grows`` is set."""
    cache = DynamicCache(config=model.config)
    if grows:
        give_room(cache, model)
    return cache


def filled(
    cache: DynamicCache, *, with_windows: bool = True
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {
        index: (cast(torch.Tensor, layer.keys), cast(torch.Tensor, layer.values))
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, DynamicLayer) and (with_windows or not layer.is_sliding)
    }


def have_same_tokens(cache: DynamicCache, other: DynamicCache) -> bool:
    """Whether keys and values of two caches have the same bits."""
    own, expected = filled(cache), filled(other)
    return own.keys() == expected.keys() and all(
        all(map(torch.equal, own[layer], expected[layer])) for layer in own
    )


def set_room(cache: DynamicCache, num_tokens: int) -> None:
    """Sets the room of layers that keep every token; tokens beyond it are dropped."""
    for layer in cache.layers:
        grown: Any = layer
        if hasattr(grown, "growing_keys") and grown.is_initialized and not grown.is_sliding:
            grown.keys = _with_room(grown.growing_keys, grown.keys, num_tokens)
            grown.values = _with_room(grown.growing_values, grown.values, num_tokens)


def _with_room(growing: Any, cached: Any, num_tokens: int) -> torch.Tensor:
    room = cached.new_empty((*cached.shape[:-2], num_tokens, cached.shape[-1]))
    kept = min(cached.shape[-2], num_tokens)
    view = room.narrow(-2, 0, kept)
    view.copy_(cached.narrow(-2, 0, kept))
    growing.room, growing.view, growing.start = room, view, 0
    return view


@dataclass(frozen=True, slots=True, eq=False)
class KeysOfSequences:
    """Replaces the keys in a call of attention: each sequence has its own.

    Attributes:
        keys: of each sequence, ``[1, G, S, D]``.
        values: of each sequence, ``[1, G, S, V]``.
        num_new: new tokens of each sequence; None if each has one, in a row of its own.
        window: tokens that a token attends to, itself included; None for all.
        adds_mask: masks are added to the scores, not bool.
        expand: makes keys and values from cached latents; None if keys and values are cached.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    num_new: Sequence[int] | None
    window: int | None
    adds_mask: bool
    expand: Any = None

    def attend(
        self,
        attention: Callable[..., tuple[torch.Tensor, Any]],
        module: torch.nn.Module,
        query: torch.Tensor,
        value: object,
        mask: object,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """Attention of each sequence to its own tokens; ``value`` and ``mask`` are unused.

        ``query`` is ``[B, H, 1, D]``, or ``[1, H, Q, D]`` with sequences one after another. Returns
        ``[B, 1, H, V]`` or ``[1, Q, H, V]``, and None.
        """
        if self.expand is not None and self.num_new is None:
            together = self.expand.attend_each(query, self.keys, self.values, options)
            if together is not None:
                return together, None
        dim = 0 if self.num_new is None else 2
        queries = query.split(1 if self.num_new is None else list(self.num_new), dim)
        mixed = []
        for own, keys, values in zip(queries, self.keys, self.values, strict=True):
            own_mask = self._mask(own, keys)
            if self.expand is not None:
                keys, values = self.expand(keys, values)
            mixed.append(attention(module, own, keys, values, own_mask, **options)[0])
        return torch.cat(mixed, dim=dim and 1), None

    def _mask(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        num_new, num_keys = query.shape[2], keys.shape[2]
        is_plain = num_new == num_keys and not self.adds_mask
        if num_new == 1 or (is_plain and (self.window is None or num_keys <= self.window)):
            return None
        dtype = query.dtype if self.adds_mask else torch.bool
        sight = Sight(num_keys - num_new, self.window)
        seen = SeenKeys((1, 1, num_new, num_keys), dtype, sight)
        return seen if query.is_cpu else seen.made().to(query.device)


class BatchCache(Cache):
    """The caches of several sequences in one forward pass.

    The pass has one row of one token per sequence (``[B, 1]``). With ``num_new`` it has a single
    row, with the new tokens of the sequences one after another (``[1, Q]``). With ``rows`` a
    sequence has several rows, its next tokens in order: each attends to those before it.

    Attributes:
        is_one_text: all rows belong to the text that this thread began last.
    """

    is_one_text = False

    def __init__(
        self,
        caches: Sequence[DynamicCache],
        num_new: Sequence[int] | None = None,
        *,
        adds_mask: bool = False,
        rows: Sequence[int] | None = None,
    ) -> None:
        groups = zip(*(cache.layers for cache in caches), strict=True)
        made = [_joined(group, num_new, adds_mask, rows) for group in groups]
        super().__init__(layers=made)
        total = sum(cache.get_seq_length() for cache in caches)
        self._length = total if num_new else total // (sum(rows) if rows else len(caches))

    def step_each(
        self,
        layer_idx: int,
        hidden: torch.Tensor,
        weights: AttentionWeights | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor | None:
        """A whole attention layer for rows of one token: ``[B, 1, D]`` to ``[B, 1, D]``.

        ``cos`` and ``sin`` are of each row's position, ``[B, 1, R]``. Returns None, and appends
        nothing, for a layer without ``weights`` or of another form.
        """
        layer: Any = self.layers[layer_idx]
        # rows are independent in kernels, so `RowsAlone` would only cost time
        with torch._C.DisableTorchFunction():
            if weights is None or not isinstance(layer, _BatchLayer) or len(cos) != len(hidden):
                return None
            if {hidden.dtype, cos.dtype, sin.dtype} != {weights.dtype}:
                return None
            cached = layer.take_places(weights.dtype)
            if cached is None:
                return None
            x_BD, cos_BR, sin_BR = (part.reshape(len(hidden), -1) for part in (hidden, cos, sin))
            mixed_BD = attention_steps(x_BD, weights, cos_BR, sin_BR, cached)
            return mixed_BD.view(hidden.shape[0], 1, -1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cached tokens: of all sequences if they share one row, else the mean of the rows."""
        return self._length


def _appended(layer: Any, num_tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with more tokens of any content."""
    return layer.update(
        layer.keys.new_empty((*layer.keys.shape[:-2], num_tokens, layer.keys.shape[-1])),
        layer.values.new_empty((*layer.values.shape[:-2], num_tokens, layer.values.shape[-1])),
    )


def make_room(cache: DynamicCache, num_tokens: int) -> None:
    """Makes room for the next tokens, so that they can be appended and removed in place."""
    for layer in cast(list[Any], cache.layers):
        _appended(layer, num_tokens)
        layer.give_back(num_tokens)


def _places(layer: Any, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values up to each new token of a sequence; the new tokens are not written."""
    if num_rows == 1:
        return [layer.take_place() or _appended(layer)]
    _appended(layer, num_rows)
    layer.give_back(num_rows)
    return [layer.take_place() for _ in range(num_rows)]


def _row_views(part: torch.Tensor, num_rows: int, window: int | None) -> list[torch.Tensor]:
    """The keys or values ``[1, G, S, D]`` that each of the last tokens attends to."""
    ends = range(part.shape[2] - num_rows + 1, part.shape[2] + 1)
    firsts = [0 if window is None else max(end - window, 0) for end in ends]
    return [part[:, :, first:end] for first, end in zip(firsts, ends, strict=True)]


def _joined(
    layers: Sequence[Any],
    num_new: Sequence[int] | None,
    adds_mask: bool,
    rows: Sequence[int] | None,
) -> Any:
    if not isinstance(layers[0], LinearAttentionLayer):
        return _BatchLayer(layers, num_new, adds_mask, rows)
    assert num_new is None, "running states take one token of each sequence"
    if rows is not None:
        return RowsOfStates(layers, rows)
    if isinstance(layers[0], DynamicLayer):
        return _BatchKeysAndStates(layers, adds_mask)
    return BatchStates(layers)


class _BatchLayer(CacheLayerMixin):
    def __init__(
        self,
        layers: Sequence[Any],
        num_new: Sequence[int] | None,
        adds: bool,
        rows: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self._layers = layers
        self._num_new = num_new
        self._rows = rows
        self._adds_mask = adds
        self.is_sliding = bool(getattr(layers[0], "is_sliding", False))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, torch.Tensor]:
        """Appends each sequence's new keys and values to its own; ``[B, G, 1, D]`` or one row."""
        dim = 0 if self._num_new is None else 2
        sizes: Any = 1 if self._num_new is None else list(self._num_new)
        keys, values = [], []
        window = self._layers[0].sliding_window if self.is_sliding else None
        new = key_states, value_states
        if self._rows is not None:
            new = key_states.transpose(0, 2), value_states.transpose(0, 2)
            dim, sizes = 2, list(self._rows)
        parts = zip(*(part.split(sizes, dim) for part in new), strict=True)
        for index, (layer, own) in enumerate(zip(self._layers, parts, strict=True)):
            num_rows = 0 if self._rows is None else self._rows[index]
            for part, found in zip((keys, values), layer.update(*own), strict=True):
                part.extend(_row_views(found, num_rows, window) if num_rows else [found])
        together = KeysOfSequences(keys, values, self._num_new, window, self._adds_mask)
        return together, value_states

    def take_places(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Appends one unwritten token to the keys and values of each row."""
        if not all(can_take_place(layer, dtype) for layer in self._layers):
            return None
        rows = self._rows or [1] * len(self._layers)
        each = zip(self._layers, rows, strict=True)
        return [place for layer, num_rows in each for place in _places(layer, num_rows)]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return self._layers[0].get_seq_length()

    def get_max_length(self) -> int:
        return -1


class _BatchKeysAndStates(_BatchLayer, BatchStates):
    def __init__(self, layers: Sequence[Any], adds_mask: bool) -> None:
        BatchStates.__init__(self, layers)
        _BatchLayer.__init__(self, layers, None, adds_mask)


class RowStep(NamedTuple):
    """Inputs of a step of some rows, at fixed addresses.

    ``numbers_3B`` are int64: tokens, their places, and rows of the mask tables.
    """

    cache: RowCache
    numbers_3B: torch.Tensor


class RowMemory:
    """Rows with places for ``num_tokens`` tokens in every layer of a model."""

    def __init__(
        self, config: Any, device: CudaDevice, like: DynamicCache, num_rows: int, num_tokens: int
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
        """Copies the tokens of a sequence into a row; windows have only the last ones."""
        layers: list[Any] = [*cache.layers]
        for pair, layer in zip(self._layers, layers, strict=True):
            for rows, own in zip(pair, (layer.keys, layer.values), strict=True):
                # masked places must be finite too
                rows[row].zero_()
                rows[row, :, num_tokens - own.shape[2] : num_tokens].copy_(own[0])

    def move(self, row: int, to: int) -> None:
        for pair in self._layers:
            for rows in pair:
                rows[to].copy_(rows[row])

    def read(self, row: int, num_tokens: int, cache: DynamicCache, *, is_view: bool) -> None:
        """Fills an empty cache with the tokens of a row. A view is valid until the row changes."""
        layers: list[Any] = [*cache.layers]
        for index, (layer, pair) in enumerate(zip(layers, self._layers, strict=True)):
            own = [rows[row, None, :, :num_tokens] for rows in pair]
            if is_view:
                layer.keys, layer.values = own
                layer.is_initialized = True
            else:
                cache.update(*own, index)

    def step(
        self, first: int, tokens: Sequence[int], places: Sequence[int]
    ) -> tuple[RowCache, dict[str, Any]]:
        """The cache and the other arguments of the model for one more token of adjacent rows.
        ``places`` are the numbers of tokens in the rows."""
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
        """Additive masks of all places; row L - 1 - p is for a token at place p."""
        some: Any = self._layers[0][0]
        length = self.num_tokens
        behind = torch.arange(1 - length, length, device=some.device)  # from the token
        is_hidden = behind > 0
        if window is not None:
            is_hidden |= behind <= -window
        ramp = torch.zeros(len(behind), dtype=some.dtype, device=some.device)
        return ramp.masked_fill_(is_hidden, -torch.inf).unfold(0, length, 1)
