"""Attention on a CPU: native kernels where they support the call, else transformers' own.

For one token, attention is two small products with the cache; torch's fused kernel takes several
times as long as reading the cache. For prompts the native kernel needs no mask; without matrix
units, torch takes more than twice as long. With matrix units, torch keeps code for every length of
a prompt, so short prompts are padded to a few lengths.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.transformers_private import ATTENTION_SETTING
from moe_runtime.inference.cpu.step_layers import (
    ATTENTION,
    EAGER_ATTENTION,
    SmallBatchLinear,
    added_mask,
    changes_attention,
    is_observed,
    scale_of,
    single_query_attention,
)
from moe_runtime.inference.known_classes import (
    EAGER_ATTENTION_CLASSES,
    LATENT_ATTENTION,
    class_name,
    is_theirs,
)
from moe_runtime.inference.kv_cache import Rounding, SeenKeys, as_seen_keys
from moe_runtime.inference.steps import OneThread
from moe_runtime.kernels.decode_step.latent_attention import Tokens, native_latent_attention
from moe_runtime.kernels.decode_step.prompt_attention import Sight, native_prompt_attention
from moe_runtime.kernels.decode_step.rounded_rows import widen_rows
from moe_runtime.kernels.linear import UNLIMITED, native_row_limit
from moe_runtime.kernels.linear.op import keeps_code
from moe_runtime.kernels.native import native_library, needs_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SHORT_CONTEXT, LENGTH_MULTIPLE = 1024, 64
"""Contexts of up to so many tokens are padded to multiples of 64 if torch keeps code for each
length. Longer ones would take longer to copy than to compute."""


def use_single_query_attention(model: PreTrainedModel) -> None:
    """Replaces the attention of a model on the CPU that uses SDPA or eager attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    name = private.attention_name(model)
    if name == "eager":
        return use_eager_attention(model)
    if name != "sdpa" or private.decides_by_attention_name(model):
        return
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, as_seen_keys(sdpa_mask, adds=False))
    model.set_attn_implementation(ATTENTION)
    if any(hasattr(layer, "expand_kv") for layer in model.modules()):
        use_latents(model)


def rounding_of(model: PreTrainedModel, kv_cache: str) -> Rounding | None:
    """The rounding of keys and values; None for ``kv_cache="exact"``."""
    if kv_cache == "exact":
        return None
    takes_rows = private.attention_names(model) in ({ATTENTION}, {EAGER_ATTENTION})
    return Rounding(private.attention_name(model) if takes_rows else None)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' SDPA attention, by native kernels where possible.

    Args:
        query: ``[B, H, Q, D]``.
        key: ``[B, G, S, D]``, with H a multiple of G; or an object with the keys of several caches.
        value: ``[B, G, S, V]``.
        attention_mask: None, or what transformers makes for SDPA.

    Returns:
        ``[B, Q, H, V]`` in the dtype of ``query``, and None.
    """
    if not isinstance(key, torch.Tensor):  # keys of several caches, or latents
        return key.attend(attend, module, query, value, attention_mask, options)
    mixed = single_query_attention(query, key, value, attention_mask, options)
    if mixed is not None:
        return mixed, None
    key, value = as_computed(query, key, value)
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mixed = _of_prompt(query, key, value, attention_mask, options, is_causal=is_causal)
    if mixed is not None:
        return mixed, None
    if isinstance(attention_mask, SeenKeys):
        attention_mask = attention_mask.made()
    num_queries, value_dim = query.shape[2], value.shape[3]
    with_threads = torch_threads_for(query, key)  # of the lengths before padding
    if value_dim < key.shape[3]:
        # torch's fused kernel takes one width; other kernels keep the scores of all pairs
        value = F.pad(value, (0, key.shape[3] - value_dim))
    if keeps_code_of_length(query, key):
        if (bias := options.get("position_bias")) is not None:
            options["position_bias"] = _padded_scores(bias, query, key)
        query, key, value, attention_mask = padded(
            query, key, value, attention_mask, is_causal=is_causal
        )
    with with_threads:
        mixed, weights = private.sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
    return mixed[:, :num_queries, :, :value_dim], weights


def _of_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    options: dict[str, Any],
    sinks: torch.Tensor | None = None,
    *,
    is_causal: bool,
) -> torch.Tensor | None:
    """Attention of several queries, ``[B, Q, H, V]``; None if the native kernel does not support
    the call or torch's is faster. ``is_causal`` holds without a mask."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is None:
        sight = Sight(0 if is_causal else num_keys - 1)
    else:
        known = isinstance(mask, SeenKeys) and mask.shape[2:] == (num_queries, num_keys)
        sight = mask.sight if known else None
    library = native_library()
    if (
        sight is None
        or library is None
        or num_queries == 1
        or query.shape[1] % key.shape[1]
        or changes_attention(options)
        or torch.is_autocast_enabled("cpu")
    ):
        return None
    has_units = query.dtype != torch.float32 and torch.cpu._is_amx_tile_supported()
    if (has_units or library.isa == "portable") and sinks is None and sight.window is None:
        return None
    return native_prompt_attention(query, key, value, sight, scale_of(query, options), sinks)


