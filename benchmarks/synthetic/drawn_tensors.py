"""One weight of a synthetic checkpoint: Gaussian numbers, stored in bf16, FP8 or MXFP4.

Quantised weights are Gaussian numbers that were quantised, so that their codes have the statistics
of real ones; bytes drawn at random would flatter whoever compresses them.
"""

from __future__ import annotations

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from moe_runtime.benchmarks.synthetic.model_shapes import BF16_BYTES, FP8_BLOCK, MXFP4_GROUP

ITEM_BYTES = {"BF16": BF16_BYTES, "F8_E4M3": 1, "U8": 1}
_PORTION_ROWS = FP8_BLOCK
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


def make_parts(plan: TensorPlan, seed: int) -> list[np.ndarray]:
    """The contents of `plan.parts`; a function of seed and name only, whatever the order.

    Every core draws portions of the weight, which stay in its cache until they are stored.
    """
    import torch

    store = {"bf16": _bf16, "fp8": _fp8, "mxfp4": _mxfp4}[plan.stored]
    rows, cols = math.prod(plan.shape[:-1]), plan.shape[-1]

    def portion(first: int) -> tuple[Any, ...]:
        size = (min(_PORTION_ROWS, rows - first), cols)
        return store(torch.from_numpy(_values(plan, seed, first, size)))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        portions = zip(*pool.map(portion, range(0, rows, _PORTION_ROWS)), strict=True)
        whole = [torch.cat(part) for part in portions]
    bits = {1: torch.uint8, 2: torch.uint16}
    return [one.view(bits[one.element_size()]).numpy() for one in whole]


def _values(plan: TensorPlan, seed: int, first: int, size: tuple[int, int]) -> np.ndarray:
    if plan.std is None:
        return np.ones(size, dtype=np.float32)
    bits = np.random.SFC64([seed, zlib.crc32(plan.name.encode()), first])
    values = np.random.Generator(bits).standard_normal(size, dtype=np.float32)
    values *= np.float32(plan.std)
    return values


def _bf16(values: Any) -> tuple[Any]:
    return (values.bfloat16(),)


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
    quarters = torch.ldexp(groups, (2 - exponents)[..., None])
    # the middles between the eight magnitudes are whole quarters, the largest magnitude is below 8
    middles = torch.tensor([1, 3, 5, 7, 10, 14, 20])
    magnitudes = (torch.arange(33)[:, None] > middles).sum(1, dtype=torch.uint8)
    codes = magnitudes[quarters.abs().ceil_().int()] + 8 * (quarters < 0).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).clamp(0, 254).to(torch.uint8)
