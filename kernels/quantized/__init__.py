"""Weights of 4 to 8 bits, computed as they lie in the checkpoint: codes, and scales a group."""

from moe_runtime.kernels.quantized.formats import (
    CODES,
    SCALES,
    CodeName,
    ScaleName,
    WeightFormat,
)
from moe_runtime.kernels.quantized.matrix import QuantizedMatrix

__all__ = [
    "CODES",
    "SCALES",
    "CodeName",
    "QuantizedMatrix",
    "ScaleName",
    "WeightFormat",
]
