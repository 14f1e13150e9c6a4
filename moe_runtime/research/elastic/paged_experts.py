"""Routed experts spread over ranks whose number changes, without a changed bit.

Each expert is a page in memory of its own, found by a table. New pages arrive while old ones are in
use; then the table is switched and unused pages are freed (ElasticMoE's remap of virtual pages).

Every rank computes a row by the calls of one process with all experts: the rows of one rank for one
expert are a call of their own, and the sum over a token's experts is formed on its own rank. So
neither the number of ranks nor the placement nor other ranks' work changes a result.

Shape suffixes: T tokens, D model, K choices, R rows, S slots of a rank, P ranks, L layers, E
experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap, ExpertsModule, map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.budget import set_up_libraries
from moe_runtime.inference.expert_layer import OffloadedExperts, bind_weights
from moe_runtime.inference.generation import end_token_ids
from moe_runtime.inference.loading import finish_dense, replace_experts, signature_of
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.expert_mlp.separate_experts import ExpertActivation
from moe_runtime.memory.source import ExpertSource, aligned_bytes
from moe_runtime.parallel import Transport
from moe_runtime.parallel.dispatching import plan_dispatch
from moe_runtime.policies.placement import Placement
from moe_runtime.types import ExpertKey, ModelSignature

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExpertPages:
    """The experts that one rank holds; `peak_bytes` counts arriving pages too."""

    def __init__(self, experts: ExpertMap) -> None:
        self._layouts = experts.layouts
        self._bind = bind_weights(experts)
        self._pages: dict[ExpertKey, torch.Tensor] = {}
        self._weights: dict[ExpertKey, ExpertWeights] = {}
        self.num_bytes = 0
        self.peak_bytes = 0

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._pages

    def page(self, key: ExpertKey) -> torch.Tensor:
        return self._pages[key]

    def weights(self, key: ExpertKey) -> ExpertWeights:
        return self._weights[key]

    def allocate(self, key: ExpertKey) -> torch.Tensor:
        """Memory for an expert that is to arrive: `uint8`; `switch_epoch` puts it into use."""
        return aligned_bytes(self._layouts[key].slot_bytes)

    def read(self, keys: Collection[ExpertKey]) -> dict[ExpertKey, torch.Tensor]:
        """Reads experts from the checkpoint into new pages, which `switch_epoch` puts into use."""
        if not keys:
            return {}
        source = ExpertSource({key: self._layouts[key] for key in keys})
        try:
            pages = {key: self.allocate(key) for key in keys}
            source.read(pages)
        finally:
            source.close()
        return pages

    def switch_epoch(
        self, keys: Collection[ExpertKey], arrivals: Mapping[ExpertKey, torch.Tensor]
    ) -> None:
        """Makes these experts the ones that are here; the memory of all others is freed."""
        wanted = set(keys)
        missing = wanted - self._pages.keys() - arrivals.keys()
        if missing:
            raise ValueError(f"{len(missing)} experts have not arrived, {min(missing)} among them")
        coming = {key: page for key, page in arrivals.items() if key not in self._pages}
        arriving_bytes = sum(page.numel() for page in coming.values())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + arriving_bytes)
        for key in coming.keys() & wanted:
            self._pages[key] = coming[key]
            self._weights[key] = self._bind(key, coming[key])
        for key in self._pages.keys() - wanted:
            del self._pages[key], self._weights[key]
        self.num_bytes = sum(page.numel() for page in self._pages.values())


def keys_of(placement: Placement, rank: int) -> set[ExpertKey]:
    return {
        ExpertKey(layer, expert)
        for layer in range(placement.num_layers)
        for expert in placement.holds(layer, rank)
    }


def slots_used_by(placement: Placement, rank: int) -> np.ndarray:
    """`[L, E + 1]`: the slot that a rank sends the rows of each expert to.

    Its own slot where it has one, else one of the replicas, another one for the next rank. All rows
    of a rank for an expert go to one replica: the number of rows computed at once may decide the
    kernel. The last column, for choices of no expert, is one after the last slot.
    """
    slots_LEC = placement.slots_of_expert
    is_own = (slots_LEC >= 0) & (slots_LEC // placement.slots_per_gpu == rank)
    turn_LE = np.where(is_own.any(axis=2), is_own.argmax(axis=2), rank % placement.copies)
    used_LE = np.take_along_axis(slots_LEC, turn_LE[:, :, None], axis=2)[:, :, 0]
    return np.pad(used_LE, ((0, 0), (0, 1)), constant_values=placement.num_slots)


@dataclass(frozen=True, eq=False)
class Epoch:
    """The ranks and the placement between two changes."""

    number: int
    transport: Transport
    placement: Placement


class SpreadExperts:
    """One rank's part in computing all layers; `loads_LE` counts choices of its tokens."""

    def __init__(self, pages: ExpertPages, num_layers: int, num_experts: int) -> None:
        self.pages = pages
        self.loads_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._epoch: Epoch | None = None

    @property
    def epoch(self) -> Epoch:
        assert self._epoch is not None, "enter() comes first"
        return self._epoch

    def enter(self, epoch: Epoch, arrivals: Mapping[ExpertKey, Tensor]) -> None:
        """Switches to another epoch, between two passes."""
        transport, placement = epoch.transport, epoch.placement
        self.pages.switch_epoch(keys_of(placement, transport.rank), arrivals)
        self._epoch = epoch
        ranks_LPS = placement.expert_of_slot.reshape(placement.num_layers, transport.size, -1)
        self._mine_LS = ranks_LPS[:, transport.rank]
        self._slots_LE = torch.from_numpy(slots_used_by(placement, transport.rank))

    def leave(self) -> None:
        self.pages.switch_epoch((), {})
        self._epoch = None

    def compute(self, module: SpreadModule, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        """`[T * K, D]` outputs for each choice of this rank's tokens; a collective call.

        T may be 0, and differ between ranks; ids of no expert give rows of zeros.
        """
        epoch = self.epoch
        transport, num_ranks = epoch.transport, epoch.transport.size
        num_experts = epoch.placement.num_experts
        is_real = (ids_TK >= 0) & (ids_TK < num_experts)
        np.add.at(self.loads_LE[module.layer], ids_TK[is_real].numpy(), 1)
        slots_TK = self._slots_LE[module.layer][ids_TK.where(is_real, num_experts)]
        # Slots are told apart by the rank that sends to them, so that its rows stay together.
        plan = plan_dispatch(
            slots_TK * num_ranks + transport.rank * is_real,
            self._mine_LS.shape[1] * num_ranks,
            transport,
            agreement=[("the epoch", epoch.number), ("the layer", module.layer)],
        )
        (stage,) = plan.stages
        sent_RD = x_TD.index_select(0, plan.source_R[: plan.num_sent])
        rows_RD = x_TD.new_empty((int(stage.counts_S.sum()), x_TD.shape[1]))
        rows_RD[stage.kept_position] = x_TD.index_select(0, plan.source_R[plan.num_sent :])
        if stage.route is not None:
            arrived_RD = transport.exchange(sent_RD, stage.route).wait()
            rows_RD[stage.arriving_position] = arrived_RD
        y_RD = self._run(module, rows_RD, stage.counts_S)
        kept_RD = y_RD.index_select(0, stage.kept_position)
        if stage.route is not None:
            leaving_RD = y_RD.index_select(0, stage.arriving_position)
            returned_RD = transport.exchange(leaving_RD, stage.route, reverse=True).wait()
            kept_RD = torch.cat((returned_RD, kept_RD))
        # Choices of no expert point after the last row.
        padded_RD = torch.cat((kept_RD, kept_RD.new_zeros((1, kept_RD.shape[1]))))
        return padded_RD.index_select(0, plan.place_TK.flatten().clamp(max=len(kept_RD)))

    def _run(self, module: SpreadModule, rows_RD: Tensor, counts_S: Tensor) -> Tensor:
        """Runs rows that are sorted by slot and sender through their experts."""
        out_RD = torch.empty_like(rows_RD)
        counts = counts_S.tolist()
        num_ranks = self.epoch.transport.size
        calls = [
            (
                self.pages.weights(
                    ExpertKey(module.layer, int(self._mine_LS[module.layer, place]))
                ),
                n,
            )
            for place, n in ((index // num_ranks, n) for index, n in enumerate(counts))
            if n
        ]
        if calls:
            rows = range(len(rows_RD))
            weights, sizes = zip(*calls, strict=True)
            expert_ffn(rows_RD, weights, sizes, rows, rows, out_RD, activation=module.activation)
        return out_RD


class SpreadModule(OffloadedExperts):
    """Replaces a model's experts on a rank of a changing group."""

    def __init__(
        self,
        experts: ExpertsModule,
        layer: int,
        spread: SpreadExperts,
        *,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(experts, layer, following=())
        self._spread = spread
        self._no_token = torch.empty((0, width), dtype=dtype)
        self._no_choice = torch.empty((0, 1), dtype=torch.int64)

    @property
    def activation(self) -> ExpertActivation:
        return self._activation

    def expert_outputs(
        self, hidden_TD: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """A collective call."""
        return self._spread.compute(self, hidden_TD, top_k_index)

    def serve_others(self) -> None:
        """Takes part in a call of the other ranks without a token of its own."""
        self._spread.compute(self, self._no_token, self._no_choice)


@dataclass(frozen=True, eq=False)
class SpreadModel:
    """A rank's model: of transformers, with experts in `modules`, layer by layer.

    Placements must be made for `signature`; `expert_form`, the types of the experts'
    matrices and a checksum of how they lie in pages, must be equal on all ranks.
    """

    model: PreTrainedModel
    modules: tuple[SpreadModule, ...]
    spread: SpreadExperts
    signature: ModelSignature
    ends: frozenset[int]
    expert_form: str

    def serve_others(self) -> None:
        """Takes part in one forward pass of other ranks."""
        for module in self.modules:
            module.serve_others()


def load_spread_model(path_or_id: str | Path, *, dtype: str | torch.dtype = "auto") -> SpreadModel:
    """Loads everything but the routed experts, on the CPU."""
    checkpoint = open_checkpoint(path_or_id, dtype)
    model = build_on_meta(checkpoint)
    set_up_libraries(checkpoint.dtype)
    experts = map_experts(model, checkpoint)
    if len({module.num_experts for module in experts.modules}) > 1:
        raise UnsupportedModelError(
            f"{checkpoint.config.model_type}: layers with different numbers of experts cannot be "
            "spread over ranks yet"
        )
    signature = signature_of(checkpoint, experts)
    spread = SpreadExperts(ExpertPages(experts), signature.num_layers, signature.num_experts)
    modules = replace_experts(
        model,
        experts,
        lambda module, layer: SpreadModule(
            module, layer, spread, width=_width(experts, layer), dtype=checkpoint.dtype
        ),
    )
    finish_dense(model, checkpoint, experts, torch.device("cpu"))
    pages = [(key, layout.form) for key, layout in sorted(experts.layouts.items())]
    described = repr((experts.matrices, experts.packings, pages)).encode()
    return SpreadModel(
        model=model,
        modules=tuple(modules),
        spread=spread,
        signature=signature,
        ends=frozenset(end_token_ids(model)),
        expert_form=f"{' and '.join(experts.type_names)} (layout {zlib.crc32(described):08x})",
    )


def _width(experts: ExpertMap, layer: int) -> int:
    """D: columns of the matrix that an expert multiplies its rows by."""
    packing = experts.packings[layer].get("up")
    if packing is not None:
        return packing.num_cols
    layout = experts.layouts[ExpertKey(layer, 0)]
    return layout.tensors[experts.matrices[layer].index("up")].shape[1]
