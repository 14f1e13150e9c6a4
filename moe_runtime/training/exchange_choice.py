"""The choice of "auto" in `[parallel]`: an exchange of rows, by measured links and loads.

At the start the processes time exchanges and products. Then a pass through a layer is simulated
with each exchange (`lab/simulate/scaling.py`): with equal loads at first, later with the loads of
the last steps.

Shape suffixes: E experts, P ranks, R rows, D model, S slots.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_runtime.kernels.expert_mlp import StackedExperts, grouped_expert_mlp
from moe_runtime.kernels.operands import Activation
from moe_runtime.lab.simulate.scaling import LayerSchedule, LayerWorkload, predict_layer
from moe_runtime.layer.experts import Experts
from moe_runtime.parallel import (
    ExpertSlots,
    FlatTransport,
    HierarchicalTransport,
    LayoutGroups,
    Overlap,
    ParallelExperts,
    Rebalancer,
    Transport,
    measure_link,
)
from moe_runtime.parallel.cluster import Cluster, Link, fit_link
from moe_runtime.parallel.parallel_experts import MoveCosts, rank_loads, replace_tensors

if TYPE_CHECKING:
    from moe_runtime.models.lm.model import LanguageModel
    from moe_runtime.parallel.communication.wire import WireName
    from moe_runtime.training.ranks import OneRank
    from moe_runtime.training.run_config import ParallelConfig, Precision, TrainConfig

DEGREES = (1, 2, 4, 8)
_CLEARLY = 0.99
"""Another exchange must take less than this share of the time of the one in use."""
_BACKWARD = 1.5
"""Mean products of a forward and a backward pass, in those of a forward pass."""
_STATES = 3
"""A weight and its moments move together."""
_ROWS, _REPEATS = (32, 512), 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedLayerShape:
    """A layer of experts.

    Attributes:
        rows: of a process in a pass, one for each choice of a token.
        expert_numbers: weights of an expert.
        number_bytes: of a weight.
    """

    rows: int
    row_bytes: int
    num_experts: int
    expert_numbers: int
    number_bytes: int = 4

    @property
    def expert_bytes(self) -> int:
        return self.expert_numbers * self.number_bytes

    @property
    def flops_per_row(self) -> float:
        return _BACKWARD * 2 * self.expert_numbers


class ExchangeChoice:
    """Times of a layer by exchange and loads, on a cluster.

    Args:
        schedules: to choose from, the simplest first.
    """

    def __init__(
        self, cluster: Cluster, shape: RoutedLayerShape, schedules: Sequence[LayerSchedule]
    ) -> None:
        self.cluster, self.shape, self.schedules = cluster, shape, list(schedules)

    def layer_s(self, loads_P: np.ndarray, schedule: LayerSchedule) -> float:
        """Seconds of a pass in which ranks get rows in proportion to their loads."""
        shape = self.shape
        rows_P = shape.rows * np.asarray(loads_P) / max(np.sum(loads_P), 1)
        workload = LayerWorkload(
            rows_PP=np.broadcast_to(rows_P, (len(rows_P),) * 2),
            row_bytes=shape.row_bytes,
            flops_per_row=shape.flops_per_row,
        )
        return predict_layer(self.cluster, workload, schedule).layer_s

    def best(self, loads_P: np.ndarray, current: LayerSchedule | None = None) -> LayerSchedule:
        found = current or self.schedules[0]
        least = self.layer_s(loads_P, found)
        for schedule in self.schedules:
            if (seconds := self.layer_s(loads_P, schedule)) < _CLEARLY * least:
                found, least = schedule, seconds
        return found

    def gather_s(self) -> float:
        """Seconds of a pass in which every rank gathers all experts and sends no rows."""
        size, local = self.cluster.num_ranks, self.cluster.local_ranks
        own_bytes = self.shape.expert_bytes * self.shape.num_experts / size
        inside_s = self.cluster.intra.seconds(local - 1, (local - 1) * own_bytes)
        across_s = self.cluster.inter.seconds(size - local, (size - local) * own_bytes)
        products_s = self.shape.rows * self.shape.flops_per_row / self.cluster.flops_per_s
        return max(float(inside_s), float(across_s)) + self.cluster.launch_s + products_s

    @property
    def gathers(self) -> bool:
        """Whether gathering experts is faster than sending rows with equal loads."""
        equal = np.ones(self.cluster.num_ranks)
        return self.gather_s() < _CLEARLY * self.layer_s(equal, self.best(equal))

    def saved_s(self, loads_E: np.ndarray, before: ExpertSlots, after: ExpertSlots) -> float:
        """Seconds that a pass saves with other slots."""
        both = [rank_loads(loads_E, slots) for slots in (before, after)]
        old_s, new_s = (self.layer_s(loads_P, self.best(loads_P)) for loads_P in both)
        return old_s - new_s

    def move_s(self, transfers: int) -> float:
        size = self.cluster.num_ranks
        link = self.cluster.inter if self.cluster.num_nodes > 1 else self.cluster.intra
        return float(link.seconds(size - 1, transfers * self.shape.expert_bytes * _STATES / size))


@dataclass(frozen=True, slots=True)
class SecondsOfMoves:
    """`MoveCosts` of a layer; forward and backward `passes` until the next check."""

    choice: ExchangeChoice
    passes: float

    def gain(self, loads_E: np.ndarray, before: ExpertSlots, after: ExpertSlots) -> float:
        return self.passes * self.choice.saved_s(loads_E, before, after)

    def cost(self, num_transfers: int) -> float:
        return self.choice.move_s(num_transfers)


class NoMoves:
    """`MoveCosts` of experts that stay, but whose loads are counted."""

    def gain(self, loads_E: np.ndarray, before: ExpertSlots, after: ExpertSlots) -> float:
        del loads_E, before, after
        return 0.0

    def cost(self, num_transfers: int) -> float:
        return float(num_transfers)


def schedules_of(own: ParallelConfig, *, has_machines: bool) -> list[LayerSchedule]:
    """The schedules that a run may choose from, the simplest first."""
    ways = (own.transport == "hierarchical",)
    if own.transport == "auto":
        ways = (False, True) if has_machines else (False,)
    degrees = DEGREES if own.overlap == "auto" else (own.overlap,)
    return [
        LayerSchedule(degree=degree, hierarchical=way, is_local_first=True, is_shared_first=True)
        for way in ways
        for degree in degrees
    ]


def row_bytes(columns: int, wire: WireName, precision: Precision) -> int:
    """Bytes of a row in transfer, the mean of both directions."""
    exact = 2.0 if precision == "bfloat16" else 4.0
    fp8 = (1 + 4 / 128 + 2) / 2  # with a scale for 128 columns; results are bf16
    return round(columns * {"exact": exact, "bf16": 2.0, "fp8": fp8}[wire])


class AutoExchange:
    """The exchanges of a run's layers, chosen at the start and again when loads change.

    Args:
        model: with its whole experts; the call is collective.
        groups: with groups of machines, if there are several.
        can_gather: switching experts can be made.

    Attributes:
        resolved: the configuration of `[parallel]` without "auto".
        ranks_per_node: processes of a machine for the layers' groups; 1 if one transport serves the
            whole run.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        groups: LayoutGroups,
        ranks: OneRank,
        *,
        can_gather: bool,
    ) -> None:
        own, data = config.parallel, config.data
        self._own, self._steps = own, 0
        # forward and backward, until the next check
        self._passes = 2 * data.micro_batches // ranks.num_data_ranks * own.rebalance_every
        self._choice: ExchangeChoice | None = None
        self._transports: dict[bool, Transport] = {}
        self._experts: list[ParallelExperts] = []
        self._counters: list[Rebalancer] = []
        degree = 1 if own.overlap == "auto" else own.overlap
        self._schedule = LayerSchedule(degree=degree, hierarchical=own.transport == "hierarchical")
        layer = next(iter(model.routed_layers()), None)
        places, self._counts = own.experts, False
        if groups.experts is not None and layer is not None:
            experts = layer.experts
            assert isinstance(experts, Experts), "they are spread later"
            measured, self._transports = measure_cluster(groups, experts)
            # the first rank's, as all processes must move the same experts
            first = json.loads(ranks.texts(json.dumps(asdict(measured)))[0])
            intra, inter = (Link(**first.pop(name)) for name in ("intra", "inter"))
            tokens = data.tokens_per_step // data.micro_batches // (own.tp * own.cp)
            shape = RoutedLayerShape(
                rows=tokens * layer.gate.top_k,
                row_bytes=row_bytes(experts.hidden_size, own.wire, config.run.precision),
                num_experts=experts.num_experts,
                expert_numbers=sum(p[0].numel() for p in experts.parameters()),
                number_bytes=experts.down_proj.element_size(),
            )
            schedules = schedules_of(own, has_machines=True in self._transports)
            self._choice = ExchangeChoice(
                Cluster(intra=intra, inter=inter, **first), shape, schedules
            )
            self._schedule = self._choice.best(np.ones(measured.num_ranks))
            size = measured.num_ranks
            is_plain = own.wire == "exact" and own.transport != "panels" and not experts.recompute
            can_gather = can_gather and is_plain and not config.run.compile
            can_gather = can_gather and not (shape.num_experts % size and size % shape.num_experts)
            # only experts that move have copies
            can_gather = (
                can_gather and not own.copies and own.etp == max(1, size // shape.num_experts)
            )
            can_move = config.may_move(size)
            self._counts = can_move and places in ("static", "rebalanced", "auto")
            if places == "auto":
                places = "rebalanced" if can_move else "static"
                if can_gather and self._choice.gathers:
                    places, self._counts = "switching", False
        elif places == "auto":
            places = "static"
        may_group = self._counts or self._schedule.hierarchical
        self.ranks_per_node = groups.ranks_per_node if may_group else 1
        self.resolved = own.resolved(self._schedule.degree, self._schedule.hierarchical, places)

    def __str__(self) -> str:
        own = self.resolved
        way = "hierarchical" if self._schedule.hierarchical else own.transport
        return f"rows travel {way}, overlap {self._schedule.degree}; experts are {own.experts}"

    def follow(self, experts: Sequence[ParallelExperts], groups: LayoutGroups) -> list[Rebalancer]:
        """Sets the exchanges of layers, and returns the rebalancers that count their loads."""
        self._experts = list(experts)
        self._set()
        costs: MoveCosts | None = NoMoves()
        if self.resolved.experts == "rebalanced":
            costs = None
            if self._own.experts == "auto" and self._choice is not None:
                costs = SecondsOfMoves(self._choice, self._passes)
        self._counters = [
            Rebalancer(
                one,
                every=self._own.rebalance_every,
                num_replicas=self.resolved.copies,
                groups=groups,
                costs=costs,
            )
            for one in (self._experts if self._counts else ())
        ]
        return self._counters

    def step(self) -> None:
        """After a step of the rebalancers: changes the exchange if the loads require it."""
        self._steps += 1
        if self._choice is None or not self._counters or self._steps % self._own.rebalance_every:
            return
        loads = [
            rank_loads(counter.counted_E, one.slots)
            for counter, one in zip(self._counters, self._experts, strict=True)
        ]
        self._schedule = self._choice.best(np.sum(loads, axis=0), self._schedule)
        self._set()

    def _set(self) -> None:
        if self._choice is None or "auto" not in (self._own.transport, self._own.overlap):
            return  # a process with all experts sends no rows
        for experts in self._experts:
            experts.transport = self._transports[self._schedule.hierarchical]
            experts.overlap = Overlap(degree=self._schedule.degree)


def measure_cluster(
    groups: LayoutGroups, experts: Experts
) -> tuple[Cluster, dict[bool, Transport]]:
    """Times links and products; a collective call.

    Args:
        experts: all of a layer; as many as a rank has are timed.

    Returns:
        The cluster, and the transports by whether they are hierarchical.
    """
    assert groups.experts is not None, "several processes divide the experts"
    device = experts.down_proj.device
    flat = FlatTransport(groups.experts, timeout_s=groups.timeout_s)
    transports: dict[bool, Transport] = {False: flat}
    intra = inter = measure_link(flat, device=device)
    each = flat.size
    if groups.ranks_per_node > 1:
        each = groups.ranks_per_node
        grid = groups.experts_transport
        assert isinstance(grid, HierarchicalTransport), "make_nodes was called"
        transports[True] = grid
        intra, inter = (measure_link(part, device=device) for part in grid.parts())
    of_cpu = device.type == "cpu"  # exchanges occupy it
    intra, inter = (replace(link, occupies_compute=of_cpu) for link in (intra, inter))
    whole = experts.stacked()
    here = max(1, experts.num_experts // flat.size)
    own = replace_tensors(whole, [None if t is None else t[:here] for t in whole.tensors()])
    times = [_product_s(own, count, experts.activation.spec) for count in _ROWS]
    own_PN = torch.tensor([round(1e9 * seconds) for seconds in times]).expand(flat.size, -1)
    slowest = flat.exchange_numbers(own_PN.contiguous()).amax(dim=0).tolist()
    flops = [2 * count * sum(p[:here].numel() for p in experts.parameters()) for count in _ROWS]
    rate = fit_link(flops, [1e-9 * seconds for seconds in slowest])
    found = Cluster(
        num_ranks=flat.size, ranks_per_node=each, intra=intra, inter=inter,
        flops_per_s=rate.bytes_per_s, launch_s=rate.alpha_s,
    )  # fmt: skip
    return found, transports


@torch.no_grad()
def _product_s(experts: StackedExperts, rows: int, activation: Activation) -> float:
    """Median seconds of the products of experts with equally many rows."""
    counts_S = torch.full((len(experts.down),), rows, device=experts.device)
    shape = (rows * len(experts.down), experts.dim_model)
    rows_RD = torch.ones(shape, device=experts.device, dtype=experts.down.dtype)
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        out = grouped_expert_mlp(rows_RD, counts_S, experts, activation=activation)
        if out.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
