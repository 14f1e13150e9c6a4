"""Multi-head latent attention on a CPU: caches hold what keys and values are expanded from.

Models call ``expand_kv`` with all that is cached, at every step. Here an attention layer gets one
of its own, which also takes the latents of several sequences, and leaves it to ``attend`` whether
keys and values are needed: few queries are multiplied by the layer's weights instead, where those
are fewer products (DeepSeek-V2, 2024, section 2.1.2).

Shape suffixes: B sequences, H heads, Q new tokens, S tokens, R rank of a latent, N key width
without positions, P key width with positions, D = N + P, V value width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.checkpoints.transformers_private import ATTENTION_SETTING
from moe_runtime.inference.cpu.attention import ATTENTION, added_mask, changes_attention
from moe_runtime.inference.cpu.small_batch import SmallBatchLinear, is_observed
from moe_runtime.kernels.latent_attention.op import Tokens, native_latent_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""What layers call N, P and V."""

Pair = tuple[torch.Tensor, torch.Tensor]


def use_latents(model: PreTrainedModel) -> None:
    """Gives the latent attention layers of a model that uses ``attend`` an ``expand_kv``."""
    known: dict[type, bool] = {}
    for layer in model.modules():
        if not hasattr(type(layer), "expand_kv"):
            continue
        if type(layer) not in known:
            known[type(layer)] = _expands_as_known(layer)
        vars(layer)["expand_kv"] = ExpandLatents(layer, may_absorb=known[type(layer)])


