"""Routed experts spread over ranks whose number changes, without a changed bit.

Every rank computes a row by the calls that one process with all experts would make: the rows of one
rank for one expert are a call of their own, however many ranks send rows to that expert, and the
sum over a token's experts is formed on the token's own rank. Therefore neither the number of ranks
nor the placement nor what the other ranks compute meanwhile changes a result.

Shape suffixes: T tokens, D model, K choices, R rows, S slots of a rank, P ranks, L layers, E
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertsModule
from moe_runtime.inference.expert_layer import GateFunction, OffloadedExperts
from moe_runtime.kernels.expert_mlp import ActivationName, expert_ffn
from moe_runtime.parallel import Transport
from moe_runtime.parallel.plan import plan_dispatch
from moe_runtime.policies.placement import Placement
from moe_runtime.research.elastic.pages import ExpertPages
from moe_runtime.types import ExpertKey


def keys_of(placement: Placement, rank: int) -> set[ExpertKey]:
    """The experts of all layers that a rank holds under a placement."""
    return {
        ExpertKey(layer, expert)
        for layer in range(placement.num_layers)
        for expert in placement.holds(layer, rank)
    }


def slots_used_by(placement: Placement, rank: int) -> np.ndarray:
    """``[L, E + 1]``: the slot that a rank sends the rows of each expert to.

    Its own slot where it has one, else one of the replicas, another one for the next rank. All rows
    that a rank sends to an expert go to the same replica: how many rows an expert computes at once
    may decide by which kernel, and so must not depend on the placement. The last column, for
    choices of no expert, is one behind the last slot.
    """
    slots_LEC = placement.slots_of_expert
    is_own = (slots_LEC >= 0) & (slots_LEC // placement.slots_per_gpu == rank)
    turn_LE = np.where(is_own.any(axis=2), is_own.argmax(axis=2), rank % placement.copies)
    used_LE = np.take_along_axis(slots_LEC, turn_LE[:, :, None], axis=2)[:, :, 0]
    return np.pad(used_LE, ((0, 0), (0, 1)), constant_values=placement.num_slots)


@dataclass(frozen=True, eq=False)
class Epoch:
    """The ranks and the placement between two changes.

    Attributes:
        number: counts the changes.
        transport: the ranks.
        placement: the experts of all layers on them.
    """

    number: int
    transport: Transport
    placement: Placement


class SpreadExperts:
    """One rank's part in computing the routed experts of all layers.

    Attributes:
        pages: the experts that are here.
        loads_LE: ``[L, E]`` int64, how often tokens of this rank chose each expert.
    """

    def __init__(self, pages: ExpertPages, num_layers: int, num_experts: int) -> None:
        """Starts outside of any epoch; ``enter`` comes first."""
        self.pages = pages
        self.loads_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._epoch: Epoch | None = None

    @property
    def epoch(self) -> Epoch:
        """The epoch that this rank is in."""
        assert self._epoch is not None, "enter() comes first"
        return self._epoch

    def enter(self, epoch: Epoch, arrivals: Mapping[ExpertKey, Tensor]) -> None:
        """Goes over to another epoch, between two passes.

        Args:
            epoch: the next one.
            arrivals: pages that came for it.

        Raises:
            ValueError: an expert of this rank has not arrived.
        """
        transport, placement = epoch.transport, epoch.placement
        self.pages.switch_epoch(keys_of(placement, transport.rank), arrivals)
        self._epoch = epoch
        ranks_LPS = placement.expert_of_slot.reshape(placement.num_layers, transport.size, -1)
        self._mine_LS = ranks_LPS[:, transport.rank]
        self._slots_LE = torch.from_numpy(slots_used_by(placement, transport.rank))

    def leave(self) -> None:
        """Goes out of the group: no expert stays here."""
        self.pages.switch_epoch((), {})
        self._epoch = None

    def compute(self, module: SpreadModule, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        """The outputs of the experts for each choice of this rank's tokens; a collective call.

        Args:
            module: the layer.
            x_TD: ``[T, D]``; T may be 0, and differ between ranks.
            ids_TK: ``[T, K]`` experts; ids of no expert give rows of zeros.

        Returns:
            ``[T * K, D]``.

        Raises:
            RankFailureError: a rank died, stalled, or is at another layer.
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
        # Choices of no expert point behind the last row.
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
    """The module that stands where a model had its experts, on a rank of a changing group."""

    def __init__(
        self,
        experts: ExpertsModule,
        layer: int,
        spread: SpreadExperts,
        *,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """Takes a module's place; see ``OffloadedExperts``.

        Args:
            experts: the module to replace.
            layer: its index among the layers with experts.
            spread: this rank's part.
            width: D.
            dtype: of the hidden states.
        """
        super().__init__(experts, layer, following=())
        self._spread = spread
        self._no_token = torch.empty((0, width), dtype=dtype)
        self._no_choice = torch.empty((0, 1), dtype=torch.int64)

    @property
    def activation(self) -> ActivationName | GateFunction:
        """What an expert does between its products."""
        return self._activation

    def expert_rows(self, hidden_TD: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See ``OffloadedExperts``; a collective call."""
        return self._spread.compute(self, hidden_TD, top_k_index)

    def serve_others(self) -> None:
        """Takes part in a call of the other ranks without a token of its own."""
        self._spread.compute(self, self._no_token, self._no_choice)
