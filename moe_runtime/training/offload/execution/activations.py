"""What becomes of the activations of layers with experts between forward and backward pass.

The bits are the same in any case: what is computed again is computed as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch

from moe_runtime.config import nearest
from moe_runtime.planning.activation_plan import (
    ActivationChoice,
    LayerActivations,
    StepSpeeds,
    plan_activations,
)
from moe_runtime.training.offload.execution.activation_swap import ActivationSwap

Activations = Literal["model", "keep", "recompute", "swap", "auto"]


class Pass(NamedTuple):
    """What one pass through a layer took.

    Attributes:
        seconds: of computation, waiting left out.
        saved_bytes: what the backward pass needs and could compute again.
        recompute_share: share of the forward pass' computation that this would be.
        read_bytes, written_bytes: of experts.
    """

    seconds: float
    saved_bytes: int
    recompute_share: float
    read_bytes: int
    written_bytes: int


@dataclass(slots=True)
class _Measured:
    """Passes of the step that is measured, by layer."""

    forward: dict[int, list[Pass]] = field(default_factory=dict)
    backward: dict[int, list[Pass]] = field(default_factory=dict)


class ActivationPolicy:
    """Keeps, recomputes or swaps, layer by layer.

    Args:
        kind: `model` does as each layer says, `auto` recomputes in the first step, measures it, and
            follows the plan with the least predicted time from then on; the others hold for all
            layers.
        recomputes: what each layer says.
        swap: where swapped tensors go; None if there is no disk.
        budget_bytes: for what `auto` keeps, the swap's buffers included.

    Attributes:
        choices: for each layer.

    Raises:
        ValueError: the kind is not known, or `swap` has nowhere to go.
    """

    def __init__(
        self,
        kind: Activations,
        recomputes: Sequence[bool],
        swap: ActivationSwap | None = None,
        budget_bytes: int = 0,
    ) -> None:
        if kind not in get_args(Activations):
            hint = nearest(str(kind), get_args(Activations))
            raise ValueError(f"activations is {kind!r}; {hint}")
        if kind == "swap" and swap is None:
            raise ValueError("activations='swap' needs a storage_dir to swap to")
        self._swap = swap
        self._budget_bytes = budget_bytes
        self._measured = _Measured() if kind == "auto" else None
        self.choices: list[ActivationChoice] = [
            "recompute" if kind == "auto" or (kind == "model" and own)
            else "keep" if kind == "model" else kind
            for own in recomputes
        ]  # fmt: skip

    def recomputes(self, layer: int) -> bool:
        """Whether a layer's forward pass keeps nothing that can be computed again."""
        return self.choices[layer] == "recompute"

    def saving(self, layer: int) -> AbstractContextManager[object]:
        """Surrounds the forward pass of a layer, whose tensors autograd saves."""
        if self.choices[layer] != "swap" or self._swap is None:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._swap.pack, self._swap.unpack)

    def observe(self, direction: Literal["forward", "backward"], layer: int, found: Pass) -> None:
        """Learns what a pass through a layer took, while a step is measured."""
        if self._measured is not None:
            getattr(self._measured, direction).setdefault(layer, []).append(found)

    def finish_step(self) -> None:
        """After the step that was measured, plans the others."""
        if self._measured is None or not self._measured.backward:
            return
        measured, self._measured = self._measured, None
        layers = [_layer(measured.forward.get(n, ())) for n in range(len(self.choices))]
        write_speed, read_speed = (1.0, 1.0) if self._swap is None else self._swap.measure()
        forward, backward = (
            [x for passes in side.values() for x in passes]
            for side in (measured.forward, measured.backward)
        )
        again_s = sum(layer.recompute_s for layer in layers)
        speeds = StepSpeeds(
            forward_s=sum(x.seconds for x in forward),
            backward_s=max(0.0, sum(x.seconds for x in backward) - again_s),
            forward_disk_s=_disk_seconds(forward, read_speed, write_speed),
            backward_disk_s=_disk_seconds(backward, read_speed, write_speed),
            write_bytes_per_s=write_speed,
            read_bytes_per_s=read_speed,
            swaps=self._swap is not None,
        )
        self.choices = plan_activations(
            layers, speeds, budget_bytes=self._budget_bytes,
            staging_bytes=0 if self._swap is None else 2 * self._swap.buffer_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """Removes the file of swapped tensors."""
        if self._swap is not None:
            self._swap.close()


def _layer(passes: Sequence[Pass]) -> LayerActivations:
    return LayerActivations(
        num_bytes=sum(x.saved_bytes for x in passes),
        recompute_s=sum(x.seconds * x.recompute_share for x in passes),
    )


def _disk_seconds(passes: Sequence[Pass], read_speed: float, write_speed: float) -> float:
    return sum(x.read_bytes / read_speed + x.written_bytes / write_speed for x in passes)
