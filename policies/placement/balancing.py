"""Balanced placements without replicas: round robin, greedy, and anti-correlation.

The last two are those of "Towards MoE Deployment" (arXiv 2303.06182): heaviest expert first, each
to the device that is lightest, or lightest once correlated load is counted as load.
"""

import numpy as np

from moe_runtime.policies.placement.base import Devices, Placement, slots_needed
from moe_runtime.policies.placement.packing import pack
from moe_runtime.policies.placement.profile import RoutingProfile


class RoundRobin:
    """Consecutive experts on each device: what runs without a map; replicas repeat the experts."""

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        """Places without looking at the profile's counts."""
        each = slots_needed(profile.num_experts, num_replicas, devices.num_gpus)
        slots = np.arange(each * devices.num_gpus) % profile.num_experts
        return _without_replicas(np.tile(slots, (profile.num_layers, 1)), profile, devices)


class Greedy:
    """Heaviest expert first, each to the lightest device that has a free slot."""

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        """Places by the loads of the whole profile."""
        _refuse_replicas("greedy", num_replicas)
        slots_needed(profile.num_experts, 0, devices.num_gpus)
        packs = pack(profile.loads_LE, devices.num_gpus)
        return _without_replicas(packs.reshape(profile.num_layers, -1), profile, devices)


class AntiCorrelation:
    """Greedy that keeps experts apart whose loads rise and fall together.

    The load of a device, seen by the expert to be placed, is the sum over its experts of their mean
    load plus ``weight`` times their correlation with the newcomer over the windows of history.
    Loads are in multiples of a layer's mean load, so that ``weight`` means the same for 8 experts
    and for 512 (the paper's text does not say in which unit it adds the two).

    Args:
        weight: how much a correlation of 1 weighs beside a mean load; the paper's is 0.5.
    """

    def __init__(self, *, weight: float = 0.5) -> None:
        self._weight = weight

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        """Places by the profile's loads over its windows; one window alone makes it greedy."""
        _refuse_replicas("anti-correlation", num_replicas)
        each = slots_needed(profile.num_experts, 0, devices.num_gpus)
        shares = window_shares(profile.loads_BLE)
        rows = [
            self._place_layer(shares[:, layer], devices.num_gpus, each)
            for layer in range(profile.num_layers)
        ]
        return _without_replicas(np.stack(rows), profile, devices)

    def _place_layer(self, shares_BE: np.ndarray, num_gpus: int, room: int) -> np.ndarray:
        num_experts = shares_BE.shape[1]
        mean = shares_BE.mean(axis=0) * num_experts
        correlation = correlate(shares_BE)
        held: list[list[int]] = [[] for _ in range(num_gpus)]
        for expert in np.argsort(-mean, kind="stable").tolist():
            seen = mean + self._weight * correlation[expert]
            loads = [seen[pack].sum() if len(pack) < room else np.inf for pack in held]
            held[int(np.argmin(loads))].append(expert)
        return np.array(held).reshape(-1)


def window_shares(loads_BLE: np.ndarray) -> np.ndarray:
    """``[B, L, E]`` share of its window's tokens that each expert got; 0 in an empty window."""
    totals = loads_BLE.sum(axis=2, keepdims=True)
    return np.divide(loads_BLE, totals, out=np.zeros_like(loads_BLE), where=totals > 0)


def correlate(series_BE: np.ndarray) -> np.ndarray:
    """``[E, E]`` Pearson correlation of the columns; 0 for a column that never changes."""
    centred = series_BE - series_BE.mean(axis=0)
    norms = np.sqrt((centred**2).sum(axis=0))
    unit = np.divide(centred, norms, out=np.zeros_like(centred), where=norms > 1e-12)
    return unit.T @ unit


def _refuse_replicas(name: str, num_replicas: int) -> None:
    if num_replicas:
        raise ValueError(f"{name} makes no replicas, got {num_replicas}; eplb does")


def _without_replicas(slots: np.ndarray, profile: RoutingProfile, devices: Devices) -> Placement:
    return Placement(
        expert_of_slot=slots, num_experts=profile.num_experts, num_gpus=devices.num_gpus
    )
