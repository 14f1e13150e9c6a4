"""Launches of kernels that have no tile to choose, to be compiled for GPUs that are not there."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import torch
from torch import Tensor

import moe_runtime.kernels.decode_step.expert_choice_kernel as choice_kernel
import moe_runtime.kernels.decode_step.rotary_step_kernel as rotary_kernel
import moe_runtime.kernels.linear.kernel as linear_kernel
import moe_runtime.kernels.rms_norm.kernel as norm_kernel
from moe_runtime.kernels.combine.kernel import launch_combine_bwd, launch_combine_fwd
from moe_runtime.kernels.decode_step.expert_choice import ChoiceForm
from moe_runtime.kernels.decode_step.rotary_step import RowNorm
from moe_runtime.kernels.expert_fetch import FetchTables
from moe_runtime.kernels.expert_fetch.op import launch_fetch_experts
from moe_runtime.kernels.grouped_gemm.backward import bias_grad
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.rms_norm.op import MOST_COLUMNS
from moe_runtime.kernels.token_sort.kernel import token_sort_triton


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def small_kernels() -> None:
    """What has no tile to choose."""
    ids, order = meta(4096, 8, dtype=torch.int64), meta(4096 * 8, dtype=torch.int64)
    token_sort_triton(ids, 128)
    token_sort_triton(ids[:16], 128)
    y, weights, one = meta(4096 * 8, 2048), meta(4096, 8, dtype=torch.float32), order[:1]
    launch_combine_fwd(y, weights, order, one, 8)
    launch_combine_bwd(
        meta(4096, 2048), y, weights, order, one, 8, needs_dy=True, needs_dweights=True
    )
    groups = Groups(meta(129, dtype=torch.int64), 4096 * 8, None, order, num_choices=8)
    bias_grad(y, groups, out_SN=meta(128, 2048))
    for num_parts, word_bytes in ((1, 8), (9, 2)):
        slots_E, landing = meta(128, dtype=torch.int32), meta(8, dtype=torch.int32)
        sources = meta(128, num_parts, dtype=torch.int64)
        parts = meta(2, num_parts, dtype=torch.int64)
        tables = FetchTables(slots_E, sources, parts, landing)
        slots = meta(1024, 9437184, dtype=torch.uint8)
        launch_fetch_experts(ids[:16], tables, slots, slots_E, 8, word_bytes)


def between_products(*, is_chained: bool) -> None:
    """Those of Qwen3-30B-A3B, and the widest; launched before the one before them has ended."""
    chain = {"IS_CHAINED": is_chained}
    with contextlib.ExitStack() as patches:
        for module in (choice_kernel, linear_kernel, norm_kernel, rotary_kernel):
            patches.enter_context(patch.object(module, "dependent_launch", lambda _: chain))
        _between_products()


def _between_products() -> None:
    norm_kernel.launch_rms_norm(meta(8, 1, 2048), meta(2048), 1e-6, "rounded")
    linear_kernel.launch_linear_row(
        meta(1, 2048), [(meta(n, 2048), None) for n in (4096, 512, 512)]
    )
    linear_kernel.launch_linear_row(meta(1, 2880), [(meta(201, 2880), meta(201))])
    recorded = {"_are_parameters": lambda _: True, "_is_recorded": lambda: True}
    with patch.multiple(linear_kernel, **recorded):
        linear_kernel.launch_linear_row(meta(1, 4096), [(meta(2048, 4096), None)])
    norm_kernel.launch_rms_norm(meta(8, 1, MOST_COLUMNS), meta(MOST_COLUMNS), 1e-6, "wide")
    sums = meta(8, 1, 2048)
    norm_kernel.launch_rms_norm(sums, meta(2048), 1e-6, "rounded", sums)
    form = ChoiceForm("softmax", normalises=True)
    choice_kernel.launch_choose_experts(meta(8, 128), 8, form, None, torch.bfloat16)
    bias, form = meta(512, dtype=torch.float32), ChoiceForm("sigmoid", True, 2.5)
    choice_kernel.launch_choose_experts(
        meta(8, 512, dtype=torch.float32), 16, form, bias, torch.float32
    )
    for dtype, heads, key_heads, dim, is_whole in (
        (torch.bfloat16, 32, 4, 128, False),
        (torch.float32, 48, 8, 256, True),
    ):
        query, key = meta(8, heads * dim, dtype=dtype), meta(8, key_heads * dim, dtype=dtype)
        widths = (heads * dim, key_heads * dim) if is_whole else (dim, dim)
        query_norm, key_norm = (RowNorm(meta(width, dtype=dtype), 1e-6) for width in widths)
        angles, cache = meta(8, dim, dtype=dtype), meta(8, key_heads, 4096, dim, dtype=dtype)
        for place in (meta(dtype=torch.int64), meta(8, dtype=torch.int64)):
            rotary_kernel.launch_rotary_step(
                (query, key, key), (angles, angles), (cache, cache), place,
                (query_norm, key_norm), dim, None if place.ndim else meta(1, dtype=torch.int32),
            )  # fmt: skip
