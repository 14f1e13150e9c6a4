"""What placements are made from: how often experts were used, together with what, and when.

Legend: B windows of history, T tokens, L layers, K experts a token visits, E experts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingProfile:
    """Counts over a stretch of routing.

    Attributes:
        loads_BLE: ``[B, L, E]`` float64, tokens of each expert in each window of time.
        transitions_LEE: ``[L - 1, E, E]`` float64, entry ``[l, i, j]`` counts the tokens that
            visited expert i in layer l and expert j in layer l + 1. Zeros where only loads are
            known.

    Raises:
        ValueError: shapes that do not belong together, or counts that are negative or not finite.
    """

    loads_BLE: np.ndarray
    transitions_LEE: np.ndarray

    def __post_init__(self) -> None:
        for name in ("loads_BLE", "transitions_LEE"):
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if value.size and not (np.isfinite(value).all() and value.min() >= 0):
                raise ValueError(f"{name} must be finite and not negative")
            object.__setattr__(self, name, value)
        if self.loads_BLE.ndim != 3 or 0 in self.loads_BLE.shape:
            raise ValueError(
                f"loads_BLE must be [windows, layers, experts], none of them 0, "
                f"got shape {self.loads_BLE.shape}"
            )
        expected = (self.num_layers - 1, self.num_experts, self.num_experts)
        if self.transitions_LEE.shape != expected:
            raise ValueError(
                f"transitions_LEE must have shape {expected}, got {self.transitions_LEE.shape}"
            )

    @property
    def num_layers(self) -> int:
        """L."""
        return self.loads_BLE.shape[1]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.loads_BLE.shape[2]

    @cached_property
    def loads_LE(self) -> np.ndarray:
        """``[L, E]`` tokens of each expert over all windows."""
        return self.loads_BLE.sum(axis=0)

    @classmethod
    def from_loads(cls, loads_LE: np.ndarray) -> "RoutingProfile":
        """A profile of running counts ``[L, E]`` alone."""
        loads = np.asarray(loads_LE, dtype=np.float64)
        if loads.ndim != 2:
            raise ValueError(f"loads_LE must be [layers, experts], got shape {loads.shape}")
        num_layers, num_experts = loads.shape
        transitions = np.zeros((max(0, num_layers - 1), num_experts, num_experts))
        return cls(loads_BLE=loads[None], transitions_LEE=transitions)

    @classmethod
    def from_ids(
        cls, ids_TLK: np.ndarray, num_experts: int, *, num_windows: int = 32
    ) -> "RoutingProfile":
        """Counts a recorded stretch of routing.

        Args:
            ids_TLK: ``[T, L, K]`` experts of each token in order of time; an id outside
                ``[0, num_experts)`` is a slot that was not used.
            num_experts: E.
            num_windows: stretches of equal length that the loads are counted in; fewer when there
                are fewer tokens.

        Raises:
            ValueError: the shape is wrong or there is no token.
        """
        ids = np.asarray(ids_TLK)
        if ids.ndim != 3 or 0 in ids.shape:
            raise ValueError(f"ids_TLK must be [tokens, layers, k], none 0, got shape {ids.shape}")
        loads = [
            count_experts(part, num_experts)
            for part in np.array_split(ids, min(num_windows, len(ids)))
        ]
        return cls(loads_BLE=np.stack(loads), transitions_LEE=count_transitions(ids, num_experts))


def count_experts(ids_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """``[L, E]`` tokens of each expert; ids outside ``[0, num_experts)`` are left out."""
    num_layers = ids_TLK.shape[1]
    ids = ids_TLK.astype(np.int64)
    is_real = (ids >= 0) & (ids < num_experts)
    flat = (ids + np.arange(num_layers)[:, None] * num_experts)[is_real]
    counts = np.bincount(flat, minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)


def count_transitions(ids_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """``[L - 1, E, E]`` tokens that visit expert i in a layer and expert j in the next.

    A token with K experts in both layers counts K * K times.
    """
    _, num_layers, top_k = ids_TLK.shape
    transitions = np.zeros((num_layers - 1, num_experts, num_experts))
    for layer in range(num_layers - 1):
        here = np.repeat(ids_TLK[:, layer].astype(np.int64), top_k, axis=1)
        there = np.tile(ids_TLK[:, layer + 1].astype(np.int64), top_k)
        is_real = (here >= 0) & (here < num_experts) & (there >= 0) & (there < num_experts)
        pairs = (here * num_experts + there)[is_real]
        counts = np.bincount(pairs, minlength=num_experts**2)
        transitions[layer] = counts.reshape(num_experts, num_experts)
    return transitions
