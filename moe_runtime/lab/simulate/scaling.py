"""Predicts the time of one expert-parallel layer, by ranks, degrees, placements; machines in TOML.

A layer is all-to-all, experts, all-to-all, in chunks. Every rank is a processor (or shares one) and
two links: within its machine, and to others. A collective starts on a rank when all ranks that take
part have got there.

Legend: P ranks, N machines, M ranks of a machine (P = N * M).
"""

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moe_runtime.config import nearest
from moe_runtime.files import read_toml, write_text
from moe_runtime.parallel.cluster import Cluster, Link
from moe_runtime.policies.placement import Devices, Placement, RoutingProfile, place_experts

FREE = -1
"""The resource of tasks that occupy none: joins, delays."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SimulatedTimeline:
    start_s: np.ndarray
    finish_s: np.ndarray
    resource: np.ndarray

    @property
    def makespan_s(self) -> float:
        """End of the last task."""
        return float(self.finish_s.max(initial=0.0))

    def busy_s(self, resource: int) -> float:
        """Seconds that a resource worked."""
        mine = self.resource == resource
        return float((self.finish_s[mine] - self.start_s[mine]).sum())


@dataclass(slots=True)
class TaskGraph:
    """Tasks, what they wait for, and what they occupy."""

    _durations: list[float] = field(default_factory=list)
    _resources: list[int] = field(default_factory=list)
    _waiting_for: list[int] = field(default_factory=list)
    _followers: list[list[int]] = field(default_factory=list)

    def add(self, duration_s: float, *, resource: int = FREE, after: Iterable[int] = ()) -> int:
        """Adds a task and returns its number."""
        number = len(self._durations)
        if not duration_s >= 0:
            raise ValueError(f"a task takes at least 0 seconds, got {duration_s}")
        self._durations.append(duration_s)
        self._resources.append(resource)
        self._followers.append([])
        count = 0
        for earlier in after:
            if not 0 <= earlier < number:
                raise ValueError(f"task {number} would wait for task {earlier}, which is not there")
            self._followers[earlier].append(number)
            count += 1
        self._waiting_for.append(count)
        return number

    def run(self) -> SimulatedTimeline:
        """Runs all tasks as early as order and resources allow."""
        count = len(self._durations)
        start, finish = [0.0] * count, [0.0] * count
        waiting = list(self._waiting_for)
        ready = [0.0] * count
        free_at = [0.0] * (max(self._resources, default=FREE) + 1)
        # Tasks leave the heap in the order in which they become ready, so a resource has taken
        # exactly the tasks that came to it earlier.
        heap = [(0.0, task) for task in range(count) if waiting[task] == 0]
        while heap:
            time, task = heapq.heappop(heap)
            resource = self._resources[task]
            begin = time if resource == FREE else max(time, free_at[resource])
            end = begin + self._durations[task]
            start[task], finish[task] = begin, end
            if resource != FREE:
                free_at[resource] = end
            for follower in self._followers[task]:
                ready[follower] = max(ready[follower], end)
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(heap, (ready[follower], follower))
        return SimulatedTimeline(
            start_s=np.array(start),
            finish_s=np.array(finish),
            resource=np.array(self._resources, dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LayerWorkload:
    """Work of one layer.

    Attributes:
        rows_PP: ``[P, P]`` rows (token copies) that each rank sends to each.
        slowdown_P: ``[P]`` factor on each rank's compute time; stragglers have more than 1.
        weights_s_P: ``[P]`` seconds in which each rank reads its experts' weights, which its
            computation takes at least; in ``degree`` parts as the rows.
    """

    rows_PP: np.ndarray
    row_bytes: float
    flops_per_row: float
    gate_s: float = 0.0
    shared_s: float = 0.0
    slowdown_P: np.ndarray | None = None
    weights_s_P: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSchedule:
    degree: int = 1
    hierarchical: bool = False
    is_local_first: bool = False
    is_shared_first: bool = False

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"degree must be at least 1, got {self.degree}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPrediction:
    layer_s: float
    compute_s: float
    exposed_s: float
    communication_s: float


def predict_layer(
    cluster: Cluster, workload: LayerWorkload, schedule: LayerSchedule
) -> LayerPrediction:
    """Simulates one layer on all ranks."""
    shape = (cluster.num_ranks, cluster.num_ranks)
    if workload.rows_PP.shape != shape:
        raise ValueError(f"rows_PP must have shape {shape}, got {workload.rows_PP.shape}")
    graph, links = _layer_graph(cluster, workload, schedule)
    timeline = graph.run()
    nothing = Link(alpha_s=0.0, bytes_per_s=float("inf"))
    free, _ = _layer_graph(replace(cluster, intra=nothing, inter=nothing), workload, schedule)
    compute_s = free.run().makespan_s
    busy = np.bincount(
        timeline.resource[links], weights=(timeline.finish_s - timeline.start_s)[links]
    )
    return LayerPrediction(
        layer_s=timeline.makespan_s,
        compute_s=compute_s,
        exposed_s=timeline.makespan_s - compute_s,
        communication_s=float(busy.max(initial=0.0)),
    )


@dataclass(frozen=True, slots=True)
class _Phase:
    """One exchange: seconds of each rank on its link, and which ranks take part together."""

    seconds_P: np.ndarray
    groups: np.ndarray
    is_inter: bool


def _phases(
    cluster: Cluster, rows_PP: np.ndarray, row_bytes: float, hierarchical: bool
) -> list[list[_Phase]]:
    """Stages of an all-to-all; the phases of a stage use different links at the same time."""
    num_nodes, local = cluster.num_nodes, cluster.local_ranks
    blocks = rows_PP.reshape(num_nodes, local, num_nodes, local)
    diagonal = np.einsum("iajb->iab" if num_nodes == 1 else "iaib->iab", blocks)
    own = np.einsum("iaa->ia", diagonal).reshape(-1)
    everybody = np.zeros(cluster.num_ranks, dtype=np.int64)
    nodes = np.repeat(np.arange(num_nodes), local)
    if not hierarchical or num_nodes == 1:
        sent, received = rows_PP.sum(axis=1), rows_PP.sum(axis=0)
        near = np.maximum(diagonal.sum(axis=2), diagonal.sum(axis=1)).reshape(-1) - own
        far = np.maximum(
            sent - diagonal.sum(axis=2).reshape(-1), received - diagonal.sum(axis=1).reshape(-1)
        )
        stage = []
        if local > 1:
            seconds = cluster.intra.seconds(local - 1, near * row_bytes)
            stage.append(_Phase(seconds, everybody, False))
        if num_nodes > 1:
            messages = cluster.num_ranks - local
            stage.append(_Phase(cluster.inter.seconds(messages, far * row_bytes), everybody, True))
        return [stage]
    # Within the machine, rows go to the rank that has the local number of their destination.
    regrouped = blocks.sum(axis=2)
    kept = np.einsum("iaa->ia", regrouped)
    near = np.maximum(regrouped.sum(axis=2), regrouped.sum(axis=1)) - kept
    # Between machines, from there to the same local number.
    carried = blocks.sum(axis=1)
    stay = np.einsum("iib->ib", carried)
    far = np.maximum(carried.sum(axis=1), carried.sum(axis=0)) - stay
    first = cluster.intra.seconds(local - 1, near.reshape(-1) * row_bytes)
    second = cluster.inter.seconds(num_nodes - 1, far.reshape(-1) * row_bytes)
    columns = np.tile(np.arange(local), num_nodes)
    return [[_Phase(first, nodes, False)], [_Phase(second, columns, True)]]


def _layer_graph(
    cluster: Cluster, workload: LayerWorkload, schedule: LayerSchedule
) -> tuple[TaskGraph, np.ndarray]:
    """The tasks of one layer, and the numbers of tasks that occupy links."""
    graph, links = TaskGraph(), []
    ranks = range(cluster.num_ranks)
    slow = np.ones(cluster.num_ranks) if workload.slowdown_P is None else workload.slowdown_P
    rows_PP = workload.rows_PP
    local_rows = np.diagonal(rows_PP).copy()
    received = rows_PP.sum(axis=0)
    remote = rows_PP - np.diag(local_rows) if schedule.is_local_first else rows_PP
    part = remote / schedule.degree

    processors = [cluster.processor_of(rank) for rank in ranks]
    gate = [graph.add(workload.gate_s * slow[rank], resource=processors[rank]) for rank in ranks]
    sort_s = _copy_s(cluster, workload, rows_PP.sum(axis=1)) * slow
    sort = [
        graph.add(sort_s[rank], resource=processors[rank], after=[gate[rank]]) for rank in ranks
    ]
    # Counts travel first: messages of a few bytes.
    counts = _phases(cluster, np.zeros_like(rows_PP), 0.0, schedule.hierarchical)
    arrived = _exchange(graph, cluster, counts, gate, links)
    ready = [graph.add(0.0, after=pair) for pair in zip(sort, arrived, strict=True)]

    done = list(ready)
    if schedule.is_shared_first:
        done = _compute(graph, processors, workload.shared_s * slow, gate, ready)
    if schedule.is_local_first:
        own_s = _expert_s(cluster, workload, local_rows) * slow
        done = _compute(graph, processors, own_s, ready, done)
    there = _phases(cluster, part, workload.row_bytes, schedule.hierarchical)
    back = _phases(cluster, part.T, workload.row_bytes, schedule.hierarchical)
    expert_s = _expert_s(cluster, workload, part.sum(axis=0)) * slow
    returned = []
    for _ in range(schedule.degree):
        arrived = _exchange(graph, cluster, there, ready, links)
        computed = _compute(graph, processors, expert_s, arrived, done)
        returned.append(_exchange(graph, cluster, back, computed, links))
    combine_s = _copy_s(cluster, workload, received) * slow
    shared_s = np.zeros(cluster.num_ranks) if schedule.is_shared_first else workload.shared_s * slow
    for rank in ranks:
        after = [chunk[rank] for chunk in returned] + [done[rank]]
        graph.add(combine_s[rank] + shared_s[rank], resource=processors[rank], after=after)
    return graph, np.array(links, dtype=np.int64)


def _exchange(
    graph: TaskGraph,
    cluster: Cluster,
    stages: list[list[_Phase]],
    ready: list[int],
    links: list[int],
) -> list[int]:
    """Adds a collective; returns the task of each rank after which it has everything."""
    for stage in stages:
        ends: list[list[int]] = [[] for _ in ready]
        for phase in stage:
            members: dict[int, list[int]] = {}
            for rank, group in enumerate(phase.groups.tolist()):
                members.setdefault(group, []).append(rank)
            link = cluster.inter if phase.is_inter else cluster.intra
            offset = cluster.num_ranks * (1 + phase.is_inter)
            for ranks in members.values():
                everyone = graph.add(0.0, resource=FREE, after=[ready[rank] for rank in ranks])
                for rank in ranks:
                    own = cluster.processor_of(rank) if link.occupies_compute else rank + offset
                    task = graph.add(float(phase.seconds_P[rank]), resource=own, after=[everyone])
                    links.append(task)
                    ends[rank].append(task)
        ready = [graph.add(0.0, after=[*tasks, ready[rank]]) for rank, tasks in enumerate(ends)]
    return ready


def _compute(
    graph: TaskGraph,
    processors: list[int],
    seconds_P: np.ndarray,
    ready: list[int],
    previous: list[int],
) -> list[int]:
    """Adds a computation on every rank, after its data and its previous computation."""
    return [
        graph.add(float(seconds_P[rank]), resource=processor, after={ready[rank], previous[rank]})
        for rank, processor in enumerate(processors)
    ]


def _expert_s(cluster: Cluster, workload: LayerWorkload, rows_P: np.ndarray) -> np.ndarray:
    compute_s = rows_P * workload.flops_per_row / cluster.flops_per_s
    if workload.weights_s_P is not None:
        compute_s = np.maximum(compute_s, workload.weights_s_P)
    return cluster.launch_s + compute_s


def _copy_s(cluster: Cluster, workload: LayerWorkload, rows_P: np.ndarray) -> np.ndarray:
    """Reading and writing each row once."""
    return 2 * rows_P * workload.row_bytes / cluster.copy_bytes_per_s


_COMPUTE, _LINK_THERE, _LINK_BACK = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortcutCosts:
    """Seconds of the parts of one block of ScMoE (Cai et al. 2024).

    The routed experts' input is an earlier representation, so their tokens or weights travel while
    the backbone computes: with the paper's position 2 the dense feed-forward, the next attention
    and the shared expert. The experts run between two of these operations, or before or after all
    of them; the rest of the backbone hides the way back.
    """

    backbone_s: tuple[float, ...]
    there_s: float
    experts_s: float
    back_s: float = 0.0

    def __post_init__(self) -> None:
        if min(*self.backbone_s, self.there_s, self.experts_s, self.back_s, 0.0) < 0:
            raise ValueError(f"times must not be negative, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortcutSchedule:
    position: int
    block_s: float
    exposed_s: float


def shortcut_schedules(costs: ShortcutCosts) -> list[ShortcutSchedule]:
    """Simulates every position of the experts, from before the backbone to after it."""
    compute_s = sum(costs.backbone_s) + costs.experts_s
    schedules = []
    for position in range(len(costs.backbone_s) + 1):
        graph = TaskGraph()
        there = graph.add(costs.there_s, resource=_LINK_THERE)
        before = _chain(graph, costs.backbone_s[:position], [])
        experts = graph.add(costs.experts_s, resource=_COMPUTE, after=[there, *before])
        graph.add(costs.back_s, resource=_LINK_BACK, after=[experts])
        _chain(graph, costs.backbone_s[position:], [experts])
        block_s = graph.run().makespan_s
        schedules.append(
            ShortcutSchedule(position=position, block_s=block_s, exposed_s=block_s - compute_s)
        )
    return schedules


def best_shortcut_schedule(costs: ShortcutCosts) -> ShortcutSchedule:
    """The one that takes the least time; the earliest among equals."""
    return min(shortcut_schedules(costs), key=lambda schedule: schedule.block_s)


def _chain(graph: TaskGraph, seconds: Sequence[float], after: list[int]) -> list[int]:
    """Adds computations one after another; returns the tasks to wait for."""
    for duration_s in seconds:
        after = [graph.add(duration_s, resource=_COMPUTE, after=after)]
    return after


ASSUMED = Cluster(
    num_ranks=1,
    ranks_per_node=8,
    flops_per_s=5e14,
    launch_s=1e-5,
    copy_bytes_per_s=3e12,
    intra=Link(alpha_s=2e-6, bytes_per_s=4e11),
    inter=Link(alpha_s=5e-6, bytes_per_s=5e10),
)
"""Round numbers of eight-GPU machines with one 400 Gb/s card a GPU; assumed, not measured."""

_RATES = {
    *("ranks_per_node", "processors_per_node"),
    *("flops_per_s", "launch_s", "copy_bytes_per_s"),
    *("memory_bytes", "memory_bytes_per_s", "disk_bytes_per_s", "host_bytes_per_s"),
}
_LINKS = ("intra", "inter")
_LINK_KEYS = {"alpha_s", "bytes_per_s", "occupies_compute"}
NO_OVERLAP = LayerSchedule()
"""One flat all-to-all each way without overlap: the base of the exposed ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedLayer:
    """One layer of a model, and how many tokens each rank brings."""

    tokens_per_rank: int = 8192
    model_dim: int = 4096
    expert_hidden: int = 14336
    top_k: int = 2
    experts_per_rank: int = 4
    shared_hidden: int = 0
    bytes_per_number: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """Sources of imbalance between ranks."""

    zipf: float = 0.0
    algorithm: str = "round-robin"
    replicas_per_rank: int = 0
    straggler: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    num_ranks: int
    hierarchical: bool
    degree: int
    balancedness: float
    prediction: LayerPrediction
    exposed_ratio: float


