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
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.layer.heterogeneous import HeterogeneousExperts
from moe_runtime.layer.layouts import LAYOUTS, Converter, LayerShape
from moe_runtime.layer.moe import MoELayer


def export_state(layer: MoELayer, layout: str, prefix: str = "") -> dict[str, Tensor]:
    """The layer's weights as another library names and lays them out.

    Args:
        layer: The layer; nothing in it is changed, and tensors may share its memory.
        layout: `hugging_face` (per expert: `gate_proj`, `up_proj`, `down_proj`), `mixtral` (per
            expert: `w1`, `w3`, `w2`), `megablocks`, `scattermoe` or `torchtitan`.
        prefix: Put before every name, for example `model.layers.3.mlp.`.

    Raises:
        ValueError: The layout is unknown, or has no place for some of the layer's tensors (they
            are named) or for experts of different widths.
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
        layer: The layer, already of the right sizes.
        tensors: Weights by name. Names that do not begin with `prefix` are passed over.
        layout: As in `export_state`.
        prefix: As in `export_state`.

    Raises:
        CheckpointError: Tensors are missing, have another shape, or are unknown to the layout or
            to the layer; all of them are named, and the layer is unchanged.
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


class Source:
    """Tensors to read, which remembers what was read and what was wrong.

    Attributes:
        problems: One text for each tensor that is missing or has another shape.
    """

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
