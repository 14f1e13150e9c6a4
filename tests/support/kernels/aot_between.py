"""Launches of what decode steps compute between their products, to be compiled for other GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.expert_choice import ChoiceForm
from moe_runtime.kernels.expert_choice.kernel import launch_choose_experts
from moe_runtime.kernels.rotary_step import RowNorm
from moe_runtime.kernels.rotary_step.kernel import launch_rotary_step


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def between_products() -> None:
    """Those of Qwen3-30B-A3B, and the widest."""
    form = ChoiceForm("softmax", normalises=True)
    launch_choose_experts(meta(8, 128), 8, form, None, torch.bfloat16)
    bias, form = meta(512, dtype=torch.float32), ChoiceForm("sigmoid", True, 2.5)
    launch_choose_experts(meta(8, 512, dtype=torch.float32), 16, form, bias, torch.float32)
    for dtype, heads, key_heads, dim, is_whole in (
        (torch.bfloat16, 32, 4, 128, False),
        (torch.float32, 48, 8, 256, True),
    ):
        query, key = meta(8, heads * dim, dtype=dtype), meta(8, key_heads * dim, dtype=dtype)
        widths = (heads * dim, key_heads * dim) if is_whole else (dim, dim)
        query_norm, key_norm = (RowNorm(meta(width, dtype=dtype), 1e-6) for width in widths)
        angles, cache = meta(8, dim, dtype=dtype), meta(8, key_heads, 4096, dim, dtype=dtype)
        launch_rotary_step(
            (query, key, key), (angles, angles), (cache, cache), meta(dtype=torch.int64),
            (query_norm, key_norm), dim,
        )  # fmt: skip
