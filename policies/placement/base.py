"""A placement, the routing it is made from, and the contract of a placement policy.

Legend: B windows of history, T tokens, L Mixture-of-Experts layers, K experts a token visits, E
experts, S physical slots, G devices ("GPUs", or ranks), C copies of the most replicated expert.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

EMPTY = -1  # the content of a slot that holds no expert


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingProfile:
    """Counts over a stretch of routing."""

    loads_BLE: np.ndarray  # ``[B, L, E]`` float64, tokens of each expert in each window of time
    # ``[L - 1, E, E]`` float64, entry ``[l, i, j]`` counts the tokens that visited expert i in
    # layer l and expert j in layer l + 1. Zeros where only loads are known.
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
        return self.loads_BLE.shape[1]

    @property
    def num_experts(self) -> int:
        return self.loads_BLE.shape[2]

    @cached_property
    def loads_LE(self) -> np.ndarray:
        """``[L, E]`` tokens of each expert over all windows."""
        return self.loads_BLE.sum(axis=0)

    @classmethod
    def from_loads(cls, loads_LE: np.ndarray) -> "RoutingProfile":
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
            ids_TLK: ``[T, L, K]`` experts of each token in order of time; an id outside ``[0,
                num_experts)`` is a slot that was not used.
        """
        ids = np.asarray(ids_TLK)
        if ids.ndim != 3 or 0 in ids.shape:
            raise ValueError(f"ids_TLK must be [tokens, layers, k], none 0, got shape {ids.shape}")
        loads = [
            count_by_layer(part.astype(np.int64).swapaxes(0, 1), num_experts)
            for part in np.array_split(ids, min(num_windows, len(ids)))
        ]
        return cls(loads_BLE=np.stack(loads), transitions_LEE=count_transitions(ids, num_experts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """The machines that experts are spread over."""

    num_nodes: int  # machines; devices of one machine talk to each other over the fast link
    gpus_per_node: int  # devices (ranks) of each machine

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def node_of(self, gpus: npt.ArrayLike) -> np.ndarray:
        return np.asarray(gpus) // self.gpus_per_node


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Which expert lies in which physical slot, for every layer.

    Slots are numbered device by device: slot ``s`` lies on device ``s // slots_per_gpu``. An expert
    in several slots has replicas. Logical ids, router columns and checkpoints never change.
    """

    expert_of_slot: np.ndarray  # ``[L, S]`` int64, an expert or ``EMPTY``
    num_experts: int
    num_gpus: int

    def __post_init__(self) -> None:
        slots = np.ascontiguousarray(self.expert_of_slot, dtype=np.int64)
        if slots.ndim != 2:
            raise ValueError(f"expert_of_slot must be [layers, slots], got shape {slots.shape}")
        if self.num_gpus < 1 or slots.shape[1] % self.num_gpus:
            raise ValueError(f"{slots.shape[1]} slots do not divide among {self.num_gpus} devices")
        if slots.size and (slots.min() < EMPTY or slots.max() >= self.num_experts):
            raise ValueError(
                f"slots must hold experts in [0, {self.num_experts}) or {EMPTY}, "
                f"got {slots.min()} to {slots.max()}"
            )
        slots.setflags(write=False)
        object.__setattr__(self, "expert_of_slot", slots)
        layer, expert = np.nonzero(self.copies == 0)
        if layer.size:
            raise ValueError(
                f"every expert needs a slot: expert {expert[0]} of layer {layer[0]} has none"
            )

    @property
    def num_layers(self) -> int:
        return self.expert_of_slot.shape[0]

    @property
    def num_slots(self) -> int:
        return self.expert_of_slot.shape[1]

    @property
    def slots_per_gpu(self) -> int:
        return self.num_slots // self.num_gpus

    @property
    def gpu_of_slot(self) -> np.ndarray:
        """``[S]`` device of each slot."""
        return np.arange(self.num_slots) // self.slots_per_gpu

    @cached_property
    def copies(self) -> np.ndarray:
        """``[L, E]`` number of slots that hold each expert."""
        return count_by_layer(self.expert_of_slot, self.num_experts)

    @cached_property
    def slots_of_expert(self) -> np.ndarray:
        """``[L, E, C]`` slots of each expert in ascending order, padded with -1."""
        num_layers, num_slots = self.expert_of_slot.shape
        table = np.full((num_layers, self.num_experts, max(1, int(self.copies.max()))), -1)
        order = np.argsort(self.expert_of_slot, axis=1, kind="stable")
        experts = np.take_along_axis(self.expert_of_slot, order, axis=1)
        first = np.cumsum(self.copies, axis=1) - self.copies
        num_empty = num_slots - self.copies.sum(axis=1, keepdims=True)
        ordinal = (
            np.arange(num_slots)
            - num_empty
            - np.take_along_axis(first, np.maximum(experts, 0), axis=1)
        )
        layer, column = np.nonzero(experts != EMPTY)
        table[layer, experts[layer, column], ordinal[layer, column]] = order[layer, column]
        return table

    def holds(self, layer: int, gpu: int) -> set[int]:
        first = gpu * self.slots_per_gpu
        content = self.expert_of_slot[layer, first : first + self.slots_per_gpu]
        return set(content[content != EMPTY].tolist())


class PlacementPolicy(Protocol):
    """Turns recorded routing into a placement."""

    def __call__(
        self, profile: RoutingProfile, devices: Devices, *, num_replicas: int
    ) -> Placement:
        """Places the experts."""
        ...


def count_by_layer(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Counts each expert in each row of ``[L, ...]`` ids; ids out of range are left out.

    Returns:
        ``[L, E]`` int64.
    """
    rows = ids.reshape(len(ids), -1)
    is_real = (rows >= 0) & (rows < num_experts)
    flat = (rows + np.arange(len(ids))[:, None] * num_experts)[is_real]
    return np.bincount(flat, minlength=len(ids) * num_experts).reshape(len(ids), num_experts)


def slots_needed(num_experts: int, num_replicas: int, num_gpus: int) -> int:
    if num_replicas < 0:
        raise ValueError(f"num_replicas must not be negative, got {num_replicas}")
    most = num_experts * (num_gpus - 1)
    if num_replicas > most:
        raise ValueError(
            f"{num_replicas} replicas are more than {num_gpus} devices have a use for: with "
            f"{most}, every device holds each of the {num_experts} experts"
        )
    each, rest = divmod(num_experts + num_replicas, num_gpus)
    if rest:
        raise ValueError(
            f"{num_experts} experts and {num_replicas} replicas do not divide among {num_gpus} "
            f"devices; {num_replicas + num_gpus - rest} replicas would"
        )
    return each


def count_transitions(ids_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """``[L - 1, E, E]`` tokens that visit expert i in a layer and expert j in the next."""
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
