"""The experts of one layer as stacked tensors, in every layout that checkpoints use.

Shape suffixes: S slots, E experts, D model, F hidden, Z = 2F with a gate and F without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class OneExpert(NamedTuple):
    """The parameters of one expert; see `StackedExperts`."""

    gate_up_ZD: Tensor
    down_DF: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StackedExperts:
    """The parameters of all experts, and how they are laid out.

    Attributes:
        gate_up: ``[S, 2F, D]``; ``[S, F, D]`` without a gate; the last two dimensions exchanged if
            `is_transposed`.
        down: ``[S, D, F]``, or ``[S, F, D]`` if `is_transposed`.
        gate_up_bias: ``[S, 2F]`` (``[S, F]``) or None.
        down_bias: ``[S, D]`` or None.
        has_gate: Whether `gate_up` holds gate and up, or up alone.
        is_transposed: Whether the summed dimension of the matrices comes first.
        is_concatenated: Whether all gate rows come before all up rows; otherwise they alternate,
            gate first.
        slot_of_expert: ``[E]`` integers: the slot that each expert lies in. None means that expert
            ``e`` lies in slot ``e``.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    has_gate: bool = True
    is_transposed: bool = False
    is_concatenated: bool = True
    slot_of_expert: Tensor | None = None

    def __post_init__(self) -> None:
        """Checks that the tensors belong together; looks at shapes only.

        Raises:
            ValueError: Shapes, dtypes or devices do not fit each other.
        """
        for name in ("gate_up", "down"):
            tensor: Tensor = getattr(self, name)
            if tensor.ndim != 3:
                raise ValueError(f"{name} must have three dimensions, got {list(tensor.shape)}")
        num_slots, dim_model = self.gate_up.shape[0], self.dim_model
        if self.has_gate and self.dim_preactivation % 2:
            raise ValueError(
                f"gate_up holds gate and up, so its width must be even, got "
                f"{self.dim_preactivation}"
            )
        down = [num_slots, dim_model, self.dim_hidden]
        if self.is_transposed:
            down = [num_slots, self.dim_hidden, dim_model]
        expected = {
            "down": down,
            "gate_up_bias": [num_slots, self.dim_preactivation],
            "down_bias": [num_slots, dim_model],
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if list(tensor.shape) != shape:
                raise ValueError(
                    f"{name} must be {shape} for gate_up {list(self.gate_up.shape)}, got "
                    f"{list(tensor.shape)}"
                )
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise ValueError(
                    f"{name} must be {self.dtype} on {self.device} like gate_up, got "
                    f"{tensor.dtype} on {tensor.device}"
                )
        slots = self.slot_of_expert
        if slots is not None and (slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"slot_of_expert must be [E] of int32 or int64, got {list(slots.shape)} of "
                f"{slots.dtype}"
            )

    @property
    def num_experts(self) -> int:
        """Experts that ids may name."""
        if self.slot_of_expert is None:
            return self.gate_up.shape[0]
        return self.slot_of_expert.shape[0]

    @property
    def dim_model(self) -> int:
        return self.gate_up.shape[1 if self.is_transposed else 2]

    @property
    def dim_preactivation(self) -> int:
        """Z: twice the hidden dimension with a gate, once without."""
        return self.gate_up.shape[2 if self.is_transposed else 1]

    @property
    def dim_hidden(self) -> int:
        return self.dim_preactivation // 2 if self.has_gate else self.dim_preactivation

    @property
    def dtype(self) -> torch.dtype:
        return self.gate_up.dtype

    @property
    def device(self) -> torch.device:
        return self.gate_up.device

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The parameters, in the order of the attributes."""
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias

    def slots(self) -> list[int]:
        """The slot of every expert; copies a slot table on another device to the host."""
        if self.slot_of_expert is None:
            return list(range(self.num_experts))
        return self.slot_of_expert.tolist()

    def one(self, slot: int) -> OneExpert:
        """Views of everything in one slot."""
        return OneExpert(*self.matrices(slot), *self.biases(slot))

    def matrices(self, slot: int) -> tuple[Tensor, Tensor]:
        """Views of one slot's matrices as ``[Z, D]`` and ``[D, F]``, whatever the layout."""
        gate_up, down = self.gate_up[slot], self.down[slot]
        return (gate_up.T, down.T) if self.is_transposed else (gate_up, down)

    def biases(self, slot: int) -> tuple[Tensor | None, Tensor | None]:
        """Views of one slot's biases, ``[Z]`` and ``[D]``."""
        first = None if self.gate_up_bias is None else self.gate_up_bias[slot]
        second = None if self.down_bias is None else self.down_bias[slot]
        return first, second
