"""Columns of experts that differ in width, for the grouped and the block-sparse products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZES = (16, 32, 64, 128)


def check_block(name: str, size: int) -> None:
    """Raises ValueError for a block size that no kernel has."""
    if size not in BLOCK_SIZES:
        raise ValueError(f"{name} must be one of {', '.join(map(str, BLOCK_SIZES))}, got {size}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertColumns:
    """The columns of experts that lie side by side, on the device; made once per layer.

    Attributes:
        bounds: First column of each expert, then the number of columns.
        block_columns: Most columns of a strip.
        starts_E1: int64: first column of each expert.
        strips_E: int64: strips of each expert.
        first: First column of each strip, int64.
        end: The column after its last.
    """

    widths: tuple[int, ...]
    bounds: tuple[int, ...]
    block_columns: int
    starts_E1: Tensor
    strips_E: Tensor
    first: Tensor
    end: Tensor

    @classmethod
    def of(
        cls, widths: Sequence[int], *, block_columns: int, device: torch.device | str = "cpu"
    ) -> ExpertColumns:
        """Cuts each expert's columns into strips.

        Raises:
            ValueError: No expert, a width below 1, or a block size that no kernel has.
        """
        widths = tuple(widths)
        if not widths or min(widths) < 1:
            raise ValueError(f"widths must be one number from 1 on for each expert, got {widths}")
        check_block("block_columns", block_columns)
        starts = [0]
        first, end, strips = [], [], []
        for width in widths:
            begins = range(starts[-1], starts[-1] + width, block_columns)
            starts.append(starts[-1] + width)
            first += begins
            end += [min(begin + block_columns, starts[-1]) for begin in begins]
            strips.append(len(begins))
        tensors = [torch.tensor(part, device=device) for part in (starts, strips, first, end)]
        return cls(
            widths=widths,
            bounds=tuple(starts),
            block_columns=block_columns,
            starts_E1=tensors[0],
            strips_E=tensors[1],
            first=tensors[2],
            end=tensors[3],
        )

    @property
    def num_columns(self) -> int:
        return self.bounds[-1]

    @property
    def multiple(self) -> int:
        """A divisor of all widths, for aligned loads and stores."""
        return 16 if all(width % 16 == 0 for width in self.widths) else 1

    def value_offsets(self, offsets_E1: Tensor) -> Tensor:
        """`[E + 1]` int64: where each expert's hidden values start.

        A row has as many as its expert is wide, rounded up to 16; rows follow one another in one
        tensor.
        """
        widths_E = (self.starts_E1.diff() + 15) // 16 * 16
        return torch.nn.functional.pad((offsets_E1.diff() * widths_E).cumsum(0), (1, 0))

    def most_values(self, num_rows: int) -> int:
        """The most hidden values there can be: every row on the widest expert."""
        return num_rows * (-(-max(self.widths) // 16) * 16)

    @property
    def is_full(self) -> bool:
        """Whether every strip has `block_columns` columns."""
        return all(width % self.block_columns == 0 for width in self.widths)

    def most_blocks(self, num_rows: int, block_rows: int) -> int:
        """The most blocks there can be: all full strips of rows on the widest expert, and a rest
        each.
        """
        strips = [-(-width // self.block_columns) for width in self.widths]
        full = num_rows // block_rows
        if num_rows < len(strips):
            # not every expert can have a row
            return full * max(strips) + sum(sorted(strips)[len(strips) - num_rows :])
        return full * max(strips) + sum(strips)
