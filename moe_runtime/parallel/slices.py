"""Slices of experts along their hidden dimension: expert tensor parallelism.

A slice of an expert is a narrower expert; the outputs of all slices add up to the expert's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts


def slice_experts(experts: StackedExperts, index: int, num_slices: int) -> StackedExperts:
    """Slice `index` of every expert, as copies; the bias of the second matrix belongs to slice 0.

    Raises:
        ValueError: The hidden dimension does not divide, or there is no such slice.
    """
    if not 0 <= index < num_slices:
        raise ValueError(f"slice must be in 0..{num_slices - 1}, got {index}")
    if experts.dim_hidden % num_slices:
        raise ValueError(
            f"the hidden dimension of the experts ({experts.dim_hidden}) does not divide into "
            f"{num_slices} slices"
        )
    ids = hidden_ids(experts, index, num_slices)
    columns = preactivation_ids(experts, ids)
    first, second = (2, 1) if experts.is_transposed else (1, 2)
    down_bias = experts.down_bias
    if down_bias is not None and index > 0:
        down_bias = torch.zeros_like(down_bias)
    bias = experts.gate_up_bias
    return replace(
        experts,
        gate_up=experts.gate_up.index_select(first, columns),
        down=experts.down.index_select(second, ids),
        gate_up_bias=None if bias is None else bias.index_select(1, columns),
        down_bias=down_bias,
    )


def one_expert(experts: StackedExperts, expert: int) -> StackedExperts:
    """One of the experts, as a stack of one; views."""
    here = slice(expert, expert + 1)
    return replace_tensors(experts, [None if t is None else t[here] for t in experts.tensors()])


def replace_tensors(experts: StackedExperts, tensors: Sequence[Tensor | None]) -> StackedExperts:
    """The same layout with other tensors, in the order of `StackedExperts.tensors`."""
    gate_up, down, gate_up_bias, down_bias = tensors
    assert gate_up is not None
    assert down is not None
    return replace(
        experts, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


def hidden_ids(experts: StackedExperts, index: int, num_slices: int) -> Tensor:
    """`[F / num_slices]`: hidden units of a slice."""
    width = experts.dim_hidden // num_slices
    return torch.arange(index * width, (index + 1) * width, device=experts.device)


def preactivation_ids(experts: StackedExperts, ids: Tensor) -> Tensor:
    """Rows of the first matrix that make the given hidden units, in the layout of the experts."""
    if not experts.has_gate:
        return ids
    if experts.is_concatenated:
        return torch.cat([ids, ids + experts.dim_hidden])
    return torch.stack([2 * ids, 2 * ids + 1], dim=1).flatten()
