"""What makes single-token steps quick on a CPU, around the weights that must be read anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "moe_runtime_sdpa"
"""Name under which the attention function is registered with transformers."""


def tune_for_decoding(model: PreTrainedModel) -> None:
    """Prepares a model on the CPU for steps of one token.

    Such a step is a long row of small operations between kernels that read weights. Torch's own
    threads gain nothing on them, and their spinning takes the processors that the kernels need, so
    they rest for the length of the step. Half-precision attention over one query is computed in fp32.
    """
    _attend_single_queries_in_fp32(model)
    _StepThreads().attach(model)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' SDPA attention, in fp32 where that is quicker.

    Torch's fused CPU kernel takes three times as long over one query in half precision as it takes
    in fp32, the conversion of keys and values included.

    Args:
        module: the attention layer.
        query: ``[B, H, Q, D]``.
        key: ``[B, H_kv, S, D]``.
        value: ``[B, H_kv, S, D]``.
        attention_mask: None, or what transformers makes for SDPA.
        **kwargs: passed on.

    Returns:
        ``[B, Q, H, D]`` in the dtype of ``query``, and None.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = query.dtype
    if query.shape[2] != 1 or dtype not in (torch.bfloat16, torch.float16):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    wide = (query.float(), key.float(), value.float())
    out, weights = sdpa_attention_forward(module, *wide, attention_mask, **kwargs)
    return out.to(dtype), weights


def _attend_single_queries_in_fp32(model: PreTrainedModel) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


class _StepThreads:
    """Sets torch to one thread for forward passes over one token, and back afterwards."""

    def __init__(self) -> None:
        self._num_threads: int | None = None

    def attach(self, model: PreTrainedModel) -> None:
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, torch.Tensor) and tokens.numel() == 1:
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(1)

    def _end(self, *_: Any) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
            self._num_threads = None
