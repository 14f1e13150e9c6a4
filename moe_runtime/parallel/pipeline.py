"""A layer's experts over a group, with communication hidden behind computation.

Rows that stay are computed first, while the others travel (Comet); rows for other ranks are cut
into chunks, so that one is computed while the next arrives (Tutel, without padding). Results may
return in panels of columns (Comet's second product). Only the order in which weight gradients are
summed depends on it. Autograd runs the same schedule backwards.

Shape suffixes: T tokens, D model, R rows, S slots, P columns of a panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.op import resolve_activation
from moe_runtime.kernels.expert_mlp.reference import apply_activation
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.operands import Activation
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.parallel.dispatching import Dispatch, Group, Returning
from moe_runtime.parallel.rows import tie_rows
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.routing import Routing


@runtime_checkable
class PanelExperts(Protocol):
    """A rank's experts, whose outputs come panel by panel."""

    def panels(self, rows_RD: Tensor, counts_S: Tensor, num_panels: int) -> Iterator[Tensor]:
        """`[R, columns of the panel]`, the leftmost first, each computed when it is asked for."""
        ...


class StackedPanels:
    """Experts in stacked parameters, panel by panel."""

    def __init__(self, experts: StackedExperts, activation: Activation) -> None:
        self._experts = experts
        self._activation = resolve_activation(activation)

    def panels(self, rows_RD: Tensor, counts_S: Tensor, num_panels: int) -> Iterator[Tensor]:
        experts = self._experts
        if not 1 <= num_panels <= experts.dim_model:
            raise ValueError(f"panels must be in 1..{experts.dim_model}, got {num_panels}")
        offsets = pad(counts_S.cumsum(0), (1, 0))
        transposed = experts.is_transposed
        z_RZ = grouped_gemm(
            rows_RD,
            experts.gate_up,
            offsets,
            bias_SN=experts.gate_up_bias,
            is_transposed=transposed,
        )
        hidden_RF = apply_activation(z_RZ, experts.layout, self._activation)
        # Cut once, so that the gradients of all panels are put together once.
        downs = experts.down.tensor_split(num_panels, dim=2 if transposed else 1)
        biases: tuple[Tensor | None, ...] = (None,) * num_panels
        if experts.down_bias is not None:
            biases = experts.down_bias.tensor_split(num_panels, dim=1)
        for down, bias in zip(downs, biases, strict=True):
            yield grouped_gemm(hidden_RF, down, offsets, bias_SN=bias, is_transposed=transposed)


ExpertsFn = Callable[[Tensor, Tensor], Tensor]
"""`(rows_RD, counts_S) -> y_RD`: this rank's experts on rows sorted by slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How much of the communication is hidden.

    Attributes:
        degree: chunks into which the rows for other ranks are cut; 1, 2, 4 or 8 are usual.
        is_local_first: computes the rows that stay while the others travel. Reads the weights of an
            expert once more; worth it unless there are few rows.
        panels: groups of columns in which results are computed and returned; more than one needs
            experts that can (`PanelExperts`).
    """

    degree: int = 1
    is_local_first: bool = True
    panels: int = 1

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"degree must be at least 1, got {self.degree}")
        if self.panels < 1:
            raise ValueError(f"panels must be at least 1, got {self.panels}")


def expert_parallel(
    x_TD: Tensor,
    routing: Routing,
    experts: ExpertsFn | PanelExperts,
    group: Group | None = None,
    *,
    slots: ExpertSlots | None = None,
    overlap: Overlap | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    parameters: Sequence[Tensor] = (),
    wire: WireName = "exact",
) -> Tensor:
    """Routed (and shared) experts of one layer, spread over a group: `[T, D]`.

    A collective call; `x_TD`, `routing`, `group`, `slots`, `wire` and errors as of `dispatch`.

    Args:
        experts: This rank's experts. Called once for each stage, also with no rows at all.
        overlap: How communication is hidden.
        shared: Experts that every token visits, whose output is added; computed while the first
            rows travel.
        parameters: What `experts` reads and is to get gradients: a rank without rows then takes
            part in the backward pass too. Needed where `x` needs no gradients, and for what an
            exchange brought (gathered slices, copies).
    """
    overlap = overlap or Overlap()
    batch = Dispatch(
        x_TD,
        routing,
        group,
        slots=slots,
        num_chunks=overlap.degree,
        is_local_first=overlap.is_local_first,
        num_panels=overlap.panels,
        wire=wire,
    )
    stages = batch.plan.stages
    returning: list[list[Returning]] = [[] for _ in range(overlap.panels)]
    num_started = 0
    shared_TD = None
    for index, stage in enumerate(stages):
        # The next stage travels while this one is computed.
        while num_started < min(index + 2, len(stages)):
            batch.start(num_started)
            num_started += 1
        if index == 0 and shared is not None:
            shared_TD = shared(x_TD)
        rows_RD = batch.arrive(index)
        for panel, y_RP in enumerate(_results(experts, rows_RD, stage.counts_S, overlap.panels)):
            if rows_RD.shape[0] == 0:
                y_RP = tie_rows(y_RP, *parameters)
            returning[panel].append(batch.send_back(index, y_RP, panel))
    panels = [batch.sum_up(parts, panel) for panel, parts in enumerate(returning)]
    y_TD = panels[0] if len(panels) == 1 else torch.cat(panels, dim=1)
    return y_TD if shared_TD is None else y_TD + shared_TD


def _results(
    experts: ExpertsFn | PanelExperts, rows_RD: Tensor, counts_S: Tensor, num_panels: int
) -> Iterator[Tensor]:
    if isinstance(experts, PanelExperts):
        yield from experts.panels(rows_RD, counts_S, num_panels)
    elif num_panels == 1:
        yield experts(rows_RD, counts_S)
    else:
        raise ValueError(
            f"{num_panels} panels need experts that compute columns apart, such as StackedPanels; "
            "a function gives all at once"
        )
