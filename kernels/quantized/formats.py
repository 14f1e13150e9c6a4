"""The numbers of a quantised weight: codes, scales of groups, zero points.

Sources: OCP Microscaling Formats (MX) 1.0 for e2m1, e4m3 and e8m0; DeepSeek-V3 (arXiv:2412.19437)
for fp8 in blocks of 128 x 128; compressed-tensors for integers in groups; ggml for blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

CodeName = Literal["e2m1", "e4m3", "uint4", "uint8", "int8"]
BlockName = Literal[
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4_block", "f16_block", "f32_block",
]  # fmt: skip
ScaleName = Literal["e8m0", "e4m3", "bf16", "f16", "f32"]
GlobalScale = Literal["none", "multiply", "divide"]

CODES = MappingProxyType({"e2m1": 4, "e4m3": 8, "uint4": 4, "uint8": 8, "int8": 8})
"""Bits of every kind of code. Of two codes in a byte, the low one has the smaller column."""

INT8_GROUP = 32  # columns that share a scale in a row rounded to int8


class BlockSize(NamedTuple):
    num_codes: int
    num_bytes: int


BLOCKS = MappingProxyType(
    {
        "q4_0": BlockSize(32, 18),
        "q4_1": BlockSize(32, 20),
        "q5_0": BlockSize(32, 22),
        "q5_1": BlockSize(32, 24),
        "q8_0": BlockSize(32, 34),
        "q2_k": BlockSize(256, 84),
        "q3_k": BlockSize(256, 110),
        "q4_k": BlockSize(256, 144),
        "q5_k": BlockSize(256, 176),
        "q6_k": BlockSize(256, 210),
        "iq4_nl": BlockSize(32, 18),
        "iq4_xs": BlockSize(256, 136),
        "mxfp4_block": BlockSize(32, 17),
        "f16_block": BlockSize(1, 2),
        "f32_block": BlockSize(1, 4),
    }
)
"""Blocks of codes with their scales, by ggml's names; C numbers them in this order.

The last two are plain numbers, of an expert whose other matrices are quantised.
"""

SCALES = MappingProxyType(
    {
        "e8m0": torch.uint8,
        "e4m3": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "f32": torch.float32,
    }
)
"""Dtypes of the tensors of scales."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of a weight `[N, K]`: `value[n, k] = (code - zero) * scale * global scale`.

    Blocks that hold their scales (`BLOCKS`) have `codes` only.

    Attributes:
        codes: `e2m1` (fp4: sign, two exponent bits, one of mantissa), `e4m3` (fp8 without
            infinities, NaN is 0x7f), `uint4` and `uint8` (unsigned integers), `int8`; or a name of
            `BLOCKS`.
        scales: Type of the scales; `e8m0` is `2 ** (byte - 127)`, and 255 is NaN. `none` for
            blocks.
        group_rows: Rows that share a scale; 0: all.
        group_cols: Columns that share a scale; 0: all. The last group may be shorter.
        zero: Subtracted from every integer code if there are no zero points.
        has_zero_points: Whether each group has a zero point, a byte.
        global_scale: Whether one fp32 number multiplies or divides all scales (NVFP4).
        int8_activations: Whether rows times the weight are rounded to int8 first (`int8_values`);
            on request only. Zero points of 4-bit codes are then at most 16.
    """

    codes: CodeName | BlockName
    scales: ScaleName | Literal["none"] = "none"
    group_rows: int = 1
    group_cols: int = 0
    zero: int = 0
    has_zero_points: bool = False
    global_scale: GlobalScale = "none"
    int8_activations: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if fields do not fit together."""
        if self.int8_activations and not self.takes_int8_activations:
            raise ValueError(
                "rows are rounded to int8 for blocks, and for e2m1 and integers in groups of 32, "
                "64, ... columns or all, with zero points of 4-bit codes only, "
                f"not for {self}"
            )
        if self.codes in BLOCKS:
            others = (self.scales, self.group_rows, self.group_cols, self.zero)
            if others != ("none", 1, 0, 0) or self.has_zero_points or self.global_scale != "none":
                raise ValueError(f"scales of {self.codes} lie in its blocks: expected no others")
            return
        if self.codes not in CODES:
            raise ValueError(f"codes must be one of {', '.join(CODES)}, got {self.codes!r}")
        if self.scales not in SCALES:
            raise ValueError(f"scales must be one of {', '.join(SCALES)}, got {self.scales!r}")
        if self.group_rows < 0 or self.group_cols < 0:
            raise ValueError(
                f"a group cannot have {self.group_rows} rows and {self.group_cols} columns"
            )
        if (self.zero or self.has_zero_points) and self.codes not in ("uint4", "uint8"):
            raise ValueError(f"zero points belong to uint4 and uint8, not to {self.codes}")

    @property
    def takes_int8_activations(self) -> bool:
        """Whether codes are int8 numbers, e2m1 or blocks, in groups of int8 rows or larger ones."""
        if self.codes in BLOCKS:
            return self.block_codes > 1
        group = self.group_cols
        if group % INT8_GROUP or group & (group - 1):
            return False
        if self.has_zero_points:
            return self.codes == "uint4"
        zeros = {"e2m1": (0,), "uint4": range(16), "uint8": (128,), "int8": (0,)}
        return self.zero in zeros.get(self.codes, ())

    @property
    def bits(self) -> int:
        """Bits of a code outside blocks."""
        return CODES[self.codes]

    @property
    def block_codes(self) -> int:
        """Codes of a block; 0 without blocks."""
        return BLOCKS[self.codes].num_codes if self.codes in BLOCKS else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; 0 without blocks."""
        return BLOCKS[self.codes].num_bytes if self.codes in BLOCKS else 0

    @property
    def has_minima(self) -> bool:
        """Whether blocks hold numbers that are added to or subtracted from scaled codes."""
        return self.codes in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")

    def row_bytes(self, num_cols: int) -> int:
        """Bytes of the codes of a row; ValueError if it has no whole number of blocks."""
        block = BLOCKS.get(self.codes)
        if block is not None:
            if num_cols % block.num_codes:
                raise ValueError(
                    f"rows of {self.codes} must have a multiple of {block.num_codes} columns, "
                    f"got {num_cols}"
                )
            return num_cols // block.num_codes * block.num_bytes
        return -(-num_cols * self.bits // 8)

    def scales_shape(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Groups of a matrix along its rows and its columns."""
        sizes = ((num_rows, self.group_rows), (num_cols, self.group_cols))
        rows, cols = (1 if group == 0 else -(-size // group) for size, group in sizes)
        return rows, cols
