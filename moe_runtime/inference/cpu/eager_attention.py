"""Attention on a CPU of families without SDPA: a softmax with sinks, most of them.

transformers computes it one operation after another ("eager"). In half precision torch multiplies
by oneDNN there, which makes code for every length of the cache and keeps it, about a mebibyte each;
and the scores of a prompt take memory by the square of its length. Here steps of one token take the
native kernel and prompts torch's fused one; the model's own attention keeps its name, and computes
whatever somebody looks into.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.inference.cpu.attention import (
    EAGER_ATTENTION,
    SHORT_CONTEXT,
    changes_attention,
    keeps_code_of_length,
    padded,
    single_query_attention,
)
from moe_runtime.inference.cpu.threads import torch_threads_for
from moe_runtime.kernels.linear.op import keeps_code
from moe_runtime.kernels.native import needs_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWN = "eager_attention_forward"
"""What families call their own attention, a function of their module."""


class _EagerName(str):
    """What finds the attention of this file, and says to whoever compares it that it is eager.

    Some families mask other keys under a name that they do not know.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "eager" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


_NAME = _EagerName(EAGER_ATTENTION)


def use_eager_attention(model: PreTrainedModel) -> None:
    """Gives the layers of a model on the CPU that has no SDPA the attention of this file.

    Those are the ones with sinks, and others with a cache of keys. The model's own attention stays
    what it is called; set to another one, it has that one.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(EAGER_ATTENTION, attend)
    for layer in model.modules():
        has_keys = "layer_idx" in vars(layer) and not private.has_sdpa(model)
        if "config" not in vars(layer) or not (has_keys or hasattr(layer, "sinks")):
            continue
        if _computes_the_same(layer):
            vars(layer)["config"] = LayerConfig(layer.config, type(layer).__module__)


class LayerConfig:
    """The configuration of an attention layer, whose attention is ours where it says eager.

    Attributes:
        behind: the configuration itself, the model's.
        family: the name of the family's module.
        own: its attention; ours stands for no other that is put there.
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
        if name.startswith("__") or name == "behind":  # asked for by copies that are being made
            raise AttributeError(name)
        return getattr(self.behind, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.behind, name, value)


def _own_attention_of(family: str) -> Any:
    return vars(sys.modules[family]).get(_OWN)


def attend(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The layer's own eager attention.

    Args:
        module: the attention layer.
        query: ``[B, H, Q, D]``.
        key: ``[B, G, S, D]``, with H a multiple of G; or what knows the keys of several caches.
        value: ``[B, G, S, V]``.
        attention_mask: None, or what transformers makes for eager attention.
        **options: as transformers passes them; ``s_aux`` are the sinks.

    Returns:
        ``[B, Q, H, V]`` in the dtype of ``query``; weights ``[B, H, Q, S]`` where somebody may see
        them, else None.
    """
    if not isinstance(key, torch.Tensor):  # keys of several caches, see serving
        return key.attend(attend, module, query, value, attention_mask, options)
    others = {name: option for name, option in options.items() if name != "s_aux"}
    sinks = options.get("s_aux")
    if (
        changes_attention(others)
        or torch.is_autocast_enabled("cpu")
        or needs_torch(query, key, value, sinks)
        or (attention_mask is not None and attention_mask.shape[-1] != key.shape[2])
        or _shows_weights(module)
    ):
        return _own_attention(module, query, key, value, attention_mask, options)
    mixed = single_query_attention(query, key, value, attention_mask, others, sinks)
    if mixed is not None:
        return mixed, None
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    num_queries, with_threads = query.shape[2], torch_threads_for(query, key)
    parts = query, key, value, attention_mask
    if keeps_code_of_length(query, key):
        parts = padded(*parts, is_causal=False)
    with with_threads:
        mixed = _fused_with_sinks(*parts, scale, sinks)
    return mixed[:, :, :num_queries].transpose(1, 2).to(query.dtype), None


def _shows_weights(module: Any) -> bool:
    """Whether what a layer returns beside its result is seen by anybody."""
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
    """That of the layer's family, in fp32 where torch would keep code for one context's length.

    A prompt has one length of many, and its scores take memory by the square of it; steps of one
    token meet every length.
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
    """In fp32 if it is a tensor of numbers that have a precision: some models add a bias."""
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
    """Attention ``[B, H, Q, V]`` in which a sink's weight is left out, by torch's fused kernel.

    The other weights, which sum to one there, sum to ``sum / (sum + exp(sink))`` with a sink, which
    is the logistic function of how far it is below the logarithm of their sum.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    width = max(key.shape[-1], value.shape[-1])  # the kernel knows one for both
    wide = [F.pad(part, (0, width - part.shape[-1])) for part in (query, key, value)]
    mixed, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *wide, 0.0, False, attn_mask=mask, scale=scale
    )
    mixed = mixed[..., : value.shape[-1]]
    if sinks is None:
        return mixed
    return mixed * torch.sigmoid(sums - sinks.float().view(-1, 1)).unsqueeze(-1)


def _computes_the_same(layer: Any) -> bool:
    """Whether a layer's own attention is that with its sinks, asked with numbers."""
    own = _own_attention_of(type(layer).__module__)
    groups = getattr(layer, "num_key_value_groups", None)
    if own is None or not isinstance(groups, int):
        return False
    sinks = getattr(layer, "sinks", None)
    heads = groups if sinks is None else len(sinks)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 3, 8, generator=generator)
    key = torch.randn(2, heads // groups, 5, 8, generator=generator)
    value = torch.randn(2, heads // groups, 5, 6, generator=generator)
    mask = torch.zeros(2, 1, 3, 5).masked_fill(torch.ones(3, 5).triu(3) > 0, -1e30)
    with torch.inference_mode():
        found, _ = own(layer, query, key, value, mask, scaling=0.3, dropout=0.0, s_aux=sinks)
        expected = _fused_with_sinks(query, key, value, mask, 0.3, sinks).transpose(1, 2)
    # averages of values up to 4 by weights of scores up to 10, in fp32 on both sides
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=1e-5)
