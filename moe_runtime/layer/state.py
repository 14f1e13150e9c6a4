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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

    @property
    def first(self) -> str:
        return GATE_UP if self.has_gate else UP


class Correspondence(NamedTuple):
    """One tensor of the layer, and the tensors of another library that it consists of.

    Attributes:
        ours: Its name.
        theirs: Their names.
        shape: Of each of theirs.
        join: Makes ours of theirs.
        split: Makes theirs of ours.
    """

    ours: str
    theirs: Sequence[str]
    shape: tuple[int, ...]
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


def _same(ours: str, theirs: str, *shape: int) -> Correspondence:
    return Correspondence(ours, [theirs], shape, torch.cat, lambda tensor: [tensor])


def _parts(ours: str, theirs: Sequence[str], *shape: int, dim: int = 0) -> Correspondence:
    """Theirs one after another along a dimension."""
    split = partial(torch.chunk, chunks=len(theirs), dim=dim)
    return Correspondence(ours, theirs, shape, partial(torch.cat, dim=dim), split)


def _stack(ours: str, theirs: Sequence[str], num_experts: int, *shape: int) -> Correspondence:
    """Matrices of each expert on their own, several of an expert under each other."""

    def join(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).reshape(num_experts, -1, shape[1])

    return Correspondence(
        ours, theirs, shape, join, lambda stack: stack.reshape(-1, *shape).unbind()
    )


HasName = Callable[[str], bool]
"""Whether there is a tensor of that name: one of theirs when reading, one of ours when writing."""
Layout = Callable[[LayerShape, HasName], list[Correspondence]]


def per_expert(
    shape: LayerShape,
    has: HasName,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Correspondence]:
    """Each expert's matrices on their own, as Hugging Face checkpoints have them on disk."""
    width, depth, shared_size = shape.hidden_size, shape.intermediate_size, shape.shared_size
    experts = [f"experts.{expert}" for expert in range(shape.num_experts)]
    firsts = names[:2] if shape.has_gate else names[1:2]
    first_names = [f"{expert}.{name}.weight" for expert in experts for name in firsts]
    down_names = [f"{expert}.{names[2]}.weight" for expert in experts]
    entries = [
        _same(GATE, "gate.weight", shape.num_experts, width),
        _stack(shape.first, first_names, shape.num_experts, depth, width),
        _stack(DOWN, down_names, shape.num_experts, width, depth),
    ]
    bias = "gate.e_score_correction_bias"
    if has(bias) or has(EXPERT_BIAS):
        entries.append(_same(EXPERT_BIAS, bias, shape.num_experts))
    has_shared_gate = has("shared_expert_gate.weight") or has(SHARED_GATE)
    if shared_size and shape.has_gate:
        # only Qwen2-MoE has the shared gate, and spells the prefix so
        is_qwen = has("shared_expert.up_proj.weight") or has(SHARED_GATE)
        prefix = "shared_expert" if is_qwen else "shared_experts"
        halves = [f"{prefix}.{name}.weight" for name in ("gate_proj", "up_proj")]
        entries.append(_parts(SHARED_FIRST, halves, shared_size, width))
        entries.append(_same(SHARED_DOWN, f"{prefix}.down_proj.weight", width, shared_size))
    if has_shared_gate:
        entries.append(_same(SHARED_GATE, "shared_expert_gate.weight", 1, width))
    return entries


def megablocks(shape: LayerShape, _: HasName) -> list[Correspondence]:
    """`w1` (gate), `v1` (up), `w2` (down, transposed), each `[E * F, D]`; without gate no `v1`."""
    stacked = (shape.num_experts, shape.intermediate_size, shape.hidden_size)
    rows = (shape.num_experts * shape.intermediate_size, shape.hidden_size)
    names = ["experts.mlp.w1", "experts.mlp.v1"][: 2 if shape.has_gate else 1]

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.reshape(stacked) for part in parts], dim=1)

    def split(first: Tensor) -> list[Tensor]:
        return [part.reshape(rows) for part in first.chunk(len(names), dim=1)]

    return [
        _same(GATE, "router.layer.weight", shape.num_experts, shape.hidden_size),
        Correspondence(shape.first, names, rows, join, split),
        Correspondence(
            DOWN,
            ["experts.mlp.w2"],
            rows,
            lambda parts: parts[0].reshape(stacked).transpose(1, 2),
            lambda down: [down.transpose(1, 2).reshape(rows)],
        ),
    ]


