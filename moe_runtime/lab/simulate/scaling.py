"""Sweeps of the layer simulator: ranks, chunking degrees, hierarchy, placements, stragglers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.lab.simulate.layer_simulation import (
    LayerPrediction,
    LayerSchedule,
    LayerWorkload,
    predict_layer,
)
from moe_runtime.parallel.cluster import Cluster
from moe_runtime.planning.placement import place_experts
from moe_runtime.policies.placement import Devices, Placement, RoutingProfile

NO_OVERLAP = LayerSchedule()
"""One flat all-to-all each way and nothing beside it: what exposed communication is compared to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedLayer:
    """One layer of a model, and how many tokens each rank brings.

    Attributes:
        tokens_per_rank: tokens of each rank.
        model_dim: width of the model.
        expert_hidden: hidden width of an expert (gated: three matrices).
        top_k: experts of each token.
        experts_per_rank: experts that each rank owns; the model grows with the ranks.
        shared_hidden: hidden width of shared experts together; 0 without.
        bytes_per_number: of rows on the wire.
    """

    tokens_per_rank: int = 8192
    model_dim: int = 4096
    expert_hidden: int = 14336
    top_k: int = 2
    experts_per_rank: int = 4
    shared_hidden: int = 0
    bytes_per_number: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """What makes ranks unequal.

    Attributes:
        zipf: exponent of the experts' loads; 0 is equal loads.
        algorithm: placement, a name that ``place`` of `sweep_scaling` knows.
        replicas_per_rank: slots of each rank for second copies.
        straggler: factor on the compute time of rank 0; 1 is none.
        seed: of the order of the loads.
    """

    zipf: float = 0.0
    algorithm: str = "round-robin"
    replicas_per_rank: int = 0
    straggler: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One simulated layer.

    Attributes:
        num_ranks: ranks.
        hierarchical: two-level all-to-all.
        degree: chunks.
        balancedness: mean over largest load of the ranks.
        prediction: simulated times.
        exposed_ratio: exposed communication over that of one flat all-to-all without overlap.
    """

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
    """Simulates every number of ranks, flat and hierarchical, at every degree.

    Args:
        cluster: links and compute; its number of ranks is replaced.
        shape: the layer.
        imbalance: loads, placement and stragglers.
        ranks: numbers of ranks.
        degrees: numbers of chunks. Above 1, rows that stay and shared experts go first.
        place: `planning.placement.place_experts`, or one that knows more algorithms.
        on_point: called with points done and in total.
    """
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
    num_experts = cluster.num_ranks * shape.experts_per_rank
    random = np.random.default_rng(imbalance.seed)
    loads = np.arange(1, num_experts + 1, dtype=np.float64) ** -imbalance.zipf
    loads = random.permutation(loads)
    devices = Devices(num_nodes=cluster.num_nodes, gpus_per_node=cluster.local_ranks)
    placement = place(
        imbalance.algorithm,
        RoutingProfile.from_loads(loads[None]),
        devices,
        num_replicas=imbalance.replicas_per_rank * cluster.num_ranks,
    )
    per_copy = loads / placement.copies[0]
    slots = placement.expert_of_slot[0]
    return np.bincount(placement.gpu_of_slot, weights=per_copy[slots], minlength=cluster.num_ranks)


def _workload(
    cluster: Cluster, shape: SimulatedLayer, imbalance: Imbalance, shares_P: np.ndarray
) -> LayerWorkload:
    slowdown = np.ones(cluster.num_ranks)
    slowdown[0] = imbalance.straggler
    return LayerWorkload.from_shares(
        shares_P,
        tokens_per_rank=shape.tokens_per_rank,
        top_k=shape.top_k,
        model_dim=shape.model_dim,
        expert_hidden=shape.expert_hidden,
        bytes_per_number=shape.bytes_per_number,
        shared_hidden=shape.shared_hidden,
        flops_per_s=cluster.flops_per_s,
        slowdown_P=slowdown,
    )
