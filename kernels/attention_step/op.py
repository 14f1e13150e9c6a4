"""`attention_step`: validation and choice of the implementation.

Shape suffixes: B sequences, D model, R turned values of a head, G key heads, S tokens, K key width,
V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.kernels.attention_step.weights import AttentionWeights
from moe_runtime.kernels.linear import ROWS_PER_CALL
from moe_runtime.kernels.linear.op import check_status
from moe_runtime.kernels.native import (
    NEEDS_TORCH,
    NativeLibrary,
    native_library,
    needs_torch,
    require_native,
)
from moe_runtime.kernels.single_query_attention.native import MAX_COLUMNS

Impl = Literal["auto", "native", "reference"]
_PLACE = Struct("9q").pack


def attention_step(
    x_BD: Tensor,
    weights: AttentionWeights,
    cos_BR: Tensor,
    sin_BR: Tensor,
    key_BGSK: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Computes an attention layer for one new token of each sequence, and caches key and value.

    Queries, keys and values are products with `x`; queries and keys are normalised, if the layer
    does that, and turned by the angles of their position (rotary embedding, Su et al., 2021, in
    halves as Llama has it); key and value become the last of those cached; the queries attend to
    all of them, and the mixed values are multiplied by the output weights. Every operation is
    rounded to the dtype, as if it stood alone.

    Args:
        x_BD: `[B, D]`; fp32, bf16 or fp16, the dtype of everything else but the mask.
        weights: The layer.
        cos_BR: `[B, R]`, or `[1, R]` for all sequences; R even, at most the width of a key. The
            rest of a head is not turned. Where pairs share their angles, 2 R values are.
        sin_BR: Likewise.
        key_BGSK: `[B, G, S, K]`, unit stride along K; the last token of each is overwritten.
        value_BGSV: `[B, G, S, V]`, likewise.
        mask_BS: `[B, S]` fp32 to be added to the scores, or None.
        impl: `native` is the C kernel (CPU, inference only), `reference` plain torch; `auto` takes
            the native one where it is able. A named implementation never falls back.

    Returns:
        `[B, D]` in the dtype of `x`. The native kernel gives the same bits for a sequence whatever
        the others are, and those of `linear`, `rms_norm` and `single_query_attention` one by one.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or `impl="native"` cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    problem = _problem(x_BD, weights, cos_BR, sin_BR, key_BGSK, value_BGSV, mask_BS)
    if problem:
        raise ValueError(problem)
    library = native_library() if impl == "auto" else None
    if impl == "native":
        library = require_native()
    elif impl not in ("auto", "reference"):
        raise ValueError(f"impl must be one of auto, native, reference, got {impl!r}")
    arguments = (x_BD, weights, cos_BR, sin_BR, key_BGSK, value_BGSV)
    if library is not None:
        unable = native_problem(*arguments)
        if unable is None:
            return run_native(library, *arguments[:4], [arguments[4:]], mask_BS)
        if impl == "native":
            raise ValueError(f"impl='native' cannot compute this: {unable}")
    from moe_runtime.kernels.attention_step.reference import attention_step_reference

    return attention_step_reference(*arguments, mask_BS)


def _problem(
    x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor,
    key: Tensor, value: Tensor, mask: Tensor | None,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments, or None."""
    if x.ndim != 2 or x.shape[1] != weights.qkv.shape[1]:
        return f"x must be [B, {weights.qkv.shape[1]}], got {list(x.shape)}"
    batch, length = x.shape[0], key.shape[-2] if key.ndim == 4 else 0
    heads = weights.num_key_heads
    if (
        length == 0
        or key.shape != (batch, heads, length, weights.key_dim)
        or value.shape != (batch, heads, length, weights.value_dim)
    ):
        return (
            f"key and value must be [{batch}, {heads}, S, {weights.key_dim}] and "
            f"[{batch}, {heads}, S, {weights.value_dim}] with a place for the new token, got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    turned = cos.shape[-1] * (2 if weights.pairs_share else 1)
    if cos.ndim != 2 or cos.shape != sin.shape or turned % 2 or turned > weights.key_dim:
        return (
            f"cos and sin must be [B, R] that turn an even number of {weights.key_dim} values, got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.shape[0] not in (1, batch):
        return f"cos and sin must be of 1 or {batch} sequences, got {len(cos)}"
    if mask is not None and (mask.shape != (batch, length) or mask.dtype != torch.float32):
        return f"mask must be fp32 [{batch}, {length}], got {mask.dtype} {list(mask.shape)}"
    return None


def native_problem(
    x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor, key: Tensor, value: Tensor
) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    dtype = weights.dtype
    if weights.record is None:
        return "weights must be fp32, bf16 or fp16 CPU tensors with unit stride"
    for tensor in (x, cos, sin, key, value):
        if tensor.dtype is not dtype or not tensor.is_cpu:
            return f"it needs CPU tensors of {dtype}, got {tensor.dtype} on {tensor.device}"
    if not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        return "it needs x, cos and sin without gaps"
    if not 0 < x.shape[0] <= ROWS_PER_CALL:
        return f"it takes 1 to {ROWS_PER_CALL} sequences, got {len(x)}"
    if key.shape[-1] > MAX_COLUMNS:
        return f"keys have at most {MAX_COLUMNS} elements, got {key.shape[-1]}"
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        return f"keys and values need unit stride, got {key.stride()} and {value.stride()}"
    is_inference = not torch.is_grad_enabled() and forward_ad._current_level < 0
    if not is_inference and needs_torch(x, *weights.tensors()):
        return NEEDS_TORCH
    return None


def run_native(
    library: NativeLibrary, x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor,
    cached: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """The kernel alone; the sequences are divided evenly between the cached keys and values."""
    batch, size = x.shape[0], x.element_size()
    mask = None if mask is None else mask.contiguous()
    places = b""
    for key, value in cached:
        k, v = key.stride(), value.stride()
        keys = key.data_ptr(), k[0] * size, k[1] * size, k[2] * size
        values = value.data_ptr(), v[0] * size, v[1] * size, v[2] * size
        places += _PLACE(*keys, *values, key.shape[2])
    # a row of queries, keys and values; queries normalised, and turned; mixed values
    scratch = x.new_empty(
        batch * (weights.qkv.shape[0] + 2 * weights.num_queries + weights.output.shape[1])
    )
    out = x.new_empty((batch, weights.output.shape[0]))
    status = library.attention_step(
        weights.record, x.data_ptr(), batch,
        cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.shape[1] * size,
        cos.shape[1], places, len(cached), None if mask is None else mask.data_ptr(),
        scratch.data_ptr(), out.data_ptr(), torch.get_num_threads() == library.num_threads,
    )  # fmt: skip
    if status:
        check_status(status, batch, weights.qkv.shape[1])
    return out
