"""`single_query_attention`: validation and choice of the implementation.

Shape suffixes: B batch, H query heads, G key heads, S cached tokens, D key width, V value width.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from moe_runtime.kernels.native import require_native
from moe_runtime.kernels.single_query_attention.native import (
    native_attention,
    native_problem_of,
    problem_of,
)
from moe_runtime.kernels.single_query_attention.reference import single_query_attention_reference

Impl = Literal["auto", "native", "reference"]


def single_query_attention(
    query_BHD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Computes `softmax(scale * query . keys + mask) . values` for one query in each head.

    Consecutive query heads share a key head (grouped-query attention, Ainslie et al., 2023). A sink
    is a further score of its head, whose weight is left out (Xiao et al., 2023; gpt-oss).

    Args:
        query_BHD: `[B, H, D]`, H a multiple of G; fp32, bf16 or fp16.
        key_BGSD: `[B, G, S, D]`, S at least 1, unit stride along D, any other strides.
        value_BGSV: `[B, G, S, V]`, likewise; both in the dtype of the query.
        mask_BS: `[B, S]` fp32 to be added to the scores, or None.
        scale: Factor of the scores.
        sinks_H: `[H]`, fp32, bf16 or fp16, or None.
        impl: `native` is the C kernel (CPU, inference only), `reference` plain torch; `auto` takes
            the native one where it is able. A named implementation never falls back.

    Returns:
        `[B, H, V]` in the dtype of the query; sums are in fp32.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or `impl="native"` cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    problem = problem_of(query_BHD, key_BGSD, value_BGSV, mask_BS, sinks_H)
    if problem:
        raise ValueError(problem)
    if impl == "native":
        require_native()
        unable = native_problem_of(query_BHD, key_BGSD, value_BGSV, sinks_H)
        if unable:
            raise ValueError(f"impl='native' cannot compute this: {unable}")
    elif impl not in ("auto", "reference"):
        raise ValueError(f"impl must be one of auto, native, reference, got {impl!r}")
    arguments = (query_BHD, key_BGSD, value_BGSV, mask_BS, scale, sinks_H)
    mixed = None if impl == "reference" else native_attention(*arguments)
    return single_query_attention_reference(*arguments) if mixed is None else mixed
