"""Sweeps of the layer simulator over ranks, degrees and placements; machines in TOML."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moe_runtime.config import nearest
from moe_runtime.files import read_toml, write_text
from moe_runtime.lab.simulate.layer_simulation import (
    LayerPrediction,
    LayerSchedule,
    LayerWorkload,
    predict_layer,
)
from moe_runtime.parallel.cluster import Cluster, Link
from moe_runtime.policies.placement import Devices, Placement, RoutingProfile, place_experts

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
}
_LINKS = ("intra", "inter")
_LINK_KEYS = {"alpha_s", "bytes_per_s", "occupies_compute"}
NO_OVERLAP = LayerSchedule()
"""One flat all-to-all each way and nothing beside it: what exposed communication is compared to."""


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
    """What makes ranks unequal."""

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
    _check_numbers(value, _RATES | set(_LINKS), "machine", path)
    missing = {"ranks_per_node", "flops_per_s", *_LINKS} - set(value)
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(sorted(missing))}")
    links = {}
    for name in _LINKS:
        link = _check_numbers(value[name], _LINK_KEYS, name, path)
        if not {"alpha_s", "bytes_per_s"} <= set(link):
            raise ValueError(f"{path}: [{name}] needs alpha_s and bytes_per_s")
        links[name] = Link(**link)
    rest = {key: item for key, item in value.items() if key not in links}
    return Cluster(num_ranks=1, **rest, **links)


def write_machine(cluster: Cluster, path: str | os.PathLike[str], remark: str) -> None:
    """Writes a machine that ``read_machine`` reads; the remark says where the numbers are from."""
    lines = [f"# {line}" for line in remark.splitlines()]
    rates = {name: getattr(cluster, name) for name in sorted(_RATES)}
    lines += [f"{name} = {value!r}" for name, value in rates.items() if value is not None]
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


def _check_numbers(
    table: Any, known: set[str], where: str, path: str | os.PathLike[str]
) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{path}: [{where}] must be a table")
    for key, item in table.items():
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}: {nearest(key, known)}")
        is_flag = key == "occupies_compute"
        if key in _LINKS:
            continue
        if isinstance(item, bool) != is_flag or not isinstance(item, int | float):
            raise ValueError(f"{path}: {key} is {item!r}, expected a number")
    return table
