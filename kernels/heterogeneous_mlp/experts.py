"""Experts of different widths as matrices that lie one under the other.

Shape suffixes: E experts, D model, N hidden columns of all experts together.
"""

from __future__ import annotations

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
        columns: Which of the N columns are whose.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
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
        for name in ("gate", "down"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None and name == "gate":
                continue
            assert tensor is not None
            if tensor.shape != self.up.shape:
                raise ValueError(
                    f"{name} must be {list(self.up.shape)} like up, got {list(tensor.shape)}"
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
