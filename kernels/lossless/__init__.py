"""A lossless code of bf16 weights, with 0.70 of the bytes for trained weights.

Names are imported on first use: most checkpoints are not packed.
"""

from typing import TYPE_CHECKING

from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.kernels.lossless.planes import (
        PlanesMatrix,
        decode_planes,
        encode_planes,
        encode_planes_into,
    )
    from moe_runtime.kernels.lossless.reference import decode_reference, encode_reference
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".planes": "PlanesMatrix decode_planes encode_planes encode_planes_into",
            ".reference": "decode_reference encode_reference",
        },
    )

__all__ = [
    "PlanesMatrix",
    "decode_planes",
    "decode_reference",
    "encode_planes",
    "encode_planes_into",
    "encode_reference",
]
