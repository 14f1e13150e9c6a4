"""How other libraries name and lay out the weights of a Mixture-of-Experts layer.

Shape suffixes: E experts, D model width, F intermediate width, S width of the shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

GATE, EXPERT_BIAS = "gate.weight", "gate.expert_bias"
GATE_UP, UP, DOWN = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"
SHARED_FIRST, SHARED_DOWN = "shared.gate_up_proj.weight", "shared.down_proj.weight"
SHARED_GATE = "shared.output_gate.weight"


@dataclass(frozen=True)
class LayerShape:
    """What a converter must know of the layer."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_gate: bool
    shared_size: int


class TensorSource(Protocol):
    """Where a converter reads from."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int) -> Tensor: ...


class Converter(NamedTuple):
    """`read` makes the layer's tensors; `write` takes them out of a dictionary of the layer's."""

    read: Callable[[TensorSource, LayerShape], dict[str, Tensor]]
    write: Callable[[dict[str, Tensor], LayerShape], dict[str, Tensor]]


@dataclass(frozen=True)
class PerExpert:
    """Each expert's matrices on their own, as Hugging Face checkpoints have them on disk.

    Attributes:
        gate, up, down: Names of an expert's matrices.
        score_bias: Name of the selection bias.
        shared: Prefix of the shared experts, whose matrices have the names `gate_proj` and so on.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    score_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"

    def read(self, source: TensorSource, shape: LayerShape) -> dict[str, Tensor]:
        width, depth = shape.hidden_size, shape.intermediate_size
        ours = {GATE: source.take("gate.weight", shape.num_experts, width)}
        if source.has(self.score_bias):
            ours[EXPERT_BIAS] = source.take(self.score_bias, shape.num_experts)
        firsts, downs = [], []
        for expert in range(shape.num_experts):
            prefix = f"experts.{expert}"
            names = [self.gate, self.up] if shape.has_gate else [self.up]
            parts = [source.take(f"{prefix}.{name}.weight", depth, width) for name in names]
            firsts.append(torch.cat(parts))
            downs.append(source.take(f"{prefix}.{self.down}.weight", width, depth))
        ours[GATE_UP if shape.has_gate else UP] = torch.stack(firsts)
        ours[DOWN] = torch.stack(downs)
        shared = "shared_expert" if source.has("shared_expert.up_proj.weight") else self.shared
        if shape.shared_size and shape.has_gate:
            halves = [
                source.take(f"{shared}.{name}.weight", shape.shared_size, width)
                for name in ("gate_proj", "up_proj")
            ]
            ours[SHARED_FIRST] = torch.cat(halves)
            ours[SHARED_DOWN] = source.take(f"{shared}.down_proj.weight", width, shape.shared_size)
        if source.has("shared_expert_gate.weight"):
            ours[SHARED_GATE] = source.take("shared_expert_gate.weight", 1, width)
        return ours

    def write(self, ours: dict[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
        theirs = {"gate.weight": ours.pop(GATE)}
        if EXPERT_BIAS in ours:
            theirs[self.score_bias] = ours.pop(EXPERT_BIAS)
        first, down = ours.pop(GATE_UP if shape.has_gate else UP), ours.pop(DOWN)
        names = [self.gate, self.up] if shape.has_gate else [self.up]
        for expert in range(shape.num_experts):
            for name, part in zip(names, first[expert].chunk(len(names)), strict=True):
                theirs[f"experts.{expert}.{name}.weight"] = part
            theirs[f"experts.{expert}.{self.down}.weight"] = down[expert]
        shared = self.shared
        if SHARED_GATE in ours:  # only Qwen2-MoE has it, and spells the prefix so
            shared = "shared_expert"
            theirs["shared_expert_gate.weight"] = ours.pop(SHARED_GATE)
        if SHARED_FIRST in ours:
            gate, up = ours.pop(SHARED_FIRST).chunk(2)
            theirs[f"{shared}.gate_proj.weight"] = gate
            theirs[f"{shared}.up_proj.weight"] = up
            theirs[f"{shared}.down_proj.weight"] = ours.pop(SHARED_DOWN)
        return theirs


def read_megablocks(source: TensorSource, shape: LayerShape) -> dict[str, Tensor]:
    """`w1` (gate), `v1` (up), `w2` (down, transposed), each `[E * F, D]`; without gate no `v1`."""
    rows = (shape.num_experts * shape.intermediate_size, shape.hidden_size)
    names = ["w1", "v1"] if shape.has_gate else ["w1"]
    stacked = (shape.num_experts, shape.intermediate_size, shape.hidden_size)
    parts = [source.take(f"experts.mlp.{name}", *rows).reshape(stacked) for name in names]
    return {
        GATE: source.take("router.layer.weight", shape.num_experts, shape.hidden_size),
        GATE_UP if shape.has_gate else UP: torch.cat(parts, dim=1),
        DOWN: source.take("experts.mlp.w2", *rows).reshape(stacked).transpose(1, 2),
    }


def write_megablocks(ours: dict[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    """As `read_megablocks`."""
    names = ["w1", "v1"] if shape.has_gate else ["w1"]
    parts = ours.pop(GATE_UP if shape.has_gate else UP).chunk(len(names), dim=1)
    theirs = {"router.layer.weight": ours.pop(GATE)}
    for name, part in zip(names, parts, strict=True):
        theirs[f"experts.mlp.{name}"] = part.reshape(-1, shape.hidden_size)
    theirs["experts.mlp.w2"] = ours.pop(DOWN).transpose(1, 2).reshape(-1, shape.hidden_size)
    return theirs


def read_scattermoe(source: TensorSource, shape: LayerShape) -> dict[str, Tensor]:
    """`experts.weight [E, 2F, D]` with the up rows first, `output_experts.weight [E, D, F]`.

    ScatterMoE's modules hold no router; here it is `router.weight`.
    """
    experts, width, depth = shape.num_experts, shape.hidden_size, shape.intermediate_size
    halves = 2 if shape.has_gate else 1
    first = source.take("experts.weight", experts, halves * depth, width)
    return {
        GATE: source.take("router.weight", experts, width),
        GATE_UP if shape.has_gate else UP: first.roll(depth, dims=1) if shape.has_gate else first,
        DOWN: source.take("output_experts.weight", experts, width, depth),
    }


def write_scattermoe(ours: dict[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    """As `read_scattermoe`."""
    first = ours.pop(GATE_UP if shape.has_gate else UP)
    if shape.has_gate:
        first = first.roll(shape.intermediate_size, dims=1)
    return {
        "router.weight": ours.pop(GATE),
        "experts.weight": first,
        "output_experts.weight": ours.pop(DOWN),
    }


def read_torchtitan(source: TensorSource, shape: LayerShape) -> dict[str, Tensor]:
    """`w1` gate, `w3` up, both `[E, F, D]`, and `w2` down `[E, D, F]`.

    Reads the present names (`routed_experts.inner_experts.w1_EFD`) and the earlier ones
    (`experts.w1_EFD`, `experts.w1`).
    """
    experts, width, depth = shape.num_experts, shape.hidden_size, shape.intermediate_size
    candidates = ("experts.{}", "experts.{}_{}", "routed_experts.inner_experts.{}_{}")
    pattern = next((p for p in candidates if source.has(p.format("w1", "EFD"))), candidates[-1])
    ours = {GATE: source.take("router.gate.weight", experts, width)}
    parts = [source.take(pattern.format(w, "EFD"), experts, depth, width) for w in ("w1", "w3")]
    ours[GATE_UP] = torch.cat(parts, dim=1)
    ours[DOWN] = source.take(pattern.format("w2", "EDF"), experts, width, depth)
    for name in ("expert_bias_E", "expert_bias"):
        if source.has(name):
            ours[EXPERT_BIAS] = source.take(name, experts)
    if shape.shared_size:
        halves = [
            source.take(f"shared_experts.{w}.weight", shape.shared_size, width)
            for w in ("w1", "w3")
        ]
        ours[SHARED_FIRST] = torch.cat(halves)
        ours[SHARED_DOWN] = source.take("shared_experts.w2.weight", width, shape.shared_size)
    return ours


def write_torchtitan(ours: dict[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    """Under the present names; an activation without a gate has none."""
    if not shape.has_gate:
        return {}
    inner = "routed_experts.inner_experts"
    gate, up = ours.pop(GATE_UP).chunk(2, dim=1)
    theirs = {
        "router.gate.weight": ours.pop(GATE),
        f"{inner}.w1_EFD": gate,
        f"{inner}.w3_EFD": up,
        f"{inner}.w2_EDF": ours.pop(DOWN),
    }
    if EXPERT_BIAS in ours:
        theirs["expert_bias_E"] = ours.pop(EXPERT_BIAS)
    if SHARED_FIRST in ours:
        gate, up = ours.pop(SHARED_FIRST).chunk(2)
        theirs["shared_experts.w1.weight"] = gate
        theirs["shared_experts.w3.weight"] = up
        theirs["shared_experts.w2.weight"] = ours.pop(SHARED_DOWN)
    return theirs


_HUGGING_FACE = PerExpert()
_MIXTRAL = PerExpert(gate="w1", up="w3", down="w2")
LAYOUTS: Mapping[str, Converter] = MappingProxyType(
    {
        "hugging_face": Converter(_HUGGING_FACE.read, _HUGGING_FACE.write),
        "mixtral": Converter(_MIXTRAL.read, _MIXTRAL.write),
        "megablocks": Converter(read_megablocks, write_megablocks),
        "scattermoe": Converter(read_scattermoe, write_scattermoe),
        "torchtitan": Converter(read_torchtitan, write_torchtitan),
    }
)
