"""bf16 weights in a lossless code in memory: 1.4 times as many experts in a budget.

Linear layers are encoded when they are loaded. An expert is read into a landing slot, and encoded
from there into its cache slot.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.packed_experts import (
    PART_ALIGNMENT,
    Part,
    PlanesPacking,
    aligned,
    lay_out_parts,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CapacityError, UnsupportedModelError
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.kernels.lossless import PlanesMatrix, encode_planes_into
from moe_runtime.kernels.lossless.reference import TAIL_BYTES
from moe_runtime.memory.reads import Transfer
from moe_runtime.memory.source import ExpertLayout, ExpertSource, Extent, Slab, TensorRange
from moe_runtime.memory.store import ExpertStore, StoreListener
from moe_runtime.memory.tiers import COPY_THREADS, TierFetcher, TierStore
from moe_runtime.policies.eviction import LayerShares
from moe_runtime.types import ExpertKey

ROOM_SHARE = 16
"""Slots have room for escapes of one in 16 weights, over twice what trained experts need."""
LANDING_SLOTS = 2 * COPY_THREADS
"""Each thread encodes one expert and reads the next."""
SPARE_SLOTS = 1
"""Memory for escapes that do not fit in their slots, in slots."""


def coded_experts(experts: ExpertMap, place: torch.device) -> tuple[ExpertMap, int]:
    """The layout of encoded experts in slots, and the bytes of landing slots and spare escapes.

    Matrices that are not bf16, or not stored by rows, stay unchanged. Raises UnsupportedModelError:
    nothing gets smaller, or the model is on a GPU.
    """
    if place.type != "cpu":
        raise UnsupportedModelError(
            f"cache_code planes is for models on the CPU; expected none on {place.type}"
        )
    dense, packed = experts.dense_entries, experts.packed_dense
    coded = ExpertMap(
        experts.modules,
        experts.top_k,
        dense_entries=dense,
        packed_dense=packed,
        embeddings=experts.embeddings,
    )
    # a process may have only some of the experts, and none of a layer
    own: list[list[ExpertKey]] = [[] for _ in experts.modules]
    for key in experts.layouts:
        own[key.layer].append(key)
    for names, keys in zip(experts.matrices, own, strict=True):
        tensors = experts.layouts[keys[0]].tensors if keys else ()
        forms = [_form(name, tensor) for name, tensor in zip(names, tensors, strict=bool(keys))]
        found = [form for form in forms if form.is_coded("planes")]
        parts, num_bytes = lay_out_parts(forms, [_room(form) for form in found], "planes")
        coded.matrices.append(tuple(part.name for part in parts))
        coded.packings.append({form.name: PlanesPacking(form.shape[1]) for form in found})
        plain = dict(zip(names, tensors, strict=bool(keys)))
        for key in keys:
            file = experts.layouts[key].extents[0].file
            ranges = tuple(_range(file, part, plain.get(part.name)) for part in parts)
            extent = Extent(file, 0, num_bytes, num_bytes, 0)
            places = tuple(part.offset for part in parts)
            coded.layouts[key] = ExpertLayout((extent,), ranges, places, places, 0)
    if any(experts.packings) or not any(coded.packings):
        if any(isinstance(dense[name], TensorEntry) for name in packed):
            return experts, 0
        raise UnsupportedModelError(
            "cache_code planes is for weights in bf16: no linear layer is, and experts are "
            f"{' and '.join(experts.type_names)}, or lie transposed; expected cache_code none"
        )
    return coded, (LANDING_SLOTS + SPARE_SLOTS) * experts.slot_bytes


def open_coded_stores(
    source: ExpertSource,
    slab: Slab,
    experts: ExpertMap,
    coded: ExpertMap,
    plan: MemoryPlan,
    new_policy: Callable[[MemoryPlan], LayerShares],
    bind: Callable[[ExpertKey, Tensor], ExpertWeights],
    listeners: Sequence[StoreListener | None],
) -> tuple[ExpertStore[ExpertWeights], ExpertStore[Tensor]]:
    """The store that layers compute from, and the store of landing slots below it."""
    landing = replace(plan, num_slots=LANDING_SLOTS, slot_bytes=experts.slot_bytes)
    below: ExpertStore[Tensor] = ExpertStore(
        source,
        Slab(landing.num_slots, landing.slot_bytes),
        new_policy(landing),
        lambda _, slot: slot,
        stream_slots=landing.stream_slots(),
        listener=listeners[1],
    )
    fetcher = CodingFetcher(below, experts, coded)

    def bind_coded(key: ExpertKey, slot: Tensor) -> ExpertWeights:
        return fetcher.with_spare(key, slot) or bind(key, slot)

    above = TierStore(
        fetcher,
        slab,
        new_policy(plan),
        bind_coded,
        stream_slots=plan.stream_slots(),
        listener=listeners[0],
    )
    return above, below


class CodingFetcher(TierFetcher):
    """Encodes experts from a tier with the layout of the files into slots."""

    def __init__(self, lower: ExpertStore[Tensor], experts: ExpertMap, coded: ExpertMap) -> None:
        super().__init__(lower)
        self._experts = experts
        self._coded = coded
        self._spare: dict[int, dict[str, Tensor]] = {}  # by slot address and matrix
        self._counted = threading.Lock()

    def with_spare(self, key: ExpertKey, slot: Tensor) -> ExpertWeights | None:
        """The weights of an expert with escapes outside its slot; None if all are inside."""
        spare = self._spare.get(slot.data_ptr())
        if spare is None:
            return None
        with torch.inference_mode(False):  # as of any slot
            matrices = self._coded.matrices_in(key, slot)
        for name, escapes in spare.items():
            matrices[name] = replace(matrices[name], escapes=escapes)
        return ExpertWeights(gate=matrices.pop("gate", None), **matrices)

    def fetch(self, key: ExpertKey, slot: Tensor, read: Transfer) -> None:
        self._spare.pop(slot.data_ptr(), None)
        super().fetch(key, slot, read)

    def _move(self, key: ExpertKey, source: Tensor, slot: Tensor) -> None:
        with ExitStack() as undo:
            undo.callback(self._spare.pop, slot.data_ptr(), None)
            self._encode(key, source, slot)
            undo.pop_all()

    def _encode(self, key: ExpertKey, source: Tensor, slot: Tensor) -> None:
        views = self._experts.layouts[key].views(source)
        into = self._coded.matrices_in(key, slot)
        for name, view in zip(self._experts.matrices[key.layer], views, strict=True):
            target = into[name]
            if not isinstance(target, PlanesMatrix):
                target.copy_(view)
            elif (num_bytes := encode_planes_into(view, target)) > target.escapes.nbytes:
                escapes = self._take_spare(key, name, slot, num_bytes)
                encode_planes_into(view, replace(target, escapes=escapes))

    def _take_spare(self, key: ExpertKey, name: str, slot: Tensor, num_bytes: int) -> Tensor:
        with self._counted:
            others = [part.nbytes for own in [*self._spare.values()] for part in own.values()]
            if sum(others) + num_bytes > SPARE_SLOTS * self._experts.slot_bytes:
                module = self._experts.modules[key.layer].name
                raise CapacityError(
                    f"the {name} weights of expert {key.expert} of {module} do not fit in the "
                    f"code: more than one in {ROOM_SHARE} has a rare exponent, as in others in "
                    "memory; load the model with cache_code none, or pack the checkpoint"
                )
            escapes = torch.empty(num_bytes, dtype=torch.uint8)
            self._spare.setdefault(slot.data_ptr(), {})[name] = escapes
            return escapes


def _form(name: str, tensor: TensorRange) -> Part:
    """A matrix to encode, or as many elements that stay unchanged."""
    if len(tensor.shape) == 2 and tensor.stride[1] != 1:
        return Part(name, tensor.dtype, (math.prod(tensor.shape),))
    return Part(name, tensor.dtype, tensor.shape)


def _range(file: Path, part: Part, plain: TensorRange | None) -> TensorRange:
    """The range of a part in a slot, without gaps. Plain parts keep their strides' order."""
    shape, stride = part.shape, (*part.shape[1:], 1)
    if plain is not None:
        shape, stride = plain.shape, (*plain.shape[1:], 1)
        if len(shape) == 2 and plain.stride[1] != 1:
            stride = 1, shape[0]
    return TensorRange(file, part.offset, part.num_bytes, part.dtype, shape, stride)


def _room(form: Part) -> int:
    return aligned(math.prod(form.shape) // ROOM_SHARE + TAIL_BYTES, PART_ALIGNMENT)
