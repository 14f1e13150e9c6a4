"""Quantised matrices of many experts in one memory: what a kernel reads through a slot table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_runtime.kernels.quantized.formats import WeightFormat
from moe_runtime.kernels.quantized.matrix import QuantizedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedStack:
    """Weights `[S, N, K]` of one format, each row-major. Slots and rows may lie at any distance.

    Attributes:
        format: What the numbers mean.
        num_cols: K.
        codes: `uint8 [S, N, ceil(K * bits / 8)]`, unit stride along its last dimension.
        scales: `[S, groups of rows, groups of columns]`, likewise, of the element type that
            `SCALES` names; None where blocks hold them.
        zero_points: `uint8`, shaped as the scales, or None.
        global_scale: `fp32 [S, 1]`, any stride between slots, or None.
    """

    format: WeightFormat
    num_cols: int
    codes: Tensor
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Checks that the parts belong together.

        Raises:
            ValueError: They do not; says which, what was expected and what came.
        """
        parts = {"codes": self.codes, "scales": self.scales, "zero points": self.zero_points}
        for name, part in parts.items():
            if part is None:
                continue
            if part.ndim != 3 or len(part) != len(self.codes) or part.device != self.device:
                raise ValueError(
                    f"{name} must have three dimensions, {len(self.codes)} slots on {self.device} "
                    f"like the codes, got {list(part.shape)} on {part.device}"
                )
            if part.stride(2) != 1 and part.shape[2] > 1:
                raise ValueError(f"{name} must have unit stride in a row, got {part.stride()}")
        factors = self.global_scale
        if factors is not None and (
            factors.shape != (len(self.codes), 1) or factors.device != self.device
        ):
            raise ValueError(
                f"global scales must be {[len(self.codes), 1]} on {self.device}, got "
                f"{list(factors.shape)} on {factors.device}"
            )
        if len(self.codes):
            self.matrix(0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(S, N, K)`."""
        return self.codes.shape[0], self.codes.shape[1], self.num_cols

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def matrix(self, slot: int) -> QuantizedMatrix:
        """Views of what lies in one slot."""
        parts = (self.scales, self.zero_points, self.global_scale)
        others = (None if part is None else part[slot] for part in parts)
        return QuantizedMatrix(self.format, self.num_cols, self.codes[slot], *others)

    def dequantize(self, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of some slots, `[len(slots), N, K]`: the specification of every kernel.

        Args:
            slots: int64, on the stack's device.
            dtype: As in `QuantizedMatrix.dequantize`.
        """
        some, num_rows = self.select(slots), self.shape[1]
        is_apart = self.global_scale is not None
        if is_apart or not self.format.group_rows or num_rows % self.format.group_rows:
            # a matrix has a scale of its own, or groups of rows end where it ends
            values = [some.matrix(i).dequantize(dtype) for i in range(len(slots))]
            return torch.stack(values) if values else some.codes.new_empty(some.shape, dtype=dtype)
        parts = (some.codes, some.scales, some.zero_points)
        flat = (None if part is None else part.flatten(0, 1) for part in parts)
        return QuantizedMatrix(self.format, self.num_cols, *flat).dequantize(dtype).view(some.shape)  # type: ignore[arg-type]

    def select(self, slots: Tensor) -> QuantizedStack:
        """A copy of some slots."""
        names = ("codes", "scales", "zero_points", "global_scale")
        parts = {name: getattr(self, name) for name in names}
        return replace(
            self, **{n: None if part is None else part[slots] for n, part in parts.items()}
        )

    def halves(self) -> tuple[QuantizedStack, QuantizedStack]:
        """The upper and the lower rows, as views; scales are repeated if they cover both."""
        size = self.shape[1] // 2
        group = self.format.group_rows
        finest = math.gcd(size, group)
        repeats = group // finest if group else 1
        kind = replace(self.format, group_rows=finest if group else 0)

        def half(part: Tensor | None, rows: slice) -> Tensor | None:
            if part is None or not group:
                return part
            part = part if repeats == 1 else part.repeat_interleave(repeats, dim=1)
            return part[:, rows]

        def cut(first: int) -> QuantizedStack:
            groups = slice(first // max(1, finest), (first + size) // max(1, finest))
            return QuantizedStack(
                kind,
                self.num_cols,
                self.codes[:, first : first + size],
                half(self.scales, groups),
                half(self.zero_points, groups),
                self.global_scale,
            )

        return cut(0), cut(size)

    def alternating(self) -> tuple[QuantizedStack, QuantizedStack]:
        """The even and the odd rows, as views.

        Raises:
            ValueError: Several rows share a scale.
        """
        if self.format.group_rows != 1:
            raise ValueError("rows that lie in turn must have scales of their own")
        parts = {name: getattr(self, name) for name in ("codes", "scales", "zero_points")}
        even, odd = (
            replace(self, **{n: None if p is None else p[:, first::2] for n, p in parts.items()})
            for first in (0, 1)
        )
        return even, odd
