"""One weight of a synthetic checkpoint: Gaussian numbers, stored in bf16, FP8 or MXFP4.

Quantised weights are Gaussian numbers that were quantised, so that their codes have the statistics
of real ones; bytes drawn at random would flatter whoever compresses them.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from moe_runtime.bench.synthetic.model_shapes import BF16_BYTES, FP8_BLOCK, MXFP4_GROUP

ITEM_BYTES = {"BF16": BF16_BYTES, "F8_E4M3": 1, "U8": 1}
Stored = Literal["bf16", "fp8", "mxfp4"]


class StoredPart(NamedTuple):
    """A tensor of the file, as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One weight to write; `std` None stands for a tensor of ones (normalisation weights).

    `fp8` is `[rows, columns]` with a scale for each block of 128 x 128; `mxfp4` is
    `[experts, rows, columns]`, blocks and scales apart.
    """

    name: str
    shape: tuple[int, ...]
    std: float | None
    stored: Stored = "bf16"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """The tensors that hold it."""
        if self.stored == "bf16":
            return (StoredPart(self.name, "BF16", self.shape),)
        if self.stored == "fp8":
            rows, cols = self.shape
            blocks = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
            return (
                StoredPart(self.name, "F8_E4M3", self.shape),
                StoredPart(f"{self.name}_scale_inv", "BF16", blocks),
            )
        *lead, cols = self.shape
        groups = cols // MXFP4_GROUP
        return (
            StoredPart(f"{self.name}_blocks", "U8", (*lead, groups, MXFP4_GROUP // 2)),
            StoredPart(f"{self.name}_scales", "U8", (*lead, groups)),
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds finite fp32 values to the nearest bf16 (ties to even); returns the bits as uint16."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def make_tensor(plan: TensorPlan, seed: int) -> np.ndarray:
    """The bits of one bf16 tensor; a function of seed and name only, whatever the order."""
    return to_bfloat16_bits(_values(plan, seed))


def make_parts(plan: TensorPlan, seed: int) -> list[np.ndarray]:
    """The contents of `plan.parts`; a function of seed and name only, whatever the order."""
    if plan.stored == "bf16":
        return [make_tensor(plan, seed)]
    import torch

    values = torch.from_numpy(_values(plan, seed))
    # an expert at a time, since the way to its codes takes several times its memory
    packed = [_fp8(values)] if plan.stored == "fp8" else [*map(_mxfp4, values)]
    return [torch.cat(parts).view(torch.uint8).numpy() for parts in zip(*packed, strict=True)]


def _values(plan: TensorPlan, seed: int) -> np.ndarray:
    if plan.std is None:
        return np.ones(plan.shape, dtype=np.float32)
    generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(plan.name.encode())]))
    values = generator.standard_normal(plan.shape, dtype=np.float32)
    values *= np.float32(plan.std)
    return values


def _fp8(values: Any) -> tuple[Any, Any]:
    """By the quantiser of transformers, which needs whole blocks; scales rounded to bf16."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings: Any = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    parts = Fp8Quantize(settings)._quantize_one("weight", values)
    return parts["weight"], parts["weight_scale_inv"].bfloat16()


def _mxfp4(values: Any) -> tuple[Any, Any]:
    """As the microscaling formats have it: the exponent of a group's largest number, less two."""
    import torch

    groups = values.unflatten(-1, (-1, MXFP4_GROUP))
    exponents = torch.frexp(groups.abs().amax(-1)).exponent - 1 - 2
    scaled = torch.ldexp(groups, -exponents[..., None])
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(scaled.abs(), between, out_int32=True) + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).clamp(0, 254).to(torch.uint8)
