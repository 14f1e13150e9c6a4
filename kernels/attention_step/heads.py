"""`attention_heads`: queries and keys of whole sequences, normalised and turned in one pass.

Shape suffixes: B sequences, T tokens, Q values of all queries, N of all keys, R turned values of a
head, H query heads, G key heads, K key width.
"""

from __future__ import annotations

from torch import Tensor

from moe_runtime.kernels.attention_step.weights import AttentionWeights
from moe_runtime.kernels.native import STATUS_NO_MEMORY, native_library, needs_torch


def attention_heads(
    query_BTQ: Tensor, key_BTN: Tensor, weights: AttentionWeights, cos_BTR: Tensor, sin_BTR: Tensor
) -> tuple[Tensor, Tensor]:
    """What attention layers do with queries and keys between the products and the scores.

    They are normalised, if the layer does that, and turned by the angles of their position, each
    operation rounded to the dtype, as in `attention_step`.

    Args:
        query_BTQ: `[B, T, Q]`; fp32, bf16 or fp16, the dtype of everything else.
        key_BTN: `[B, T, N]`.
        weights: The layer.
        cos_BTR: `[B, T, R]`, or `[1, T, R]` for all sequences, as `attention_step` has them.
        sin_BTR: Likewise.

    Returns:
        `[B, H, T, K]` and `[B, G, T, K]`, by the native kernel where it is able; it gives a row the
        same bits whatever the others are and however many threads work.

    Raises:
        ValueError: Shapes do not fit.
    """
    (batch, tokens), turned = query_BTQ.shape[:2], cos_BTR.shape[-1]
    angles = {(batch, tokens, turned), (1, tokens, turned)}
    turned *= 2 if weights.pairs_share else 1
    if (
        query_BTQ.shape != (batch, tokens, weights.num_queries)
        or key_BTN.shape != (batch, tokens, weights.num_keys)
        or cos_BTR.shape not in angles
        or sin_BTR.shape != cos_BTR.shape
        or turned % 2
        or turned > weights.key_dim
    ):
        raise ValueError(
            f"expected queries [B, T, {weights.num_queries}], keys [B, T, {weights.num_keys}] and "
            f"angles [B or 1, T, R] that turn an even number of {weights.key_dim} values, got "
            f"{list(query_BTQ.shape)}, {list(key_BTN.shape)}, {list(cos_BTR.shape)} and "
            f"{list(sin_BTR.shape)}"
        )
    library, given = native_library(), (query_BTQ, key_BTN, cos_BTR, sin_BTR)
    if (
        library is None
        or weights.record is None
        or not batch * tokens
        or any(tensor.dtype is not weights.dtype or not tensor.is_cpu for tensor in given)
        or needs_torch(*given, *weights.tensors())
    ):
        from moe_runtime.kernels.attention_step.reference import heads_reference

        return heads_reference(query_BTQ, key_BTN, weights, cos_BTR, sin_BTR)
    query_BTQ, key_BTN, cos_BTR, sin_BTR = (tensor.contiguous() for tensor in given)
    width = weights.key_dim
    query_BHTK = query_BTQ.new_empty((batch, weights.num_heads, tokens, width))
    key_BGTK = key_BTN.new_empty((batch, weights.num_key_heads, tokens, width))
    status = library.attention_heads(
        weights.record, query_BTQ.data_ptr(), key_BTN.data_ptr(), batch * tokens, tokens,
        cos_BTR.data_ptr(), sin_BTR.data_ptr(), cos_BTR.shape[0] * tokens, cos_BTR.shape[2],
        query_BHTK.data_ptr(), key_BGTK.data_ptr(), library.shares_threads(),
    )  # fmt: skip
    if status == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory for the heads of {tokens} tokens")
    return query_BHTK, key_BGTK
