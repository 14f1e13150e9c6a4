"""Experts of different widths as matrices that lie one under the other.

Shape suffixes: E experts, D model, N hidden columns of all experts together, F those of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse import ExpertColumns


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedExperts:
    """The parameters, laid out as MegaBlocks lays out `w1`, `v1` and `w2`.

    Attributes:
        gate: `[N, D]`: expert 0's gate rows, then expert 1's; None without a gate.
        up: `[N, D]`, likewise.
        down: `[N, D]`: row n is what hidden column n adds to the output.
        gate_bias: `[N]` or None.
        up_bias: `[N]` or None.
        down_bias: `[E, D]` or None.
        columns: Which of the N columns are whose.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    columns: ExpertColumns

    def __post_init__(self) -> None:
        """Checks that the tensors belong together; looks at shapes only.

        Raises:
            ValueError: Shapes, dtypes or devices do not fit each other or the widths.
        """
        num_columns = sum(self.columns.widths)
        if self.up.ndim != 2 or len(self.up) != num_columns:
            raise ValueError(
                f"up must be [{num_columns}, D] for widths that add up to {num_columns}, got "
                f"{list(self.up.shape)}"
            )
        if self.gate is None and self.gate_bias is not None:
            raise ValueError("gate_bias is given, and gate is not")
        shapes = {
            "gate": self.up.shape,
            "down": self.up.shape,
            "gate_bias": (num_columns,),
            "up_bias": (num_columns,),
            "down_bias": (self.num_experts, self.dim_model),
        }
        for name, shape in shapes.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != shape:
                raise ValueError(
                    f"{name} must be {list(shape)} for up {list(self.up.shape)} of "
                    f"{self.num_experts} experts, got {list(tensor.shape)}"
                )
            if tensor.dtype != self.up.dtype or tensor.device != self.up.device:
                raise ValueError(
                    f"{name} must be {self.up.dtype} on {self.up.device} like up, got "
                    f"{tensor.dtype} on {tensor.device}"
                )
        if self.columns.first.device != self.up.device:
            raise ValueError(
                f"columns must be on {self.up.device} like up, got {self.columns.first.device}"
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

    def differentiated(self) -> dict[str, Tensor | None]:
        """The parameters that the products read, by name: all but `down_bias`."""
        names = ("gate", "up", "down", "gate_bias", "up_bias")
        return {name: getattr(self, name) for name in names}

    def parts(self) -> Iterator[PackedExpert]:
        """The experts one after another, as views."""
        first = 0
        for expert, width in enumerate(self.columns.widths):
            rows = slice(first, first + width)
            first += width
            yield PackedExpert(
                dim_hidden=width,
                rows=rows,
                gate=None if self.gate is None else self.gate[rows],
                up=self.up[rows],
                down=self.down[rows],
                gate_bias=None if self.gate_bias is None else self.gate_bias[rows],
                up_bias=None if self.up_bias is None else self.up_bias[rows],
                down_bias=None if self.down_bias is None else self.down_bias[expert],
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedExpert:
    """One expert of `PackedExperts`; with its layout of pre-activations `[n, Z]`: gate, then up.

    Attributes:
        dim_hidden: F, its width.
        rows: Where its rows of the `[N, D]` matrices are.
        gate: `[F, D]` or None.
        up: `[F, D]`.
        down: `[F, D]`.
        gate_bias: `[F]` or None.
        up_bias: `[F]` or None.
        down_bias: `[D]` or None.
    """

    dim_hidden: int
    rows: slice
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def has_gate(self) -> bool:
        return self.gate is not None

    @property
    def is_concatenated(self) -> bool:
        return True

    @property
    def dim_preactivation(self) -> int:
        """Z: 2F with a gate, F without."""
        return 2 * self.dim_hidden if self.has_gate else self.dim_hidden

    def halves(self) -> Iterator[tuple[str, slice]]:
        """Names of the first matrices, and which columns of the pre-activations each gives."""
        if self.has_gate:
            yield "gate", slice(0, self.dim_hidden)
        yield "up", slice(self.dim_preactivation - self.dim_hidden, self.dim_preactivation)
