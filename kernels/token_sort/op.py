"""`token_sort`: groups the slots of a routing table by expert.

Shape suffixes: T tokens, K choices a token, E experts, R = T*K routed rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_runtime.kernels.triton_support import resolve_impl

TokenSortImpl = Literal["auto", "triton", "torch", "reference"]
IMPLS: tuple[TokenSortImpl, ...] = ("auto", "triton", "torch", "reference")
_ID_DTYPES = (torch.int64, torch.int32, torch.int16)


class SortedTokens(NamedTuple):
    """Slots of a routing table, grouped by expert. All int64, on the device of the ids.

    A slot is one choice of one token, numbered `t * K + k`. A row is a place in the sorted order.

    Attributes:
        counts_E: Rows of each expert.
        offsets_E1: First row of each expert; the last entry is the number of real rows.
        order_R: Slot of each row. Rows from `offsets_E1[-1]` on belong to slots without an expert.
        inverse_R: Row of each slot; `inverse_R[order_R] == arange(R)`.
    """

    counts_E: Tensor
    offsets_E1: Tensor
    order_R: Tensor
    inverse_R: Tensor


def token_sort(ids_TK: Tensor, num_experts: int, *, impl: TokenSortImpl = "auto") -> SortedTokens:
    """Groups the slots of a routing table by expert, in slot order within each expert.

    A counting sort: stable, the same bits in every run, `O(R)` memory. The host does not wait, so a
    CUDA graph can capture the whole layer.

    Args:
        ids_TK: Any shape, int16, int32 or int64. Slots with an id outside `[0, num_experts)` come
            last.
        num_experts: At least 1.
        impl: `triton` needs a GPU, `torch` is the CPU path, `reference` the specification; `auto`
            chooses by device.

    Raises:
        ValueError: Wrong dtype or number of experts, or `impl` cannot run here.
        TritonUnavailableError: Triton is needed and not installed.
    """
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if ids_TK.dtype not in _ID_DTYPES:
        raise ValueError(f"ids must be int64, int32 or int16, got {ids_TK.dtype}")
    chosen = resolve_impl(impl, ids_TK.device, IMPLS)
    if chosen == "triton":
        from moe_runtime.kernels.token_sort.kernel import token_sort_triton

        return SortedTokens(*token_sort_triton(ids_TK, num_experts))
    if chosen == "torch" and ids_TK.device.type == "cpu" and not torch.compiler.is_compiling():
        return _token_sort_numpy(ids_TK, num_experts)
    return SortedTokens(*token_sort_reference(ids_TK, num_experts))


def _token_sort_numpy(ids_TK: Tensor, num_experts: int) -> SortedTokens:
    """Numpy sorts 16-bit keys by radix: ten times faster than torch's stable sort at 10^4 slots."""
    ids_R = ids_TK.detach().reshape(-1).numpy()
    keys_R = np.where((ids_R < 0) | (ids_R >= num_experts), num_experts, ids_R)
    if num_experts <= np.iinfo(np.int16).max:
        keys_R = keys_R.astype(np.int16)
    order_R = np.argsort(keys_R, kind="stable")
    inverse_R = np.empty_like(order_R)
    inverse_R[order_R] = np.arange(len(order_R))
    offsets_E1 = np.zeros(num_experts + 1, dtype=np.int64)
    counts_E = np.bincount(keys_R, minlength=num_experts + 1)[:num_experts]
    np.cumsum(counts_E, out=offsets_E1[1:])
    arrays = (counts_E, offsets_E1, order_R, inverse_R)
    return SortedTokens(*[torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays])


def token_sort_reference(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The specification: plain torch on any device, without host synchronisation."""
    ids_R = ids_TK.reshape(-1)
    is_real = (ids_R >= 0) & (ids_R < num_experts)
    keys_R = torch.where(is_real, ids_R, num_experts).to(torch.int64)
    order_R = torch.argsort(keys_R, stable=True)
    slots_R = torch.arange(len(ids_R), device=ids_R.device)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, slots_R)
    # bincount would wait for the GPU's largest value
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_R.device)
    counts_E = counts.scatter_add_(0, keys_R, torch.ones_like(keys_R))[:num_experts]
    offsets_E1 = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    return counts_E, offsets_E1, order_R, inverse_R
