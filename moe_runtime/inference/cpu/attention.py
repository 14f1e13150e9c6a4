"""Attention on a CPU: transformers' own, but for single tokens and for short prompts.

In a step of one token attention is two small products with the cached keys and values. Torch's
fused CPU kernel takes several times as long over them as reading the cache takes, more so in half
precision. With matrix units it makes code for every length of a prompt, and keeps it: short ones
are padded to lengths of which there are few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.inference.cpu.threads import torch_threads_for
from moe_runtime.kernels.single_query_attention.native import native_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION, EAGER_ATTENTION = "moe_runtime", "moe_runtime_eager"
"""What this attention, for SDPA, and that for eager are called where transformers finds them."""

SHORT_CONTEXT, LENGTH_MULTIPLE = 1024, 64
"""Where torch keeps code for each length of prompts and contexts, those of up to so many tokens are
padded to multiples. Longer ones would be copied for longer than they are computed."""

CHANGING_OPTIONS = frozenset(
    ("dropout", "output_attentions", "softcap", "position_bias", "s_aux", "sinks", "cache")
)
"""Options that ask for more than softmax, scale and mask."""


def use_single_query_attention(model: PreTrainedModel) -> None:
    """Gives a model on the CPU that uses SDPA the attention of this file; eager has its own."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    name = private.attention_name(model)
    if name == "eager":
        from moe_runtime.inference.cpu.eager_attention import use_eager_attention

        return use_eager_attention(model)
    if name != "sdpa" or private.decides_by_attention_name(model):
        return
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    if any(hasattr(layer, "expand_kv") for layer in model.modules()):
        from moe_runtime.inference.cpu.latent_attention import use_latents

        use_latents(model)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' SDPA attention, with a path of its own for one query.

    Args:
        module: the attention layer.
        query: ``[B, H, Q, D]``.
        key: ``[B, G, S, D]``, with H a multiple of G; or what knows the keys of several caches, or
            what they are expanded from.
        value: ``[B, G, S, V]``.
        attention_mask: None, or what transformers makes for SDPA.
        **options: as transformers passes them.

    Returns:
        ``[B, Q, H, V]`` in the dtype of ``query``, and None.
    """
    if not isinstance(key, torch.Tensor):  # see serving and latent_attention.py
        return key.attend(attend, module, query, value, attention_mask, options)
    mixed = single_query_attention(query, key, value, attention_mask, options)
    if mixed is not None:
        return mixed, None
    num_queries, value_dim = query.shape[2], value.shape[3]
    with_threads = torch_threads_for(query, key)
    if value_dim < key.shape[3]:
        # torch's fused kernel takes one width; without it the scores of all pairs are kept at once
        value = F.pad(value, (0, key.shape[3] - value_dim))
    if keeps_code_of_length(query, key):
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
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


def keeps_code_of_length(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether torch would make and keep code for this very length of a short prompt.

    With matrix units its products in half precision do, half a mebibyte for each length: more than
    a short prompt's own memory, and a server would gather it for every length that it meets.
    """
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
    """What attention is called with, at lengths for all of which torch keeps a few MiB.

    Args:
        query: ``[B, H, Q, D]``; further queries follow, whose results are to be left out.
        key: ``[B, G, S, D]``, Q at most S; none of these queries attends to the keys that follow.
        value: ``[B, G, S, V]``.
        mask: None, or one that allows (bool) or adds, ``[B, 1 or H, 1 or Q, 1 or S]``.
        is_causal: whether queries without a mask attend to no later key.
    """
    if mask is None and not is_causal:
        mask = query.new_zeros(1, 1, 1, key.shape[2])
    mask = None if mask is None else _padded_scores(mask, query, key)
    key, value, query = (_with_multiple(part) for part in (key, value, query))
    return query, key, value, mask


def _with_multiple(part: torch.Tensor) -> torch.Tensor:
    more = -part.shape[2] % LENGTH_MULTIPLE
    return F.pad(part, (0, 0, 0, more)) if more else part


def _padded_scores(scores: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What allows or is added to scores ``[..., 1 or Q, 1 or S]``: nothing attends to more keys."""
    refused = 0 if scores.dtype == torch.bool else -torch.inf
    scores = scores.expand(*scores.shape[:-1], key.shape[2])
    more_queries = -query.shape[2] % LENGTH_MULTIPLE if scores.shape[-2] > 1 else 0
    return F.pad(scores, (0, -key.shape[2] % LENGTH_MULTIPLE, 0, more_queries), value=refused)


def single_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``attend`` for one query, ``[B, 1, H, V]``; None where it is not one or asks for more."""
    if (
        query.shape[2] != 1
        or query.shape[1] % key.shape[1]
        or (mask is not None and mask.shape != (len(query), 1, 1, key.shape[2]))
        or changes_attention(options)
        or torch.is_autocast_enabled("cpu")
    ):
        return None
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    added = None if mask is None else added_mask(mask[:, 0, 0])
    mixed = native_attention(query.squeeze(2), key, value, added, scale, sinks)
    return None if mixed is None else mixed.unsqueeze(1)


def changes_attention(options: dict[str, Any]) -> bool:
    """Whether options that are passed to attention ask for more than softmax, scale and mask."""
    asked = (options[name] for name in CHANGING_OPTIONS & options.keys())
    return any(isinstance(option, torch.Tensor) or bool(option) for option in asked)


def added_mask(mask_BS: torch.Tensor) -> torch.Tensor:
    """What is added to the scores for a mask that allows (bool) or adds."""
    if mask_BS.dtype != torch.bool:
        return mask_BS.float()
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(mask_BS.shape).masked_fill(~mask_BS, lowest)
