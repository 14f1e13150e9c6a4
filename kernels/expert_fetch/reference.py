"""The specification of `fetch_experts`, in plain torch.

Shape suffixes: T tokens, K choices, E experts, P parts of an expert, L landing slots, S slots.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor


class FetchTables(NamedTuple):
    """Where the experts of a layer lie, and where those that are fetched go; on the device.

    Attributes:
        residents_E: int32, the slot of each expert that is on the device, below 0 for the others.
        sources_EP: int64, addresses of each expert's parts in host memory that the device can read;
            0 for experts that are not there.
        parts_2P: int64, where each part begins in a slot, and its bytes.
        landing_L: int32, the slots that fetched experts go to.
    """

    residents_E: Tensor
    sources_EP: Tensor
    parts_2P: Tensor
    landing_L: Tensor


def fetch_experts_reference(
    ids_TK: Tensor, tables: FetchTables, slots: Tensor, slots_E: Tensor, first: int = 0
) -> None:
    """As `fetch_experts`, for tensors of the CPU.

    Args:
        ids_TK: `[T, K]`, as all that follows of `fetch_experts`.
        tables: Addresses in them are read.
        slots: `[S, B]` uint8, written.
        slots_E: `[E]` int32, written.
        first: Of the flattened ids that are looked at.
    """
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
