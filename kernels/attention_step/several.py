"""`attention_step` over caches that lie each in a place of its own, of any lengths.

Shape suffixes: B sequences, D model, R turned values of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.attention_step.op import attention_step, native_problem, run_native
from moe_runtime.kernels.attention_step.weights import AttentionWeights
from moe_runtime.kernels.native import native_library


def attention_steps(
    x_BD: Tensor,
    weights: AttentionWeights,
    cos_BR: Tensor,
    sin_BR: Tensor,
    cached: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """`attention_step` of several sequences, in the bits of each alone where the kernel computes.

    Args:
        x_BD: As there, and so what is not listed.
        weights: The layer.
        cos_BR: `[B, R]`.
        sin_BR: Likewise.
        cached: Keys `[1, G, S, K]` and values `[1, G, S, V]` of each sequence, with a place for the
            new token at the end.

    Returns:
        `[B, D]`.
    """
    library = native_library()
    rows = [(x_BD[b : b + 1], cos_BR[b : b + 1], sin_BR[b : b + 1]) for b in range(len(x_BD))]
    if library is not None and all(
        native_problem(x, weights, cos, sin, *place) is None
        for (x, cos, sin), place in zip(rows, cached, strict=True)
    ):
        x, cos, sin = (part.contiguous() for part in (x_BD, cos_BR, sin_BR))
        return run_native(library, x, weights, cos, sin, cached, None)
    return torch.cat(
        [
            attention_step(x, weights, cos, sin, *place)
            for (x, cos, sin), place in zip(rows, cached, strict=True)
        ]
    )
