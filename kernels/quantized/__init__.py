"""Weights of 4 to 8 bits, computed as they lie in the checkpoint: codes, and scales per group.

Names are imported on first use: most models have no such weights.
"""

from typing import TYPE_CHECKING

from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.kernels.quantized.formats import (
        BLOCKS,
        CODES,
        SCALES,
        BlockName,
        CodeName,
        ScaleName,
        WeightFormat,
    )
    from moe_runtime.kernels.quantized.matrix import QuantizedMatrix, QuantizedStack
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".formats": "BLOCKS CODES SCALES BlockName CodeName ScaleName WeightFormat",
            ".matrix": "QuantizedMatrix QuantizedStack",
        },
    )

__all__ = [
    "BLOCKS",
    "CODES",
    "SCALES",
    "BlockName",
    "CodeName",
    "QuantizedMatrix",
    "QuantizedStack",
    "ScaleName",
    "WeightFormat",
]
