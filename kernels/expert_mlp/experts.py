"""The experts of one layer, stacked in every layout that checkpoints use, or of any widths.

Shape suffixes: S slots, E experts, D model, F hidden, Z = 2F with a gate and F without, N hidden
columns of all experts of a `PackedExperts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.columns import ExpertColumns
from moe_runtime.kernels.operands import GateLayout, check_like, check_shape


class OneExpert(NamedTuple):
    """Views of one expert's parameters, and the layout of its pre-activations `[n, Z]`.

    `inputs` is one matrix ``[Z, D]``, or gate and up ``[F, D]`` each.
    """

    inputs: tuple[Tensor, ...]
    input_biases: tuple[Tensor | None, ...]
    down_DF: Tensor
    down_bias: Tensor | None
    dim_hidden: int
    layout: GateLayout

    @property
    def dim_preactivation(self) -> int:
        return 2 * self.dim_hidden if self.layout.has_gate else self.dim_hidden


def _check_tensors(experts: StackedExperts | PackedExperts, shapes: dict[str, list[int]]) -> None:
    first = experts.tensors()[0]
    for name, shape in shapes.items():
        tensor: Tensor | None = getattr(experts, name)
        if tensor is None:
            continue
        like = f"{experts.names[0]} {list(first.shape)} of {experts.num_experts} experts"
        check_shape(name, tensor, shape, f"for {like}")
        check_like(name, tensor, first, experts.names[0])


def check_slots(slots: Tensor | None) -> None:
    """Raises ValueError unless `slot_of_expert` is a list of integers."""
    if slots is not None and (slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64)):
        raise ValueError(
            f"slot_of_expert must be [E] of int32 or int64, got {list(slots.shape)} of "
            f"{slots.dtype}"
        )


def ids_in_slots(ids_TK: Tensor, slot_of_expert: Tensor | None) -> Tensor:
    """Ids, with -1 for experts without a slot."""
    if slot_of_expert is None:
        return ids_TK
    is_expert = (ids_TK >= 0) & (ids_TK < len(slot_of_expert))
    has_slot = slot_of_expert[ids_TK.where(is_expert, 0)] >= 0
    return ids_TK.where(is_expert & has_slot, -1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StackedExperts:
    """The parameters of all experts, and their layout.

    Attributes:
        gate_up: ``[S, 2F, D]``; ``[S, F, D]`` without a gate; last two dimensions swapped if
            `is_transposed`.
        down: ``[S, D, F]``, or ``[S, F, D]`` if `is_transposed`.
        gate_up_bias: ``[S, 2F]`` (``[S, F]``) or None.
        down_bias: ``[S, D]`` or None.
        has_gate: Whether `gate_up` holds gate and up, or up alone.
        is_transposed: Whether the summed dimension of the matrices comes first.
        is_concatenated: Whether all gate rows precede all up rows; otherwise they alternate, gate
            first.
        slot_of_expert: ``[E]`` integers: each expert's slot, negative for one that takes no part.
            None: expert ``e`` is in slot ``e``.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    has_gate: bool = True
    is_transposed: bool = False
    is_concatenated: bool = True
    slot_of_expert: Tensor | None = None

    names: ClassVar[tuple[str, ...]] = ("gate_up", "down", "gate_up_bias", "down_bias")
    num_inputs: ClassVar[int] = 1  # matrices of the first product

    def __post_init__(self) -> None:
        """Raises ValueError if shapes, dtypes or devices do not fit; reads no values."""
        for name in ("gate_up", "down"):
            tensor: Tensor = getattr(self, name)
            if tensor.ndim != 3:
                raise ValueError(f"{name} must have three dimensions, got {list(tensor.shape)}")
        if self.has_gate and self.dim_preactivation % 2:
            raise ValueError(
                f"gate_up holds gate and up, so its width must be even, got "
                f"{self.dim_preactivation}"
            )
        num_slots, dim_model, dim_hidden = self.gate_up.shape[0], self.dim_model, self.dim_hidden
        down = [dim_hidden, dim_model] if self.is_transposed else [dim_model, dim_hidden]
        _check_tensors(
            self,
            {
                "down": [num_slots, *down],
                "gate_up_bias": [num_slots, self.dim_preactivation],
                "down_bias": [num_slots, dim_model],
            },
        )
        check_slots(self.slot_of_expert)

    @property
    def num_experts(self) -> int:
        return len(self.gate_up if self.slot_of_expert is None else self.slot_of_expert)

    @property
    def dim_model(self) -> int:
        return self.gate_up.shape[1 if self.is_transposed else 2]

    @property
    def dim_preactivation(self) -> int:
        """Z."""
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

    def tensors(self) -> tuple[Any, ...]:
        """The parameters: matrices of the first product, of the second, then biases."""
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias

    @property
    def layout(self) -> GateLayout:
        return GateLayout(self.has_gate, self.is_concatenated)

    def static(self) -> dict[str, Any]:
        """All fields except `tensors` and the slot table."""
        return {**self.layout._asdict(), "is_transposed": self.is_transposed}

    def products(self) -> tuple[Tensor, Tensor | None, None, Tensor]:
        """Matrix ``[S, outputs, inputs]`` and bias of the first product, None, matrix of the
        second.
        """
        gate_up, down = self.gate_up, self.down
        if self.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return gate_up, self.gate_up_bias, None, down

    def slots(self) -> list[int]:
        """Every expert's slot; copies a table on a device to the host."""
        if self.slot_of_expert is None:
            return list(range(self.num_experts))
        return self.slot_of_expert.tolist()

    def part(self, tensor: Tensor, slot: int) -> Tensor:
        """One slot's part of a parameter or its gradient."""
        return tensor[slot]

    def one(self, slot: int) -> OneExpert:
        """Views of one slot, whatever the layout."""
        gate_up, down = self.gate_up[slot], self.down[slot]
        if self.is_transposed:
            gate_up, down = gate_up.T, down.T
        first = None if self.gate_up_bias is None else self.gate_up_bias[slot]
        second = None if self.down_bias is None else self.down_bias[slot]
        return OneExpert((gate_up,), (first,), down, second, self.dim_hidden, self.layout)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedExperts:
    """Experts that differ in width, laid out as MegaBlocks lays out `w1`, `v1` and `w2`.

    Attributes:
        gate: ``[N, D]``: expert 0's gate rows, then expert 1's; None without a gate.
        up: ``[N, D]``, likewise.
        down: ``[N, D]``: row n is what hidden column n adds to the output.
        gate_bias: ``[N]`` or None, like `up_bias`.
        down_bias: ``[E, D]`` or None.
        columns: Each expert's columns among the N.
        waits: On a GPU, waits once for the device to learn the memory that hidden values need. Else
            there is room for every row on the widest expert.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    columns: ExpertColumns
    waits: bool = False

    slot_of_expert: ClassVar[None] = None  # experts have no slots

    def __post_init__(self) -> None:
        """Raises ValueError if shapes, dtypes or devices do not fit each other and the widths."""
        num_columns = self.columns.num_columns
        if self.up.ndim != 2 or len(self.up) != num_columns:
            raise ValueError(
                f"up must be [{num_columns}, D] for widths that add up to {num_columns}, got "
                f"{list(self.up.shape)}"
            )
        if self.gate is None and self.gate_bias is not None:
            raise ValueError("gate_bias is given, and gate is not")
        wide = [num_columns, self.dim_model]
        shapes = {"gate": wide, "up": wide, "down": wide, "gate_bias": wide[:1]}
        down_bias = [self.num_experts, self.dim_model]
        _check_tensors(self, {**shapes, "up_bias": wide[:1], "down_bias": down_bias})
        if self.columns.first.device != self.device:
            raise ValueError(
                f"columns must be on {self.device} like up, got {self.columns.first.device}"
            )

    @property
    def num_experts(self) -> int:
        return len(self.columns.widths)

    @property
    def dim_model(self) -> int:
        return self.up.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.up.dtype

    @property
    def device(self) -> torch.device:
        return self.up.device

    @property
    def names(self) -> tuple[str, ...]:
        if self.gate is None:
            return "up", "down", "up_bias", "down_bias"
        return "gate", "up", "down", "gate_bias", "up_bias", "down_bias"

    def tensors(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.names)

    @property
    def layout(self) -> GateLayout:
        return GateLayout(self.gate is not None)

    @property
    def num_inputs(self) -> int:
        return 1 if self.gate is None else 2

    def static(self) -> dict[str, Any]:
        gate = {"gate": None} if self.gate is None else {}
        return {**gate, "columns": self.columns, "waits": self.waits}

    def slots(self) -> Sequence[int]:
        return range(self.num_experts)

    def part(self, tensor: Tensor, slot: int) -> Tensor:
        """One expert's part of an ``[N, ...]`` parameter or its gradient."""
        first, last = self.columns.bounds[slot : slot + 2]
        return tensor[first:last]

    def one(self, slot: int) -> OneExpert:
        """Views of one expert."""
        first, last = self.columns.bounds[slot : slot + 2]
        rows = slice(first, last)
        pairs = [(self.gate, self.gate_bias), (self.up, self.up_bias)]
        found = [
            (matrix[rows], None if bias is None else bias[rows])
            for matrix, bias in pairs
            if matrix is not None
        ]
        inputs, biases = zip(*found, strict=True)
        second = None if self.down_bias is None else self.down_bias[slot]
        return OneExpert(inputs, biases, self.down[rows].T, second, last - first, self.layout)


RoutedExperts = StackedExperts | PackedExperts