def as_computed(query: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values in the type of the queries; rows rounded to int8 are widened."""
    wide = query.dtype
    return [widen_rows(part, wide) if part.dtype is torch.uint8 else part for part in parts]


def keeps_code_of_length(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether torch would keep code, half a mebibyte, for this length of a short prompt."""
    is_half = query.is_cpu and query.dtype in (torch.bfloat16, torch.float16)
    has_units = is_half and torch.cpu._is_amx_tile_supported()
    return has_units and 1 < query.shape[-2] <= key.shape[-2] <= SHORT_CONTEXT


def padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Pads the arguments of attention to multiples of ``LENGTH_MULTIPLE``.

    Args:
        query: ``[B, H, Q, D]``; the caller drops results of padded queries.
        key: ``[B, G, S, D]``, Q at most S; no query attends to padded keys.
        value: ``[B, G, S, V]``.
        mask: None, bool, or added to scores, ``[B, 1 or H, 1 or Q, 1 or S]``.
    """
    if mask is None and not is_causal:
        mask = query.new_zeros(1, 1, 1, key.shape[2])
    mask = None if mask is None else _padded_scores(mask, query, key)
    parts = (query, key, value)
    missing = [-part.shape[2] % LENGTH_MULTIPLE for part in parts]
    query, key, value = (
        F.pad(part, (0, 0, 0, more)) if more else part
        for part, more in zip(parts, missing, strict=True)
    )
    return query, key, value, mask


def _padded_scores(scores: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Pads a mask or bias of scores ``[..., 1 or Q, 1 or S]``; padded keys are masked."""
    refused = 0 if scores.dtype == torch.bool else -torch.inf
    scores = scores.expand(*scores.shape[:-1], key.shape[2])
    more_queries = -query.shape[2] % LENGTH_MULTIPLE if scores.shape[-2] > 1 else 0
    return F.pad(scores, (0, -key.shape[2] % LENGTH_MULTIPLE, 0, more_queries), value=refused)


class _EagerName(str):
    """The registered name of our attention, which compares equal to "eager": some families make
    other masks for unknown names."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "eager" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


_NAME = _EagerName(EAGER_ATTENTION)


def use_eager_attention(model: PreTrainedModel) -> None:
    """Replaces the attention of known layers in a model without SDPA. Replaces its masks too if it
    has no other layers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(EAGER_ATTENTION, attend_eagerly)
    AttentionMaskInterface.register(EAGER_ATTENTION, as_seen_keys(eager_mask, adds=True))
    for layer in model.modules():
        family = type(layer).__module__
        if class_name(layer) in EAGER_ATTENTION_CLASSES and is_theirs(_own_attention_of(family)):
            vars(layer)["config"] = LayerConfig(layer.config, family)
    base = getattr(model, "base_model", model)
    own = [vars(layer).get("config") for layer in base.modules() if "layer_idx" in vars(layer)]
    of_layers = [config for config in own if isinstance(config, LayerConfig)]
    if of_layers and len(of_layers) == len(own) - own.count(None) and hasattr(base, "layers"):
        vars(base)["config"] = LayerConfig(base.config, of_layers[0].family)


class LayerConfig:
    """Configuration of an attention layer that names our attention instead of eager.

    ``behind`` is the model's configuration. ``own`` is the attention that the family's module had
    when this was made; if a program replaces it, it is called.
    """

    def __init__(self, config: Any, family: str) -> None:
        vars(self).update(behind=config, family=family, own=_own_attention_of(family))

    @property
    def _attn_implementation(self) -> str | None:
        name = getattr(self.behind, private.ATTENTION_SETTING)
        if name != "eager" or torch.compiler.is_compiling():
            return name
        return _NAME if _own_attention_of(self.family) is self.own else name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "behind":  # copy.copy asks before they are set
            raise AttributeError(name)
        return getattr(self.behind, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.behind, name, value)


def _own_attention_of(family: str) -> Any:
    return vars(sys.modules[family]).get("eager_attention_forward")


def attend_eagerly(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Eager attention of a layer: a softmax with sinks or without.

    Arguments are those of ``attend``, with the mask of eager attention; ``s_aux`` are the sinks.

    Returns:
        ``[B, Q, H, V]`` in the dtype of ``query``; weights ``[B, H, Q, S]`` if a hook may see them,
        else None.
    """
    if not isinstance(key, torch.Tensor):  # keys of several caches
        return key.attend(attend_eagerly, module, query, value, attention_mask, options)
    others = {name: option for name, option in options.items() if name != "s_aux"}
    sinks = options.get("s_aux")
    if (
        changes_attention(others)
        or torch.is_autocast_enabled("cpu")
        or needs_torch(query, key, value, sinks)
        or (attention_mask is not None and attention_mask.shape[-1] != key.shape[2])
        or _shows_weights(module)
    ):
        key, value = as_computed(query, key, value)
        return _own_attention(module, query, key, value, attention_mask, options)
    mixed = single_query_attention(query, key, value, attention_mask, others, sinks)
    if mixed is not None:
        return mixed, None
    key, value = as_computed(query, key, value)
    mixed = _of_prompt(query, key, value, attention_mask, others, sinks, is_causal=False)
    if mixed is not None:
        return mixed, None
    scale = scale_of(query, options)
    num_queries, with_threads = query.shape[2], torch_threads_for(query, key)
    parts = query, key, value, attention_mask
    if keeps_code_of_length(query, key):
        parts = padded(*parts, is_causal=False)
    with with_threads:
        mixed = _fused_with_sinks(*parts, scale, sinks)
    return mixed[:, :, :num_queries].transpose(1, 2).to(query.dtype), None


def _shows_weights(module: Any) -> bool:
    hooks = (vars(module).get("_forward_hooks") or {}).values()
    if not hooks:
        return False
    return module.config.output_attentions or not all(map(private.is_output_recorder, hooks))


def _own_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The family's attention; in fp32 if torch would keep code for each length of the context.

    Long prompts stay as they are: their lengths are few, and fp32 scores take much memory.
    """
    attend_own = module.config.own
    is_differentiable = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    is_long_prompt = query.shape[2] > 1 and key.shape[2] > SHORT_CONTEXT
    if is_differentiable or not keeps_code(query) or is_long_prompt:
        return attend_own(module, query, key, value, mask, **options)
    options = {name: _widened(option) for name, option in options.items()}
    parts = [_widened(part) for part in (query, key, value, mask)]
    mixed, weights = attend_own(module, *parts, **options)
    return mixed.to(query.dtype), None if weights is None else weights.to(query.dtype)


def _widened(part: Any) -> Any:
    is_number = isinstance(part, torch.Tensor) and part.is_floating_point()
    return part.float() if is_number else part


def _fused_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention ``[B, H, Q, V]`` with sinks, by torch's fused kernel.

    With a sink the other weights sum to ``sum / (sum + exp(sink))``, the logistic function of
    ``log(sum) - sink``.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    width = max(key.shape[-1], value.shape[-1])  # the kernel takes one width
    wide = [F.pad(part, (0, width - part.shape[-1])) for part in (query, key, value)]
    mixed, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *wide, 0.0, False, attn_mask=mask, scale=scale
    )
    mixed = mixed[..., : value.shape[-1]]
    if sinks is None:
        return mixed
    return mixed * torch.sigmoid(sums - sinks.float().view(-1, 1)).unsqueeze(-1)


Pair = tuple[torch.Tensor, torch.Tensor]


def use_latents(model: PreTrainedModel) -> None:
    """Replaces ``expand_kv`` of latent attention layers in a model that uses ``attend``."""
    for layer in model.modules():
        expand = getattr(type(layer), "expand_kv", None)
        if expand is not None:
            is_known = class_name(layer) in LATENT_ATTENTION and is_theirs(expand)
            vars(layer)["expand_kv"] = ExpandLatents(layer, may_absorb=is_known)


class ExpandLatents:
    """The ``expand_kv`` of a latent attention layer.

    ``may_absorb`` means that the first rows of a head's weights make its keys without positions,
    and the other rows its values.
    """

    def __init__(self, layer: Any, *, may_absorb: bool) -> None:
        self._layer = layer
        self._may_absorb = may_absorb

    def __call__(self, latents: Any, turned: torch.Tensor) -> tuple[Any, Any]:
        """Keys ``[B, H, S, D]`` and values ``[B, H, S, V]`` of all heads, or objects that expand
        them on demand.

        ``latents`` are ``[B, 1, S, R]``, or an object with those of several caches. ``turned`` is
        the rotary part of the keys, ``[B, 1, S, P]``.
        """
        if not isinstance(latents, torch.Tensor):
            return dataclasses.replace(latents, expand=self), turned
        is_ours = getattr(self._layer.config, ATTENTION_SETTING) == ATTENTION
        if not is_ours or torch.compiler.is_compiling() or self._weight() is None:
            return self.expanded(latents, turned)
        shared = _Latents(self, latents, turned)
        return LatentPart(shared, 0), LatentPart(shared, 1)

    def expanded(self, latents: torch.Tensor, turned: torch.Tensor) -> Pair:
        return type(self._layer).expand_kv(self._layer, latents, turned)

    def attend_each(
        self,
        query: torch.Tensor,
        latents: Sequence[torch.Tensor],
        turned: Sequence[torch.Tensor],
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention ``[B, 1, H, V]`` of one query per sequence, without expanding; the bits of each
        sequence alone. None if expanding is cheaper or needed.

        ``query`` is ``[B, H, 1, D]``; a sequence's latents are ``[1, 1, S, R]`` and ``turned``
        ``[1, 1, S, P]``.
        """
        tokens = [Tokens(*(p[0, 0] for p in pair)) for pair in zip(latents, turned, strict=True)]
        if not all(self._is_cheaper(1, len(each.latents)) for each in tokens):
            return None
        return self._attend(query, tokens, options)

    def attend_all(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        turned: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention ``[B, Q, H, V]`` without expanding; None if expanding is cheaper or needed.

        ``query`` is ``[B, H, Q, D]``, ``latents`` ``[B, 1, S, R]``, ``turned`` ``[B, 1, S, P]``;
        ``mask`` is that of SDPA.
        """
        batch, num_new, length = len(query), query.shape[2], latents.shape[2]
        if not self._is_cheaper(num_new, length):
            return None
        if mask is None and num_new > 1:  # causal or not, by the layer
            return None
        if mask is not None and mask.shape != (batch, 1, num_new, length):
            return None
        rows = [row // num_new for row in range(batch * num_new)]
        added = [None] * len(rows) if mask is None else added_mask(mask[:, 0].flatten(0, 1))
        tokens = [Tokens(latents[b, 0], turned[b, 0], a) for b, a in zip(rows, added, strict=True)]
        return self._attend(query, tokens, options)

    def _attend(
        self, query: torch.Tensor, tokens: Sequence[Tokens], options: dict[str, Any]
    ) -> torch.Tensor | None:
        weight = self._weight()
        if weight is None or changes_attention(options) or torch.is_autocast_enabled("cpu"):
            return None
        scale = scale_of(query, options)
        rows = query.transpose(1, 2).flatten(0, 1)
        mixed = native_latent_attention(rows, tokens, weight, scale)
        return None if mixed is None else mixed.unflatten(0, (-1, query.shape[2]))

    def _is_cheaper(self, num_new: int, length: int) -> bool:
        """Whether attention on latents needs fewer multiplications than expanding them."""
        layer = self._layer
        key_dim, value_dim = layer.qk_nope_head_dim, layer.v_head_dim
        turned_dim = layer.qk_rope_head_dim
        width, rank = key_dim + value_dim, layer.kv_b_proj.in_features
        absorbed = num_new * (length * (2 * rank + turned_dim) + rank * width)
        return absorbed < length * rank * width + num_new * length * (width + turned_dim)

    def _weight(self) -> torch.Tensor | None:
        """``[H, N + V, R]``; None if something observes or changes the expansion."""
        layer, part = self._layer, self._layer._modules.get("kv_b_proj")
        if not self._may_absorb or type(part) not in (SmallBatchLinear, torch.nn.Linear):
            return None
        if is_observed(part) or torch.nn.modules.module._has_any_global_hook():
            return None
        weight = part._parameters.get("weight")
        if type(weight) is not torch.nn.Parameter or part._parameters.get("bias") is not None:
            return None
        return weight.unflatten(0, (-1, layer.qk_nope_head_dim + layer.v_head_dim))


class LatentPart:
    """Keys (place 0) or values (place 1), expanded at first access."""

    def __init__(self, latents: _Latents, place: int) -> None:
        self._latents, self._place = latents, place

    def attend(
        self,
        attention: Callable[..., tuple[torch.Tensor, Any]],
        module: torch.nn.Module,
        query: torch.Tensor,
        value: Any,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        """Attention ``[B, Q, H, V]`` with these keys, on the latents if that is cheaper."""
        latents = self._latents
        if isinstance(value, LatentPart) and value._latents is latents:
            mixed = latents.expand.attend_all(query, *latents.cached, mask, options)
            if mixed is not None:
                return mixed, None
            value = latents.both()[1]
        return attention(module, query, latents.both()[0], value, mask, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy.copy asks before they are set
            raise AttributeError(name)
        return getattr(self._latents.both()[self._place], name)


class _Latents:
    """Shared by the keys and values of one pass of a layer."""

    def __init__(self, expand: ExpandLatents, latents: torch.Tensor, turned: torch.Tensor) -> None:
        self.expand = expand
        self.cached = latents, turned
        self._expanded: Pair | None = None

    def both(self) -> Pair:
        if self._expanded is None:
            self._expanded = self.expand.expanded(*self.cached)
        return self._expanded


LEAST_PRODUCTS = 2**28
"""Multiplications of queries and keys from which attention uses torch's threads."""


def rest_torch_threads(model: PreTrainedModel) -> None:
    """Runs torch on one thread during a model's forward passes if native kernels do the work.

    Torch's threads spin for milliseconds after each operation on cores that kernels and readers
    need; a prompt that streams from disk takes more than twice as long. Torch's sums may depend on
    the number of threads, so it is the same at every budget. If torch multiplies many rows faster,
    it keeps its threads.
    """
    library = native_library()
    if library is None or native_row_limit(library, model.dtype) != UNLIMITED:
        return
    OneThread().hold(model)


@contextmanager
def torch_threads_for(query: torch.Tensor, key: torch.Tensor) -> Iterator[None]:
    """Gives torch as many threads as the kernels have, for attention over a long prompt.

    It computes longer than torch's threads spin afterwards. Threads divide heads and pieces of the
    prompt, so their number changes no bits.
    """
    if (
        torch.compiler.is_compiling()
        or not query.is_cpu
        or torch.get_num_threads() != 1
        or (library := native_library()) is None
        or library.num_threads == 1
        or query.numel() * key.shape[-2] < LEAST_PRODUCTS
        or native_row_limit(library, query.dtype) != UNLIMITED
    ):
        yield
        return
    torch.set_num_threads(library.num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
