"""`fetch_experts`: the GPU reads missing experts of a step from host memory.

Shape suffixes: T tokens, K choices, E experts, P parts of an expert, L landing slots, S slots.
"""

from __future__ import annotations

import ctypes
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.operands import check_shape
from moe_runtime.kernels.triton_support import cdiv, launch, power_of_2, resolve_impl


class FetchTables(NamedTuple):
    """Where a layer's experts are, and where fetched ones go; on the device.

    Attributes:
        residents_E: int32: slot of each expert on the device, negative for the others.
        sources_EP: int64: addresses of each expert's parts in host memory that the device can read;
            0 for experts that are not there.
        parts_2P: int64: where each part begins in a slot, and its bytes.
        landing_L: int32: the slots for fetched experts.
    """

    residents_E: Tensor
    sources_EP: Tensor
    parts_2P: Tensor
    landing_L: Tensor


def fetch_experts_reference(
    ids_TK: Tensor, tables: FetchTables, slots: Tensor, slots_E: Tensor, first: int = 0
) -> None:
    """`fetch_experts` for CPU tensors; reads the addresses in the tables."""
    residents_E, sources_EP, parts_2P, landing_L = tables
    ids = ids_TK.flatten().tolist()
    found = residents_E.clone() if first == 0 else torch.full_like(residents_E, -1)
    for place, expert in enumerate(ids):
        is_known = 0 <= expert < len(residents_E)
        is_mine = first <= place < first + len(landing_L) and ids.index(expert) == place
        if not (is_known and is_mine) or residents_E[expert] >= 0 or not sources_EP[expert].all():
            continue
        slot = int(landing_L[place - first])
        for address, (begin, num_bytes) in zip(
            sources_EP[expert].tolist(), parts_2P.T.tolist(), strict=True
        ):
            target = slots[slot, begin : begin + num_bytes]
            ctypes.memmove(target.data_ptr(), address, num_bytes)
        found[expert] = slot
    slots_E.copy_(found)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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

    The device reads host memory by loads of whole cache lines, which use the link as well as a copy
    does (Min et al., "EMOGI", VLDB 2020). So the host need not know the choices. If an expert is
    named twice, its first choice counts.

    Args:
        ids_TK: int32 or int64; an id of no expert is skipped.
        slots: `[S, B]` uint8, the memory of all slots.
        slots_E: int32, written: each expert's slot if products may use it now, else negative. With
            `first` 0, residents and fetched experts; otherwise fetched ones only.
        first: The flattened ids from here on, as many as there are landing slots, are considered.
        word_bytes: 1, 2, 4 or 8: divides addresses, places and sizes of all parts. With 1 and 2, a
            warp asks for a part of a line, and the link carries less.
        impl: `triton`, `reference`, or `auto`: triton on a GPU.

    Raises:
        ValueError: Shapes or dtypes do not fit.
        TritonUnavailableError: Triton is needed and not installed.
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
    return launch_fetch_experts(ids_TK, tables, slots, slots_E, first, word_bytes)


def launch_fetch_experts(
    ids_TK: Tensor, tables: FetchTables, slots: Tensor, slots_E: Tensor, first: int, word_bytes: int
) -> None:
    """The Triton kernel, for checked arguments."""
    from moe_runtime.kernels.expert_fetch.kernel import BLOCK_E, BLOCK_W, fetch_experts_fwd

    num_experts, num_parts = tables.sources_EP.shape
    num_landing = min(len(tables.landing_L), ids_TK.numel() - first)
    # every part may begin in the midst of a line
    num_chunks = cdiv(slots.shape[1], BLOCK_W * word_bytes) + 2 * num_parts
    launch(
        fetch_experts_fwd, (num_chunks, num_landing),
        ids_ptr=ids_TK.contiguous(), residents_ptr=tables.residents_E,
        sources_ptr=tables.sources_EP, parts_ptr=tables.parts_2P, landing_ptr=tables.landing_L,
        words_ptr=slots.view(_WORDS[word_bytes]), slots_ptr=slots_E,
        num_ids=ids_TK.numel(), num_experts=num_experts, first=first, num_landing=num_landing,
        slot_words=slots.shape[1] // word_bytes,
        NUM_PARTS=num_parts, WORD_BYTES=word_bytes, BLOCK_R=power_of_2(ids_TK.numel()),
        BLOCK_E=BLOCK_E, BLOCK_W=BLOCK_W,
    )  # fmt: skip
