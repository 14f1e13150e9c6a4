"""The placement map, a JSON file of the expert in each slot of each rank, and moves between maps.

`moe-runtime place` writes it, docs/placement.md describes it. It is refused for any other model.

Shape suffixes: L layers, E experts, G devices (ranks).
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moe_runtime.digests import digest
from moe_runtime.errors import CheckpointError, blamed_on, named_failure
from moe_runtime.files import read_bounded, write_text
from moe_runtime.policies.placement import EMPTY, Devices, Placement
from moe_runtime.types import ModelSignature

Rename = Literal["none", "devices", "layers"]
"""Which devices may change roles to save transfers. ``devices``: the same exchange in all layers,
which changes neither balance nor hops. ``layers``: each layer on its own, which keeps the balance
but not the hops. Nodes change roles as a whole, devices within their node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One expert that a slot needs and does not hold.

    `source_slot` is of the old placement, the same for all copies on a device. A move is local
    where the target's device holds the expert already, or gets it for another of its slots.
    """

    layer: int
    expert: int
    source_slot: int
    target_slot: int
    is_local: bool


def keep_in_place(
    old: Placement, new: Placement, devices: Devices, *, rename: Rename = "none"
) -> Placement:
    """Arranges a placement so that as many experts as possible keep their slot.

    Args:
        old: the loaded placement.
        new: the wanted one, for the same layers and experts.
        devices: nodes and devices of `new`.
        rename: which devices may change roles (an assignment problem).

    Raises:
        ValueError: the placements are of different models, or renaming between different numbers of
            devices.
    """
    _check_same_model(old, new)
    slots = new.expert_of_slot.copy()
    if rename != "none":
        if old.num_gpus != new.num_gpus:
            raise ValueError(
                f"devices can be renamed between equally many, got {old.num_gpus} and "
                f"{new.num_gpus}; use rename='none'"
            )
        missing = np.stack([_missing(old, new, layer) for layer in range(new.num_layers)])
        if rename == "devices":
            missing = np.broadcast_to(missing.sum(axis=0), missing.shape)
        for layer in range(new.num_layers):
            order = _cheapest_roles(missing[layer], devices)
            slots[layer] = slots[layer].reshape(new.num_gpus, -1)[order].reshape(-1)
    rows, old_rows = slots.reshape(new.num_layers, new.num_gpus, -1), _rows(old)
    for layer in range(new.num_layers):
        for gpu in range(min(old.num_gpus, new.num_gpus)):
            rows[layer, gpu] = _arrange(old_rows[layer, gpu].tolist(), rows[layer, gpu].tolist())
    return Placement(expert_of_slot=slots, num_experts=new.num_experts, num_gpus=new.num_gpus)


def moves_between(old: Placement, new: Placement, devices: Devices) -> list[Move]:
    """The copies that lead from one placement to the other.

    Each expert comes from its own device where there is a copy, else from the same node, else from
    another one; among equals, from the device that has been asked least. `devices` are those of the
    larger placement.
    """
    _check_same_model(old, new)
    asked = np.zeros(max(old.num_gpus, new.num_gpus), dtype=np.int64)
    old_rows = _rows(old)

    def distance(slot: int, gpu: int) -> tuple[int, int, int]:
        source = slot // old.slots_per_gpu
        is_far = devices.node_of(source) != devices.node_of(gpu)
        return (0 if source == gpu else 1 + int(is_far), int(asked[source]), slot)

    moves = []
    for layer in range(new.num_layers):
        arrived: dict[tuple[int, int], int] = {}
        for target, expert in enumerate(new.expert_of_slot[layer].tolist()):
            gpu, place = divmod(target, new.slots_per_gpu)
            was_there = gpu < old.num_gpus and place < old.slots_per_gpu
            if expert == EMPTY or (was_there and old_rows[layer, gpu, place] == expert):
                continue
            is_local = (gpu, expert) in arrived
            if not is_local:
                sources = old.slots_of_expert[layer, expert]
                arrived[gpu, expert] = min(
                    sources[sources >= 0].tolist(), key=lambda slot: distance(slot, gpu)
                )
            source = arrived[gpu, expert]
            source_gpu = source // old.slots_per_gpu
            is_local = is_local or source_gpu == gpu
            asked[source_gpu] += not is_local
            moves.append(
                Move(
                    layer=layer,
                    expert=expert,
                    source_slot=source,
                    target_slot=target,
                    is_local=is_local,
                )
            )
    return moves


def resize(placement: Placement, num_gpus: int, loads_LE: np.ndarray | None = None) -> Placement:
    """ElasticMoE's remap: the same experts on more or fewer ranks, with the fewest transfers.

    Experts move off ranks beyond `num_gpus`; then every rank holds the same number of experts, give
    or take one. Among the ways that move least, loads `[L, E]` (equal by default) even out.
    """
    if num_gpus < 1:
        raise ValueError(f"num_gpus must be at least 1, got {num_gpus}")
    shape = (placement.num_layers, placement.num_experts)
    loads = np.ones(shape) if loads_LE is None else np.asarray(loads_LE, dtype=np.float64)
    if loads.shape != shape:
        raise ValueError(f"loads_LE must have shape {shape}, got {loads.shape}")
    layers = [
        resize_layer(
            [[expert for expert in held if expert != EMPTY] for held in row],
            num_gpus,
            (loads[layer] / placement.copies[layer]).tolist(),
        )
        for layer, row in enumerate(_rows(placement).tolist())
    ]
    width = max(len(held) for ranks in layers for held in ranks)
    slots = [
        [expert for held in ranks for expert in held + [EMPTY] * (width - len(held))]
        for ranks in layers
    ]
    resized = Placement(
        expert_of_slot=np.array(slots), num_experts=placement.num_experts, num_gpus=num_gpus
    )
    return keep_in_place(placement, resized, Devices(num_nodes=1, gpus_per_node=num_gpus))


def resize_layer(
    ranks: Sequence[Sequence[int]], num_gpus: int, loads_E: Sequence[float]
) -> list[list[int]]:
    """`resize` for the experts of one layer on each rank."""
    kept = [list(held) for held in ranks[:num_gpus]]
    kept += [[] for _ in range(num_gpus - len(kept))]
    present = {expert for held in kept for expert in held}
    pool = sorted({e for held in ranks[num_gpus:] for e in held} - present)
    # Equal shares; ranks that hold most get the remainder, so that least moves.
    each, rest = divmod(sum(map(len, kept)) + len(pool), num_gpus)
    fullest = sorted(range(num_gpus), key=lambda rank: (-len(kept[rank]), rank))[:rest]
    quotas = [each + (rank in fullest) for rank in range(num_gpus)]
    target = sum(loads_E[e] for held in (*kept, pool) for e in held) / num_gpus
    for held, quota in zip(kept, quotas, strict=True):
        while len(held) > quota:
            surplus = (sum(loads_E[e] for e in held) - target) / (len(held) - quota)
            given = min(held, key=lambda e: (abs(loads_E[e] - surplus), e))
            held.remove(given)
            pool.append(given)
    for expert in sorted(pool, key=lambda e: (-loads_E[e], e)):
        open_ranks = [r for r in range(num_gpus) if len(kept[r]) < quotas[r]]
        # Two copies on one rank are useless, unless there is no other room.
        fresh = [r for r in open_ranks if expert not in kept[r]] or open_ranks
        lightest = min(fresh, key=lambda r: (sum(loads_E[e] for e in kept[r]), r))
        kept[lightest].append(expert)
    return kept


def _rows(placement: Placement) -> np.ndarray:
    """``[L, G, S / G]`` the expert in each slot of each device."""
    return placement.expert_of_slot.reshape(placement.num_layers, placement.num_gpus, -1)


def _missing(old: Placement, new: Placement, layer: int) -> np.ndarray:
    """``[G, G]`` experts that device g lacks to take the role of the new placement's device h."""
    held = [old.holds(layer, gpu) for gpu in range(old.num_gpus)]
    wanted = [new.holds(layer, gpu) for gpu in range(new.num_gpus)]
    return np.array([[len(want - have) for want in wanted] for have in held], dtype=np.float64)


