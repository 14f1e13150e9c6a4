"""Weights of a layer in the layouts of other libraries, both ways.

The layer's own `state_dict` is stable:

    gate.weight                 [E, D]      (and what else the gate has)
    experts.gate_up_proj        [E, 2F, D]  gate rows first; experts.up_proj [E, F, D] without gate
    experts.down_proj           [E, D, F]
    experts.gate_up_proj_bias   [E, 2F]     with bias; up_proj_bias [E, F] without gate
    experts.down_proj_bias      [E, D]      with bias
    shared.gate_up_proj.weight  [2S, D]     with shared experts, S their width together
    shared.down_proj.weight     [D, S]
    shared.output_gate.weight   [1, D]      with `shared_expert_gate`
    zero.vectors, zero.mix_weight           with zero-computation experts

Names and shapes of the routed experts are those that transformers 5 has in memory.

Shape suffixes: E experts, D model width, F intermediate width, S width of the shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.layer.experts import HeterogeneousExperts
from moe_runtime.layer.moe import MoELayer

GATE, EXPERT_BIAS = "gate.weight", "gate.expert_bias"
GATE_UP, UP, DOWN = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"
SHARED_FIRST, SHARED_DOWN = "shared.gate_up_proj.weight", "shared.down_proj.weight"
SHARED_GATE = "shared.output_gate.weight"


@dataclass(frozen=True)
class LayerShape:
    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_gate: bool
    shared_size: int


class Source:
    """Tensors to read, which remembers what was read and what was wrong."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._read: set[str] = set()
        self.problems: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name; zeros of that shape, and a problem, where it does not fit."""
        self._read.add(name)
        tensor = self._tensors.get(name)
        if tensor is None:
            self.problems.append(f"missing {name}")
        elif tuple(tensor.shape) != shape:
            self.problems.append(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        else:
            return tensor
        return torch.zeros(1).expand(shape)

    def unread(self) -> list[str]:
        return sorted(self._tensors.keys() - self._read)


class Converter(NamedTuple):
    """`read` makes the layer's tensors; `write` takes them out of a dictionary of the layer's."""

    read: Callable[[Source, LayerShape], dict[str, Tensor]]
    write: Callable[[dict[str, Tensor], LayerShape], dict[str, Tensor]]


@dataclass(frozen=True)
class PerExpert:
    """Each expert's matrices on their own, as Hugging Face checkpoints have them on disk.

    Attributes:
        gate, up, down: Names of an expert's matrices.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    score_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"

    def read(self, source: Source, shape: LayerShape) -> dict[str, Tensor]:
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


def read_megablocks(source: Source, shape: LayerShape) -> dict[str, Tensor]:
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
    names = ["w1", "v1"] if shape.has_gate else ["w1"]
    parts = ours.pop(GATE_UP if shape.has_gate else UP).chunk(len(names), dim=1)
    theirs = {"router.layer.weight": ours.pop(GATE)}
    for name, part in zip(names, parts, strict=True):
        theirs[f"experts.mlp.{name}"] = part.reshape(-1, shape.hidden_size)
    theirs["experts.mlp.w2"] = ours.pop(DOWN).transpose(1, 2).reshape(-1, shape.hidden_size)
    return theirs


def read_scattermoe(source: Source, shape: LayerShape) -> dict[str, Tensor]:
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
    first = ours.pop(GATE_UP if shape.has_gate else UP)
    if shape.has_gate:
        first = first.roll(shape.intermediate_size, dims=1)
    return {
        "router.weight": ours.pop(GATE),
        "experts.weight": first,
        "output_experts.weight": ours.pop(DOWN),
    }


def read_torchtitan(source: Source, shape: LayerShape) -> dict[str, Tensor]:
    """`w1` gate, `w3` up, both `[E, F, D]`, and `w2` down `[E, D, F]`.

    Also reads the earlier names (`experts.w1_EFD`, `experts.w1`).
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


def export_state(layer: MoELayer, layout: str, prefix: str = "") -> dict[str, Tensor]:
    """The layer's weights as another library names and lays them out.

    Args:
        layer: It is not changed, and tensors may share its memory.
        layout: `hugging_face` (per expert: `gate_proj`, `up_proj`, `down_proj`), `mixtral` (per
            expert: `w1`, `w3`, `w2`), `megablocks`, `scattermoe` or `torchtitan`.
        prefix: Put before every name, for example `model.layers.3.mlp.`.

    Raises:
        ValueError: The layout is unknown, or has no place for some of the layer's tensors (they are
            named) or for experts of different widths.
    """
    ours = dict(layer.state_dict())
    theirs = _converter(layout).write(ours, _shape(layer))
    if ours:
        raise ValueError(f"the layout {layout!r} has no place for {', '.join(sorted(ours))}")
    return {prefix + name: tensor for name, tensor in theirs.items()}


@torch.no_grad()
def import_state(
    layer: MoELayer, tensors: Mapping[str, Tensor], layout: str, prefix: str = ""
) -> None:
    """Copies another library's weights into the layer, in the layer's dtype and on its device.

    Args:
        layer: Already of the right sizes.
        tensors: Weights by name. Names that do not begin with `prefix` are passed over.
        layout: As in `export_state`.

    Raises:
        CheckpointError: Tensors are missing, have another shape, or are unknown to the layout or to
            the layer; all of them are named, and the layer is unchanged.
        ValueError: The layout is unknown, or the layer's experts differ in width.
    """
    found = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    source = Source(found)
    ours = _converter(layout).read(source, _shape(layer))
    expected = layer.state_dict()
    problems = list(source.problems)
    problems += [f"unexpected {prefix}{name}" for name in source.unread()]
    if not problems:
        problems += [f"the layer has no {name}" for name in sorted(ours.keys() - expected.keys())]
        problems += [
            f"nothing for the layer's {name}" for name in sorted(expected.keys() - ours.keys())
        ]
        problems += [
            f"{name} must be {list(expected[name].shape)}, got {list(tensor.shape)}"
            for name, tensor in ours.items()
            if name in expected and expected[name].shape != tensor.shape
        ]
    if problems:
        raise CheckpointError(f"weights of layout {layout!r} do not fit: {'; '.join(problems)}")
    for name, tensor in ours.items():
        expected[name].copy_(tensor)


def _converter(layout: str) -> Converter:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return LAYOUTS[layout]


def _shape(layer: MoELayer) -> LayerShape:
    if isinstance(layer.experts, HeterogeneousExperts):
        raise ValueError(
            f"{layer.name} has experts of different widths; no layout of another library has a "
            "place for them"
        )
    state = layer.state_dict()
    shared = state.get("shared.down_proj.weight")
    return LayerShape(
        num_experts=layer.gate.num_experts,
        hidden_size=layer.hidden_size,
        intermediate_size=state["experts.down_proj"].shape[2],
        has_gate="experts.gate_up_proj" in state,
        shared_size=0 if shared is None else shared.shape[1],
    )