class ExpandLatents:
    """The ``expand_kv`` of an attention layer."""

    def __init__(self, layer: Any, *, may_absorb: bool) -> None:
        """Takes the place of the method; the layer's own stays in its class.

        Args:
            layer: the layer.
            may_absorb: whether a head's keys are products with the first rows of its weights and
                then the part with positions, and its values products with the other rows.
        """
        self._layer = layer
        self._may_absorb = may_absorb

    def __call__(self, latents: Any, turned: torch.Tensor) -> tuple[Any, Any]:
        """Keys and values of all heads.

        Args:
            latents: ``[B, 1, S, R]``; or what knows those of several caches, see serving.
            turned: the part of the keys with positions, ``[B, 1, S, P]``.

        Returns:
            ``[B, H, S, D]`` and ``[B, H, S, V]``; or what stands for them where they go.
        """
        if not isinstance(latents, torch.Tensor):
            return dataclasses.replace(latents, expand=self), turned
        is_ours = getattr(self._layer.config, ATTENTION_SETTING) == ATTENTION
        if not is_ours or torch.compiler.is_compiling() or self._weight() is None:
            return self.expanded(latents, turned)
        keys = LatentKeys(self, latents, turned)
        return keys, keys.values

    def expanded(self, latents: torch.Tensor, turned: torch.Tensor) -> Pair:
        """As the layer itself does it."""
        return type(self._layer).expand_kv(self._layer, latents, turned)

    def attend_each(
        self,
        query: torch.Tensor,
        latents: Sequence[torch.Tensor],
        turned: Sequence[torch.Tensor],
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention of one query of each sequence, without expanding: the bits of each alone.

        Args:
            query: ``[B, H, 1, D]``.
            latents: of each sequence, ``[1, 1, S, R]``.
            turned: of each sequence, ``[1, 1, S, P]``.
            options: as transformers passes them.

        Returns:
            ``[B, 1, H, V]``; None where keys and values have to be expanded, or are cheaper.
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
        """Attention without expanding.

        Args:
            query: ``[B, H, Q, D]``.
            latents: ``[B, 1, S, R]``.
            turned: ``[B, 1, S, P]``.
            mask: None, or what transformers makes for SDPA.
            options: as transformers passes them.

        Returns:
            ``[B, Q, H, V]``; None where keys and values have to be expanded, or are cheaper.
        """
        batch, num_new, length = len(query), query.shape[2], latents.shape[2]
        if not self._is_cheaper(num_new, length):
            return None
        if mask is None and num_new > 1:  # it is causal, or the layer is not
            return None
        if mask is not None and mask.shape != (batch, 1, num_new, length):
            return None
        added = None if mask is None else added_mask(mask[:, 0].flatten(0, 1))
        tokens = []
        for row in range(batch * num_new):
            b = row // num_new
            tokens.append(
                Tokens(latents[b, 0], turned[b, 0], None if added is None else added[row])
            )
        return self._attend(query, tokens, options)

    def _attend(
        self, query: torch.Tensor, tokens: Sequence[Tokens], options: dict[str, Any]
    ) -> torch.Tensor | None:
        weight = self._weight()
        if weight is None or changes_attention(options) or torch.is_autocast_enabled("cpu"):
            return None
        scaling = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = query.transpose(1, 2).flatten(0, 1)
        mixed = native_latent_attention(rows, tokens, weight, scale)
        return None if mixed is None else mixed.unflatten(0, (-1, query.shape[2]))

    def _is_cheaper(self, num_new: int, length: int) -> bool:
        """Whether a head multiplies less often on latents than on keys and values made of them."""
        layer = self._layer
        key_dim, turned_dim, value_dim = (getattr(layer, name) for name in _SIZES)
        width, rank = key_dim + value_dim, layer.kv_b_proj.in_features
        absorbed = num_new * (length * (2 * rank + turned_dim) + rank * width)
        return absorbed < length * rank * width + num_new * length * (width + turned_dim)

    def _weight(self) -> torch.Tensor | None:
        """``[H, N + V, R]``, or None where somebody sees or changes what is expanded."""
        layer, part = self._layer, self._layer._modules.get("kv_b_proj")
        if not self._may_absorb or type(part) not in (SmallBatchLinear, torch.nn.Linear):
            return None
        if is_observed(part) or torch.nn.modules.module._has_any_global_hook():
            return None
        weight = part._parameters.get("weight")
        if type(weight) is not torch.nn.Parameter or part._parameters.get("bias") is not None:
            return None
        return weight.unflatten(0, (-1, layer.qk_nope_head_dim + layer.v_head_dim))


class LatentKeys:
    """Stands for expanded keys; whoever looks at them gets them.

    Attributes:
        values: stands for the values.
    """

    def __init__(self, expand: ExpandLatents, latents: torch.Tensor, turned: torch.Tensor) -> None:
        """What ``expand`` makes of ``[B, 1, S, R]`` and ``[B, 1, S, P]``."""
        self._latents = _Latents(expand, latents, turned)
        self.values = _LatentValues(self._latents)

    def attend(
        self,
        attention: Callable[..., tuple[torch.Tensor, Any]],
        module: torch.nn.Module,
        query: torch.Tensor,
        value: Any,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        """Attention of a layer, on the latents where that is cheaper.

        Args:
            attention: over keys and values.
            module: the attention layer.
            query: ``[B, H, Q, D]``.
            value: ``values``, or values that somebody made of them.
            mask: None, or what transformers makes for SDPA.
            options: as transformers passes them.

        Returns:
            ``[B, Q, H, V]`` in the dtype of ``query``, and what ``attention`` gives beside it.
        """
        if value is self.values:
            mixed = self._latents.expand.attend_all(query, *self._latents.cached, mask, options)
            if mixed is not None:
                return mixed, None
            value = self._latents.both()[1]
        return attention(module, query, self._latents.both()[0], value, mask, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copies that are being made
            raise AttributeError(name)
        return getattr(self._latents.both()[0], name)


class _LatentValues:
    """Stands for expanded values."""

    def __init__(self, latents: _Latents) -> None:
        self._latents = latents

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._latents.both()[1], name)


class _Latents:
    """What keys and values share, neither of which holds the other: both go with the layer's pass.

    Attributes:
        expand: makes keys and values.
        cached: of these.
    """

    def __init__(self, expand: ExpandLatents, latents: torch.Tensor, turned: torch.Tensor) -> None:
        self.expand = expand
        self.cached = latents, turned
        self._expanded: Pair | None = None

    def both(self) -> Pair:
        """Keys ``[B, H, S, D]`` and values ``[B, H, S, V]``."""
        if self._expanded is None:
            self._expanded = self.expand.expanded(*self.cached)
        return self._expanded


def _expands_as_known(layer: Any) -> bool:
    """Whether a layer expands latents by one product for each token, asked with numbers."""
    part = layer._modules.get("kv_b_proj")
    sizes: list[Any] = [getattr(layer, name, None) for name in _SIZES]
    if not isinstance(part, torch.nn.Linear) or type(part.weight) is not torch.nn.Parameter:
        return False
    if not all(isinstance(size, int) for size in sizes):
        return False
    key_dim, turned_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 1, 3, part.in_features, generator=generator).to(part.weight.dtype)
    turned = torch.randn(1, 1, 3, turned_dim, generator=generator).to(part.weight.dtype)
    with torch.inference_mode():
        expected = part(latents)[0, 0].unflatten(-1, (-1, key_dim + value_dim)).transpose(0, 1)
        keys, values = type(layer).expand_kv(layer, latents, turned)
    own_keys, own_values = expected.split((key_dim, value_dim), dim=-1)
    own_keys = torch.cat((own_keys, turned[0].expand(len(own_keys), -1, -1)), dim=-1)
    return torch.equal(keys[0], own_keys) and torch.equal(values[0], own_values)