def sweep_scaling(
    cluster: Cluster,
    shape: SimulatedLayer,
    imbalance: Imbalance,
    *,
    ranks: Sequence[int],
    degrees: Sequence[int],
    place: Callable[..., Placement] = place_experts,
    on_point: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[ScalingPoint]:
    """Simulates every number of ranks, flat and hierarchical, at every degree."""
    variants = [(flag, degree) for flag in (False, True) for degree in degrees]
    done, total = 0, len(ranks) * len(variants)
    for num_ranks in ranks:
        machine = replace(cluster, num_ranks=num_ranks)
        shares = rank_shares(machine, shape, imbalance, place)
        workload = _workload(machine, shape, imbalance, shares)
        plain = predict_layer(machine, workload, NO_OVERLAP)
        for hierarchical, degree in variants:
            schedule = LayerSchedule(
                degree=degree,
                hierarchical=hierarchical,
                is_local_first=degree > 1,
                is_shared_first=degree > 1,
            )
            prediction = predict_layer(machine, workload, schedule)
            yield ScalingPoint(
                num_ranks=num_ranks,
                hierarchical=hierarchical,
                degree=degree,
                balancedness=float(shares.mean() / shares.max()),
                prediction=prediction,
                exposed_ratio=prediction.exposed_s / plain.exposed_s if plain.exposed_s else 0.0,
            )
            done += 1
            on_point(done, total)


def rank_shares(
    cluster: Cluster,
    shape: SimulatedLayer,
    imbalance: Imbalance,
    place: Callable[..., Placement] = place_experts,
) -> np.ndarray:
    """``[P]`` load of each rank: Zipf loads of experts in random order, placed as asked."""
    loads = expert_loads(cluster.num_ranks * shape.experts_per_rank, imbalance)
    replicas = imbalance.replicas_per_rank * cluster.num_ranks
    placement = placed(cluster, loads, imbalance.algorithm, replicas, place)
    per_copy = loads / placement.copies[0]
    slots = placement.expert_of_slot[0]
    return np.bincount(placement.gpu_of_slot, weights=per_copy[slots], minlength=cluster.num_ranks)


def expert_loads(num_experts: int, imbalance: Imbalance) -> np.ndarray:
    """``[E]`` Zipf loads in random order."""
    random = np.random.default_rng(imbalance.seed)
    loads = np.arange(1, num_experts + 1, dtype=np.float64) ** -imbalance.zipf
    return random.permutation(loads)


def placed(
    cluster: Cluster,
    loads_E: np.ndarray,
    algorithm: str,
    num_replicas: int,
    place: Callable[..., Placement],
) -> Placement:
    """The experts of a layer on the ranks."""
    devices = Devices(num_nodes=cluster.num_nodes, gpus_per_node=cluster.local_ranks)
    profile = RoutingProfile.from_loads(loads_E[None])
    return place(algorithm, profile, devices, num_replicas=num_replicas)


def _workload(
    cluster: Cluster, shape: SimulatedLayer, imbalance: Imbalance, shares_P: np.ndarray
) -> LayerWorkload:
    """Equal tokens on all ranks, sent to ranks by their share of the load."""
    slowdown = np.ones(cluster.num_ranks)
    slowdown[0] = imbalance.straggler
    rows_P = shape.tokens_per_rank * shape.top_k * shares_P / shares_P.sum()
    shared_flops = 6.0 * shape.tokens_per_rank * shape.model_dim * shape.shared_hidden
    return LayerWorkload(
        rows_PP=np.broadcast_to(rows_P, (len(rows_P),) * 2),
        row_bytes=shape.model_dim * shape.bytes_per_number,
        flops_per_row=6.0 * shape.model_dim * shape.expert_hidden,
        shared_s=shared_flops / cluster.flops_per_s,
        slowdown_P=slowdown,
    )


def read_machine(path: str | os.PathLike[str]) -> Cluster:
    """Reads a machine; its number of ranks is 1 and to be replaced."""
    value = read_toml(path)
    tables = {name: value.pop(name) for name in _LINKS if name in value}
    check_numbers(value, _RATES, {"ranks_per_node", "flops_per_s"}, path)
    if missing := set(_LINKS) - tables.keys():
        raise ValueError(f"{path}: lacks {', '.join(sorted(missing))}")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: [{name}] must be a table")
        check_numbers(table, _LINK_KEYS, {"alpha_s", "bytes_per_s"}, f"{path}, [{name}]")
    intra, inter = (Link(**tables[name]) for name in _LINKS)
    return Cluster(num_ranks=1, intra=intra, inter=inter, **value)


def write_machine(cluster: Cluster, path: str | os.PathLike[str], remark: str) -> None:
    """Writes a machine that ``read_machine`` reads; the remark says where the numbers are from."""
    lines = [f"# {line}" for line in remark.splitlines()]
    rates = {name: getattr(cluster, name) for name in sorted(_RATES)}
    known = {name: value for name, value in rates.items() if value not in (None, float("inf"))}
    lines += [f"{name} = {value!r}" for name, value in known.items()]
    for name in _LINKS:
        link: Link = getattr(cluster, name)
        lines += [
            "",
            f"[{name}]",
            f"alpha_s = {link.alpha_s!r}",
            f"bytes_per_s = {link.bytes_per_s!r}",
            f"occupies_compute = {str(link.occupies_compute).lower()}",
        ]
    write_text(path, "\n".join([*lines, ""]))


def check_numbers(table: dict[str, Any], known: set[str], needed: set[str], place: object) -> None:
    """Refuses a TOML table that lacks a key, or has unknown keys or values other than numbers."""
    for key, item in table.items():
        if key not in known:
            raise ValueError(f"{place}: unknown key {key!r}: {nearest(key, known)}")
        is_flag = key == "occupies_compute"
        if isinstance(item, bool) != is_flag or not isinstance(item, int | float):
            raise ValueError(f"{place}: {key} is {item!r}, expected a number")
    if missing := needed - table.keys():
        raise ValueError(f"{place}: lacks {', '.join(sorted(missing))}")