def _cheapest_roles(missing_GG: np.ndarray, devices: Devices) -> np.ndarray:
    """``[G]`` role of each device: nodes as a whole, devices within; exact by nesting."""
    from scipy.optimize import linear_sum_assignment

    num_nodes, each = devices.num_nodes, devices.gpus_per_node
    blocks = missing_GG.reshape(num_nodes, each, num_nodes, each)
    inner = np.empty((num_nodes, num_nodes, each), dtype=np.int64)
    cost = np.empty((num_nodes, num_nodes))
    for node in range(num_nodes):
        for other in range(num_nodes):
            rows, inner[node, other] = linear_sum_assignment(blocks[node, :, other])
            cost[node, other] = blocks[node, rows, other, inner[node, other]].sum()
    nodes, others = linear_sum_assignment(cost)
    return (others[:, None] * each + inner[nodes, others]).reshape(-1)


def _arrange(held: list[int], wanted: list[int]) -> list[int]:
    """The wanted experts, each that is held already in its slot, the others in the rest."""
    rest = list(wanted)
    arranged: list[int | None] = [None] * len(wanted)
    for place, expert in enumerate(held[: len(wanted)]):
        if expert != EMPTY and expert in rest:
            arranged[place] = expert
            rest.remove(expert)
    # Real experts before empty slots, so that the result depends on nothing but the contents.
    rest.sort(key=lambda expert: (expert == EMPTY, expert))
    return [rest.pop(0) if expert is None else expert for expert in arranged]