def scattermoe(shape: LayerShape, _: HasName) -> list[Correspondence]:
    """`experts.weight [E, 2F, D]` with the up rows first, `output_experts.weight [E, D, F]`.

    ScatterMoE's modules hold no router; here it is `router.weight`.
    """
    experts, width, depth = shape.num_experts, shape.hidden_size, shape.intermediate_size
    first_rows = (2 if shape.has_gate else 1) * depth

    def exchange(first: Tensor) -> Tensor:
        return first.roll(depth, dims=1) if shape.has_gate else first

    return [
        _same(GATE, "router.weight", experts, width),
        Correspondence(
            shape.first,
            ["experts.weight"],
            (experts, first_rows, width),
            lambda parts: exchange(parts[0]),
            lambda first: [exchange(first)],
        ),
        _same(DOWN, "output_experts.weight", experts, width, depth),
    ]


def torchtitan(shape: LayerShape, has: HasName) -> list[Correspondence]:
    """`w1` gate, `w3` up, both `[E, F, D]`, and `w2` down `[E, D, F]`.

    Also reads the earlier names (`experts.w1_EFD`, `experts.w1`). There is no place for an
    activation without a gate.
    """
    if not shape.has_gate:
        return []
    experts, width, depth = shape.num_experts, shape.hidden_size, shape.intermediate_size
    candidates = ("experts.{}", "experts.{}_{}", "routed_experts.inner_experts.{}_{}")
    pattern = next((p for p in candidates if has(p.format("w1", "EFD"))), candidates[-1])
    firsts = [pattern.format(name, "EFD") for name in ("w1", "w3")]
    entries = [
        _same(GATE, "router.gate.weight", experts, width),
        _parts(GATE_UP, firsts, experts, depth, width, dim=1),
        _same(DOWN, pattern.format("w2", "EDF"), experts, width, depth),
    ]
    if has("expert_bias_E") or has("expert_bias") or has(EXPERT_BIAS):
        bias = "expert_bias" if has("expert_bias") else "expert_bias_E"
        entries.append(_same(EXPERT_BIAS, bias, experts))
    if shape.shared_size:
        halves = ["shared_experts.w1.weight", "shared_experts.w3.weight"]
        entries.append(_parts(SHARED_FIRST, halves, shape.shared_size, width))
        entries.append(_same(SHARED_DOWN, "shared_experts.w2.weight", width, shape.shared_size))
    return entries


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "hugging_face": per_expert,
        "mixtral": partial(per_expert, names=("w1", "w3", "w2")),
        "megablocks": megablocks,
        "scattermoe": scattermoe,
        "torchtitan": torchtitan,
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
    theirs: dict[str, Tensor] = {}
    for entry in _layout(layout)(_shape(layer), ours.__contains__):
        if entry.ours in ours:
            theirs |= zip(entry.theirs, entry.split(ours.pop(entry.ours)), strict=True)
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
    ours: dict[str, Tensor] = {}
    problems: list[str] = []
    known: set[str] = set()
    for entry in _layout(layout)(_shape(layer), found.__contains__):
        known |= set(entry.theirs)
        parts = [found[name] for name in entry.theirs if name in found]
        problems += [f"missing {name}" for name in entry.theirs if name not in found]
        problems += [
            f"{name} must be {list(entry.shape)}, got {list(found[name].shape)}"
            for name in entry.theirs
            if name in found and found[name].shape != entry.shape
        ]
        if not problems:
            ours[entry.ours] = entry.join(parts)
    expected = layer.state_dict()
    problems += [f"unexpected {prefix}{name}" for name in sorted(found.keys() - known)]
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


def _layout(layout: str) -> Layout:
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
