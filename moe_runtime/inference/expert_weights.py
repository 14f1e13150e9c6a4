"""Filled slots as the weights of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.types import ExpertKey

_MOST_BOUND = 2048
"""Views of slots that are remembered: a few megabytes."""


def bind_weights(experts: ExpertMap) -> Callable[[ExpertKey, torch.Tensor], ExpertWeights]:
    """Makes the function by which a store turns a filled slot into an expert's weights."""

    def bind(key: ExpertKey, slot: torch.Tensor) -> ExpertWeights:
        with torch.inference_mode(False):  # views are kept, and a later call may want gradients
            matrices = experts.matrices_in(key, slot)
        return ExpertWeights(gate=matrices.pop("gate", None), **matrices)

    return bind


def bind_slots(experts: ExpertMap) -> Callable[[ExpertKey, torch.Tensor], ExpertWeights]:
    """The same for slots that stay where they are for as long as the function lives.

    Experts whose matrices lie alike in a slot share its views: making them anew for every arrival
    takes as long as reading a small expert. A slot that goes from layer to layer keeps the views of
    each, up to ``_MOST_BOUND`` in all.
    """
    bind = bind_weights(experts)
    forms: dict[object, int] = {}
    form_of: dict[ExpertKey, int] = {}
    bound: dict[tuple[int, int], ExpertWeights] = {}  # by a slot's address, and the form

    def bind_slot(key: ExpertKey, slot: torch.Tensor) -> ExpertWeights:
        form, address = form_of.get(key), slot.data_ptr()
        if form is None:
            packings = tuple(experts.packings[key.layer].items())
            described = experts.matrices[key.layer], packings, experts.layouts[key].form
            form = form_of[key] = forms.setdefault(described, len(forms))
        known = bound.get((address, form))
        if known is None:
            if len(bound) >= _MOST_BOUND:
                bound.clear()
            known = bound[address, form] = bind(key, slot)
        return known

    return bind_slot
