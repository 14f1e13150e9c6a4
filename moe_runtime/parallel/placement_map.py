"""The placement map: a JSON file that says which expert lies in which slot of which rank.

Written by `moe-runtime place`, described in docs/placement.md, refused for any other model.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.digests import digest
from moe_runtime.errors import CheckpointError, named_failure
from moe_runtime.files import read_bounded, write_text
from moe_runtime.parallel.remap import Move, Rename, keep_in_place, moves_between
from moe_runtime.policies.placement import Devices, Placement
from moe_runtime.types import ModelSignature

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
        rows = self.placement.expert_of_slot[layer]
        return rows.reshape(self.devices.num_gpus, -1).tolist()

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
        rows = [self.experts_of_ranks(layer) for layer in range(self.signature.num_layers)]
        head["digest"] = _digest({**head, "layers": rows})
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        # One line a layer, one list a rank: the file is read by people and compared by diff.
        body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        text = "\n".join(["{", *lines, '  "layers": [', body, "  ]", "}", ""])
        with named_failure(path, "placement map"):
            write_text(path, text)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MapUpdate:
    """How to get from one map to another: `target` has what stays in its old slot."""

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
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{target}: not a placement map: not JSON: {error}") from None
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
    signature = _parse_signature(value["signature"])
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


def _parse_signature(value: object) -> ModelSignature:
    fields = {field.name: field.type for field in dataclasses.fields(ModelSignature)}
    if not isinstance(value, dict) or set(value) != set(fields):
        raise ValueError(f"the signature must have exactly {sorted(fields)}")
    for name, kind in fields.items():
        item = value[name]
        if type(item) is not kind or (kind is int and not 0 < item < 2**31):
            raise ValueError(f"the signature has {name} = {item!r}")
    return ModelSignature(**value)


def _describe(signature: ModelSignature) -> str:
    return (
        f"{signature.model_type} ({signature.num_layers} layers, {signature.num_experts} experts, "
        f"top {signature.top_k})"
    )
