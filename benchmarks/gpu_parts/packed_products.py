"""Layers of quantised experts for `kernels.py`: from their codes, and from their values in bf16.

The other way to compute a quantised layer is to write the values of the experts that are used in
bf16 and go on as with any. That is in plain torch here, so each row is held to more: to values that
were written before. `read_of_copy` is the share of a plain copy's bandwidth at which the codes and
scales of the experts that are used were read. Few tokens are timed within a CUDA graph, as decode
steps run, each time with other experts than the time before, so that none is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ActivationSpec, QuantizedExperts, expert_mlp
from moe_runtime.kernels.quantized import SCALES, QuantizedStack, WeightFormat

# D, F, E, K of Qwen3-30B-A3B, and the numbers of tokens.
LAYER, TINY_LAYER = (2048, 768, 128, 8), (128, 128, 4, 2)
TOKENS, TINY_TOKENS = (1, 8, 128, 8192), (4, 40)
FEW_TOKENS = 16
FORMATS = {
    "mxfp4": WeightFormat("e2m1", "e8m0", group_cols=32),
    "fp8 blocks": WeightFormat("e4m3", "f32", group_rows=128, group_cols=128),
    "int4 groups of 32": WeightFormat("uint4", "bf16", group_cols=32, zero=8),
    "int4 groups of 128": WeightFormat("uint4", "bf16", group_cols=128, has_zero_points=True),
}
ACTIVATION = ActivationSpec("silu")


@torch.no_grad()
def measure_packed(
    device: str,
    median_s: Callable[[Callable[[], Any]], float],
    graph_s: Callable[[Callable[[], Any]], float | None],
    copy_bytes_s: float,
    *,
    tiny: bool,
) -> dict[str, dict[str, float]]:
    """Seconds of each format and number of tokens, beside those of the values.

    `ratio` is that of values which lie there in bf16, `written_ratio` with writing them first.

    Args:
        device: `cuda` or `cpu`.
        median_s: Times a call.
        graph_s: Times a call within a graph; None where there are none.
        copy_bytes_s: What a copy reads and writes in a second.
        tiny: Whether for a rehearsal.
    """
    D, F, E, K = TINY_LAYER if tiny else LAYER
    found = {}
    for name, kind in FORMATS.items():
        gate, up = (_stack(kind, E, F, D, device) for _ in range(2))
        experts = QuantizedExperts(gate=gate, up=up, down=_stack(kind, E, D, F, device))
        for num_tokens in TINY_TOKENS if tiny else TOKENS:
            x = torch.randn(num_tokens, D, device=device).bfloat16()
            scores = torch.randn(num_tokens, E, device=device).softmax(-1)
            weights, ids = scores.topk(K)

            few = num_tokens <= FEW_TOKENS
            turns = [(ids + turn * K) % E for turn in range(max(1, E // ids.numel()) if few else 1)]
            wide = experts.widened(torch.arange(E, device=device) if few else ids, x.dtype)
            ours, theirs = (
                _seconds(partial(_in_turn, x, turns, weights, each), few, median_s, graph_s)
                / len(turns)
                for each in (experts, wide)
            )
            written = median_s(partial(_written_out, x, ids, weights, experts))
            del wide
            num_bytes = len(ids.unique()) * _bytes(experts) / E
            found[f"{name}, T={num_tokens}"] = {
                "seconds": ours,
                "peer_seconds": theirs,
                "ratio": theirs / ours,
                "written_ratio": written / ours,
                "read_of_copy": num_bytes / ours / copy_bytes_s,
            }
    return found


def _seconds(
    call: Callable[[], Any],
    few: bool,
    median_s: Callable[[Callable[[], Any]], float],
    graph_s: Callable[[Callable[[], Any]], float | None],
) -> float:
    call()  # kernels are compiled
    found = graph_s(call) if few else None
    return median_s(call) if found is None else found


def _in_turn(x: Tensor, turns: list[Tensor], weights: Tensor, experts: Any) -> None:
    for ids in turns:
        expert_mlp(x, ids, weights, experts, activation=ACTIVATION)


def _written_out(x: Tensor, ids: Tensor, weights: Tensor, experts: QuantizedExperts) -> Tensor:
    return expert_mlp(x, ids, weights, experts.widened(ids, x.dtype), activation=ACTIVATION)


def _stack(kind: WeightFormat, E: int, N: int, K: int, device: str) -> QuantizedStack:
    """Codes of any value under scales that keep activations of their size."""
    codes = torch.randint(0, 256, (E, N, kind.row_bytes(K)), dtype=torch.uint8, device=device)
    if kind.codes == "e4m3":
        # no NaN
        codes.bitwise_and_(0xF7)
    groups = (E, *kind.scales_shape(N, K))
    if kind.scales == "e8m0":
        scales = torch.full(groups, 120, dtype=torch.uint8, device=device)
    else:
        scales = torch.full(groups, 2.0**-10, device=device).to(SCALES[kind.scales])
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if kind.has_zero_points else None
    return QuantizedStack(kind, K, codes, scales, zeros)


def _bytes(experts: QuantizedExperts) -> int:
    """Of all experts."""
    total = 0
    for stack in (experts.gate, experts.up, experts.down):
        if stack is not None:
            parts = (stack.codes, stack.scales, stack.zero_points)
            total += sum(part.nbytes for part in parts if part is not None)
    return total
