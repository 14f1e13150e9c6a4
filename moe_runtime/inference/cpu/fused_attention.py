"""Attention layers in steps of one token: one call of the kernels instead of forty operations.

A layer is recognised by what it does, not by its family. Before the fused call is used, the layer's
own ``forward`` is run on stand-ins: it may read nothing but the parts and constants of the usual
attention layer, and the fused call has to give its bits on inputs that would show any difference.
Of several tokens of a sequence the kernels compute what lies between products and scores, if that
gives the layer's bits too. Every layer that somebody looks into or changes goes its own way.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.checkpoints.transformers_private import ATTENTION_SETTING, cache_name
from moe_runtime.inference.cpu import attention_parts as parts
from moe_runtime.inference.cpu.attention import (
    ATTENTION,
    CHANGING_OPTIONS,
    EAGER_ATTENTION,
    added_mask,
    changes_attention,
)
from moe_runtime.inference.cpu.small_batch import SmallBatchLinear, SmallBatchRMSNorm, is_observed
from moe_runtime.inference.cpu.stand_ins import Asked, call_on_stand_ins, takes_usual_arguments
from moe_runtime.inference.kv_cache import growing_cache, take_place
from moe_runtime.kernels.attention_step import AttentionWeights, attention_heads, attention_step
from moe_runtime.kernels.linear import ROWS_PER_CALL, native_row_limit
from moe_runtime.kernels.native import native_library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CALLED = ("ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb", "eager_attention_forward")
"""What it calls, of its module: programs put functions of their own in their place."""

Case = tuple[int, float, bool, int]
"""Of the comparison: tokens in the cache, the size of the hidden values (those that are clipped
show in large ones), whether the first token is masked, and how many are new."""

_STEPS = ((3, 1.0, False, 1), (6, 1.0, True, 1), (3, 1e3, False, 1))
_PROMPT = (6, 1.0, True, 3)


def fuse_attention_layers(model: PreTrainedModel) -> None:
    """Gives the attention layers of a loaded model on the CPU that qualify a fused single step.

    The weights of queries, keys and values move into one buffer, of which the layers' parameters
    are parts from then on.
    """
    library = native_library()
    if library is None:
        return
    known: dict[type, bool] = {}
    for module in model.modules():
        if has_usual_parts(module) and _asks_for_nothing_else(module, known):
            parts.merge(*(parts.linear_of(module, name) for name in parts.PROJECTIONS[:3]))
            cast(Any, module).forward = FusedAttention(module)


class FusedAttention:
    """The ``forward`` of an attention layer, with ways of its own for one token and for several."""

    shows_weights = EAGER_ATTENTION  # the attention whose second result is not always None
    takes_prompts = True  # and not single tokens alone

    def __init__(self, module: Any) -> None:
        """Takes the place of the method; the layer's own stays in its class."""
        self._module = module
        self._attention = self._served = getattr(module.config, ATTENTION_SETTING)
        self._names = parts.names_of(module)
        self._parts = [module.get_submodule(name) for name in self._names]
        # not the function around it that takes the older name of the cache
        self._own: Any = inspect.unwrap(type(module).forward)
        self._cache_name = cache_name(self._own)
        self._functions = self._functions_now()
        self._norms: list[tuple[object, set[str]]] = [
            (module._modules[name], {"eps"}) for name in self._names if name in parts.NORMS
        ]
        self._owners = self._norms
        self._options: set[str] = set()
        self._constants: list[Any] = []
        self._places: list[Any] = []
        self._weights: AttentionWeights | None = None
        self._angle_dim = 0
        self._fuses_prompts = False
        registered = self._functions[2]
        self._prompt_attention = registered and registered.get(self._attention)
        self.most_sequences = 0

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """What the layer computes: hidden values ``[B, Q, D]``, and None for attention weights."""
        out = None if args else self._step(**kwargs)
        if out is not None:
            return out, None
        return type(self._module).forward(self._module, *args, **kwargs)

    def _step(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor | None:
        """The fused step, or None where the layer has to go its own way."""
        cache = options.pop(self._cache_name, None)
        if (
            hidden_states.ndim != 3
            or (hidden_states.shape[1] != 1 and not self.takes_prompts)
            or not isinstance(position_embeddings, tuple)
            or cache is None
            or torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or torch.is_autocast_enabled(hidden_states.device.type)
            or torch.compiler.is_compiling()
            or (not CHANGING_OPTIONS.isdisjoint(options) and changes_attention(options))
            or self._is_changed()
        ):
            return None
        cos, sin = position_embeddings
        batch, num_new, _ = hidden_states.shape
        if cos.ndim != 3 or cos.shape[1] != num_new:
            return None
        if num_new != 1:
            if not (self._may_fuse(1, cos, options) and self._fuses_prompts):
                return None
            return self._prompt(hidden_states, cos, sin, attention_mask, cache, options)
        # sequences with caches of their own, see serving, are gone through one by one
        each = getattr(cache, "step_each", None) if batch > 1 else None
        if not self._may_fuse(1 if each else batch, cos, options):
            return None
        if each:
            return each(self._module.layer_idx, hidden_states, self._weights, cos, sin)
        return self._fused(hidden_states, cos, sin, attention_mask, cache)

    def _is_changed(self) -> bool:
        """Whether the layer trains, is looked into, or is not made of what it was made of."""
        module = self._module
        # past the method of configurations that looks each name up in a table first
        name = object.__getattribute__(module.config, ATTENTION_SETTING)
        if name not in (self._attention, self._served) or module.training:
            return True
        if self._attention == self.shows_weights and module._forward_hooks:
            return True
        if torch.nn.modules.module._has_any_global_hook():
            return True
        if any(map(operator.is_not, self._functions_now(), self._functions)):
            return True
        if any(map(operator.is_not, map(module._modules.get, self._names), self._parts)):
            return True
        return is_observed(*self._parts)

    def _may_fuse(self, num_sequences: int, cos: Tensor, options: dict[str, Any]) -> bool:
        """Whether a step of so many sequences has been found to give the layer's own bits."""
        places = self._places_now()
        constants: list[Any] = []
        for owner, names in self._owners:
            constants.extend(map(vars(owner).get, names))
        if (
            places != self._places
            or len(constants) != len(self._constants)
            or any(map(operator.is_not, constants, self._constants))
            or cos.shape[-1] != self._angle_dim
            or not options.keys() <= self._options
        ):
            self._places = []  # until all that depends on them is known
            self._options.update(options)
            agrees = any(self._bind(pairs_share=b) and self._compare(cos) for b in (False, True))
            self.most_sequences = self._most_sequences() if agrees else 0
            self._places, self._angle_dim = places, cos.shape[-1]
        return num_sequences <= self.most_sequences

    def _places_now(self) -> list[Any]:
        """Where the weights lie."""
        places: list[Any] = []
        for part in (*self._parts, self._module):
            for tensor in part._parameters.values():
                if tensor is None:
                    continue
                if (matrix := tensor.__dict__.get("matrix")) is not None:  # of packed weights
                    places.append(matrix)
                else:
                    places += (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        return places

    def _bind(self, *, pairs_share: bool) -> bool:
        self._weights = parts.bind(self._module, pairs_share=pairs_share)
        return self._weights is not None

    def _most_sequences(self) -> int:
        """Up to how many sequences the layer's own products are the native ones too."""
        weights, library = self._weights, native_library()
        if weights is None or weights.record is None or library is None:
            return 0
        most = min(native_row_limit(library, weights.dtype), ROWS_PER_CALL)
        products = (getattr(weight, "product", None) for weight in (weights.qkv, weights.output))
        return min((most, *(product.row_limit for product in products if product is not None)))

    def _functions_now(self) -> list[Any]:
        """What the layer's own way calls, and the configuration it asks."""
        names = getattr(self._own, "__globals__", {})  # any object may have been put in its place
        return [type(self._module).forward, self._module.config, *map(names.get, _CALLED)]

    def _fused(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor | None:
        weights = self._weights
        assert weights is not None
        batch = hidden_states.shape[0]
        if mask is not None and (mask.ndim != 4 or mask.shape[:3] != (batch, 1, 1)):
            return None
        if {hidden_states.dtype, cos.dtype, sin.dtype} != {weights.dtype}:
            return None
        place = take_place(cache, self._module.layer_idx, weights.dtype)
        if place is None:
            return None
        out = attention_step(
            hidden_states.reshape(batch, -1),
            weights,
            cos.reshape(cos.shape[0], -1),
            sin.reshape(sin.shape[0], -1),
            *place,
            None if mask is None else added_mask(mask[:, 0, 0]),
        )
        return out.view(batch, 1, -1)

    def _prompt(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: Any,
        options: dict[str, Any],
    ) -> Tensor | None:
        module, weights, registered = self._module, self._weights, self._functions[2]
        attend = registered and registered.get(getattr(module.config, ATTENTION_SETTING))
        if weights is None or attend is None or attend is not self._prompt_attention:
            return None
        if {hidden_states.dtype, cos.dtype, sin.dtype} != {weights.dtype}:
            return None
        q, k, v, o = (parts.linear_of(module, name) for name in parts.PROJECTIONS)
        query, key = attention_heads(q(hidden_states), k(hidden_states), weights, cos, sin)
        value = v(hidden_states).unflatten(-1, (weights.num_key_heads, -1)).transpose(1, 2)
        key, value = cache.update(key, value, module.layer_idx)
        if weights.sinks is not None:
            options = {**options, "s_aux": weights.sinks}
        mixed, _ = attend(module, query, key, value, mask, scaling=module.scaling, **options)
        return o(mixed.flatten(2))

    def _compare(self, cos: Tensor) -> bool:
        """Whether the layer's own way asks for nothing else, and the fused step gives its bits."""
        asked = Asked()
        generator = torch.Generator().manual_seed(0)
        agrees = False
        # on stand-ins, code that nobody knows may fail in any way
        with torch.inference_mode(), contextlib.suppress(Exception):
            agrees = all(self._agrees(cos, asked, generator, case) for case in _STEPS)
        asked_more, self._fuses_prompts = Asked(), False
        if agrees and self.takes_prompts:
            with torch.inference_mode(), contextlib.suppress(Exception):
                self._fuses_prompts = self._agrees(cos, asked_more, generator, _PROMPT)
            self._fuses_prompts &= not asked_more.more
        constants = asked.constants + asked_more.constants
        owners = [(getattr(owner, "behind", owner), names) for owner, names in constants]
        self._owners = [*owners, *self._norms]
        self._constants = [vars(owner).get(name) for owner, names in self._owners for name in names]
        return agrees and not asked.more

    def _agrees(self, cos: Tensor, asked: Asked, generator: torch.Generator, case: Case) -> bool:
        """Whether both ways give the same bits for tokens behind some in the cache."""
        length, scale, is_masked, num_new = case
        weights, index = self._weights, self._module.layer_idx
        assert weights is not None

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(weights.dtype)

        hidden = random(1, num_new, weights.qkv.shape[1]) * scale
        angles = random(1, num_new, cos.shape[-1]), random(1, num_new, cos.shape[-1])
        mask = torch.arange(length + num_new).view(1, 1, 1, -1) > 0 if is_masked else None
        if mask is not None and num_new > 1:
            mask = added_mask(mask).to(weights.dtype).expand(1, 1, num_new, -1)
        keys = (1, weights.num_key_heads, length, weights.key_dim)
        cached = random(*keys), random(*keys[:3], weights.value_dim)
        caches = growing_cache(), growing_cache()
        for cache in caches:
            for token in zip(*(part.split(1, dim=-2) for part in cached), strict=True):
                cache.update(*token, index)
        own, others = call_on_stand_ins(
            self._module,
            [*self._names, *self._module._parameters.keys() & {"sinks"}],
            asked,
            hidden=hidden,
            angles=angles,
            cache=caches[0],
            mask=mask,
            options=self._options - CHANGING_OPTIONS,
        )
        if num_new == 1:
            ours = self._fused(hidden, *angles, mask, caches[1])
        else:
            ours = self._prompt(hidden, *angles, mask, caches[1], {})
        if others is not None or ours is None or not same_bits(own, ours):
            return False
        layers = [cache.layers[index] for cache in caches]
        rows = ([getattr(layer, name) for layer in layers] for name in ("keys", "values"))
        return all(same_bits(*row) for row in rows)


def has_usual_parts(
    module: torch.nn.Module,
    attentions: Sequence[str] = (ATTENTION, EAGER_ATTENTION),
    forms: Sequence[str] = ("rounded",),
) -> bool:
    """Whether a layer has the parts of the usual attention, one of some attentions and of some
    forms of norms, and its ``forward`` the arguments."""
    children = module._modules
    if not children.keys() >= set(parts.PROJECTIONS) or "forward" in vars(module):
        return False
    linears = [children[name] for name in parts.PROJECTIONS]
    norms = [children.get(name) for name in parts.NORMS]
    if not all(type(part) in (SmallBatchLinear, torch.nn.Linear) for part in linears):
        return False
    known = [
        type(part) is SmallBatchRMSNorm and part.form in forms for part in norms if part is not None
    ]
    if not all(known):
        return False
    q, k, v, _ = (parts.linear_of(module, name) for name in parts.PROJECTIONS)
    weights = {(type(part.weight), part.weight.dtype) for part in (q, k, v)}
    if len(weights) * len({(part.bias is None, part.in_features) for part in (q, k, v)}) != 1:
        return False
    constants = [getattr(module, name, None) for name in ("head_dim", "layer_idx", "scaling")]
    if not all(isinstance(constant, int | float) for constant in constants):
        return False
    attention = getattr(vars(module).get("config"), ATTENTION_SETTING, None)
    if attention not in attentions or not module._parameters.keys() <= {"sinks"}:
        return False
    return takes_usual_arguments(type(module).forward)


def _asks_for_nothing_else(module: Any, known: dict[type, bool]) -> bool:
    """Whether a class of layers can do with stand-ins, found by the first layer of it."""
    kind = type(module)
    if kind not in known:
        widths = (module.head_dim, module.head_dim // 2)  # of angles, some for pairs of values
        known[kind] = any(_can_do_with_stand_ins(module, width) for width in widths)
    return known[kind]


def _can_do_with_stand_ins(module: Any, width: int) -> bool:
    weight, asked, is_done = parts.linear_of(module, "q_proj").weight, Asked(), False
    with torch.inference_mode(), contextlib.suppress(Exception):
        call_on_stand_ins(
            module,
            [*parts.names_of(module), *module._parameters],
            asked,
            hidden=weight.new_zeros(1, 1, weight.shape[1]),
            angles=tuple(weight.new_zeros(2, 1, 1, width)),
            cache=growing_cache(),
        )
        is_done = True
    return is_done and not asked.more


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, a NaN like a NaN."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