def _check_same_model(old: Placement, new: Placement) -> None:
    sizes = [(p.num_layers, p.num_experts) for p in (old, new)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"placements of different models: {sizes[0][0]} layers of {sizes[0][1]} experts and "
            f"{sizes[1][0]} layers of {sizes[1][1]}"
        )


MAP_FORMAT = "moe-runtime-placement"
MAP_VERSION = 1

_MAX_BYTES = 64 << 20
_KEYS = {"format", "version", "signature", "algorithm", "num_nodes", "gpus_per_node", "layers"}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PlacementMap:
    """A placement `[L, S]`, the model it is for, and the devices (ranks) it is for.

    Raises:
        ValueError: placement and signature or devices contradict each other.
    """

    signature: ModelSignature
    devices: Devices
    placement: Placement
    algorithm: str

    def __post_init__(self) -> None:
        found = (self.placement.num_layers, self.placement.num_experts, self.placement.num_gpus)
        expected = (self.signature.num_layers, self.signature.num_experts, self.devices.num_gpus)
        if found != expected:
            raise ValueError(
                f"the placement has {found[0]} layers of {found[1]} experts on {found[2]} devices, "
                f"model and machine have {expected[0]}, {expected[1]} and {expected[2]}"
            )

    def experts_of_ranks(self, layer: int) -> list[list[int]]:
        """For every rank, the expert in each of its slots of a layer; -1 for an empty slot."""
        return _rows(self.placement)[layer].tolist()

    def require(self, signature: ModelSignature, *, num_ranks: int | None = None) -> None:
        """Refuses a map of another model or of another number of ranks.

        Raises:
            CheckpointError: they differ; the message names both.
        """
        if self.signature != signature:
            raise CheckpointError(
                f"the placement map is of another model: made for {_describe(self.signature)}, "
                f"used with {_describe(signature)}"
            )
        if num_ranks is not None and num_ranks != self.devices.num_gpus:
            raise CheckpointError(
                f"the placement map is for {self.devices.num_gpus} ranks, there are {num_ranks}; "
                "make one with `moe-runtime place`"
            )

    def update(self, new: "PlacementMap", *, rename: Rename = "none") -> "MapUpdate":
        """The fewest moves that lead from this map to another one of the same model."""
        new.require(self.signature)
        larger = max(self.devices, new.devices, key=lambda devices: devices.num_gpus)
        kept = keep_in_place(self.placement, new.placement, new.devices, rename=rename)
        return MapUpdate(
            target=dataclasses.replace(new, placement=kept),
            moves=tuple(moves_between(self.placement, kept, larger)),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; it appears under its name only when it is complete."""
        head = {
            "format": MAP_FORMAT,
            "version": MAP_VERSION,
            "signature": dataclasses.asdict(self.signature),
            "algorithm": self.algorithm,
            "num_nodes": self.devices.num_nodes,
            "gpus_per_node": self.devices.gpus_per_node,
        }
        rows = _rows(self.placement).tolist()
        head["digest"] = _digest({**head, "layers": rows})
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        # One line a layer, one list a rank: the file is read by people and compared by diff.
        body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        text = "\n".join(["{", *lines, '  "layers": [', body, "  ]", "}", ""])
        with named_failure(path, "placement map"):
            write_text(path, text)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MapUpdate:
    """Moves from one map to another; in `target`, experts that stay keep their slot."""

    target: PlacementMap
    moves: tuple[Move, ...]

    @property
    def num_transfers(self) -> int:
        """Moves between different devices."""
        return sum(not move.is_local for move in self.moves)


def load_placement_map(path: str | os.PathLike[str]) -> PlacementMap:
    """Reads and verifies a map.

    Raises:
        CheckpointError: the file is missing, too large, not a placement map, of another version, or
            contradicts itself.
    """
    target = Path(path)
    try:
        raw = read_bounded(target, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be read: {error.strerror}") from error
    with blamed_on(f"{target}: not a placement map: not JSON"):
        value = json.loads(raw)
    if not isinstance(value, dict) or value.get("format") != MAP_FORMAT:
        raise CheckpointError(f"{target}: not a placement map of moe-runtime")
    if value.get("version") != MAP_VERSION:
        raise CheckpointError(
            f"{target}: placement map version {value.get('version')!r} is not known, expected "
            f"{MAP_VERSION}; make it again with `moe-runtime place`"
        )
    try:
        return _parse(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{target}: the placement map is damaged: {error}") from None


def _digest(value: dict[str, Any]) -> str:
    return digest(json.dumps(value, sort_keys=True).encode())


def _parse(value: dict[str, Any]) -> PlacementMap:
    found = value.pop("digest", None)  # files of people and of older versions have none
    if found is not None and found != _digest(value):
        raise ValueError(
            f"it has another digest than {found!r}; restore it, or remove the line of the digest "
            "if the change is meant"
        )
    if set(value) != _KEYS:
        raise ValueError(f"expected the keys {sorted(_KEYS)}, got {sorted(value)}")
    signature = ModelSignature.parse(value["signature"])
    for name in ("num_nodes", "gpus_per_node"):
        if type(value[name]) is not int or not 0 < value[name] <= 1 << 20:
            raise ValueError(f"{name} is {value[name]!r}, expected a positive integer")
    if not isinstance(value["algorithm"], str):
        raise ValueError(f"algorithm is {value['algorithm']!r}, expected text")
    devices = Devices(num_nodes=value["num_nodes"], gpus_per_node=value["gpus_per_node"])
    slots = _parse_layers(value["layers"], devices.num_gpus)
    placement = Placement(
        expert_of_slot=slots, num_experts=signature.num_experts, num_gpus=devices.num_gpus
    )
    return PlacementMap(
        signature=signature, devices=devices, placement=placement, algorithm=value["algorithm"]
    )


def _parse_layers(layers: object, num_gpus: int) -> np.ndarray:
    """``[L, S]`` from one list a layer, of one list a rank, of experts."""
    if not isinstance(layers, list) or not layers:
        raise ValueError("layers must be a list, one entry a layer")
    widths = set()
    for number, layer in enumerate(layers):
        if not isinstance(layer, list) or len(layer) != num_gpus:
            raise ValueError(f"layer {number} must list the experts of {num_gpus} ranks")
        for rank in layer:
            if not isinstance(rank, list) or not all(type(expert) is int for expert in rank):
                raise ValueError(f"layer {number} has a rank that is not a list of expert ids")
            widths.add(len(rank))
    if len(widths) != 1:
        raise ValueError(f"ranks must have equally many slots, got {sorted(widths)}")
    return np.array(layers, dtype=np.int64).reshape(len(layers), -1)


def _describe(signature: ModelSignature) -> str:
    return (
        f"{signature.model_type} ({signature.num_layers} layers, {signature.num_experts} experts, "
        f"top {signature.top_k})"
    )
