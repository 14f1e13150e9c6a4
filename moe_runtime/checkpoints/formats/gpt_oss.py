"""MXFP4 as gpt-oss has it: `X_blocks` U8 `[E, N, K / 32, 16]`, `X_scales` U8 `[E, N, K / 32]`.

The module holds the transpose, `[E, K, N]`; rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_runtime.checkpoints.formats.packed_weight import (
    PackedWeight,
    codes_of_modules,
    codes_shape,
    part_of,
    with_scales,
)
from moe_runtime.checkpoints.formats.settings import Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.quantized import WeightFormat

GROUP = 32


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint."""
    kind = WeightFormat("e2m1", "e8m0", group_cols=GROUP)
    for weight, codes in codes_of_modules(entries, "_blocks", "_scales"):
        *lead, rows, blocks, width = codes_shape(codes, ["U8"], [4])
        if width != GROUP // 2:
            raise CheckpointError(
                f"{codes.name}: expected blocks of {GROUP // 2} bytes, found {list(codes.shape)}"
            )
        scales = part_of(entries, weight, ["_scales"], f"the scales of {codes.name}")
        sizes = (*lead, rows, blocks * GROUP)
        yield with_scales(weight, codes, sizes, scales, ["U8"], kind, is_transposed=True)
