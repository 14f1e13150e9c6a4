"""`fetch_experts`: validation and choice of the implementation.

Shape suffixes as in the reference.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.expert_fetch.reference import FetchTables, fetch_experts_reference
from moe_runtime.kernels.operands import check_shape
from moe_runtime.kernels.triton_support import resolve_impl

FetchImpl = Literal["auto", "triton", "reference"]


def fetch_experts(
    ids_TK: Tensor,
    tables: FetchTables,
    slots: Tensor,
    slots_E: Tensor,
    *,
    first: int = 0,
    word_bytes: int = 1,
    impl: FetchImpl = "auto",
) -> None:
    """Copies chosen experts that are not on the device from host memory to landing slots.

    The device reads the host's memory itself, by loads of whole cache lines, which use the link as
    well as a copy does (Min et al., "EMOGI", VLDB 2020), so that the host need not know who was
    chosen. Of an expert that is named twice the first choice counts.

    Args:
        ids_TK: `[T, K]` int32 or int64; an id that names no expert is passed over.
        tables: Where experts lie and go.
        slots: `[S, B]` uint8, the memory of all slots.
        slots_E: `[E]` int32, written: the slot of each expert that products may take now, below 0
            for the others. With `first` 0 these are the residents and the fetched ones, else the
            fetched ones alone.
        first: Of the flattened ids, as many as there are landing slots are looked at from here on.
        word_bytes: 1, 2, 4 or 8: addresses, places and sizes of all parts are multiples of it. With
            1 and 2 a warp asks for a part of a line, and the link carries less.
        impl: `triton` is one kernel; `auto` takes it on a GPU. A named implementation never falls
            back.

    Raises:
        ValueError: Shapes or dtypes do not fit.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
    """
    num_experts, num_parts = tables.sources_EP.shape
    check_shape("residents", tables.residents_E, (num_experts,))
    check_shape("slots of experts", slots_E, (num_experts,))
    check_shape("parts", tables.parts_2P, (2, num_parts))
    wanted = {
        "residents": (tables.residents_E, torch.int32),
        "sources": (tables.sources_EP, torch.int64),
        "parts": (tables.parts_2P, torch.int64),
        "landing slots": (tables.landing_L, torch.int32),
        "slots of experts": (slots_E, torch.int32),
        "slots": (slots, torch.uint8),
    }
    for name, (tensor, dtype) in wanted.items():
        if tensor.dtype != dtype or tensor.device != ids_TK.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} on {ids_TK.device}, got {tensor.dtype} on "
                f"{tensor.device}"
            )
    if word_bytes not in (1, 2, 4, 8):
        raise ValueError(f"word_bytes must be 1, 2, 4 or 8, got {word_bytes}")
    if resolve_impl(impl, ids_TK.device, ("auto", "triton", "reference")) != "triton":
        return fetch_experts_reference(ids_TK, tables, slots, slots_E, first)
    from moe_runtime.kernels.expert_fetch.kernel import launch_fetch_experts

    return launch_fetch_experts(ids_TK, tables, slots, slots_E, first, word_bytes)
