"""MXFP4 as gpt-oss has it: `X_blocks` U8 `[E, N, K / 32, 16]`, `X_scales` U8 `[E, N, K / 32]`.

The module holds the transpose, `[E, K, N]`; rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_runtime.checkpoints.formats.packed_weight import (
    PackedWeight,
    codes_shape,
    part_of,
    with_scales,
)
from moe_runtime.checkpoints.formats.settings import Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.quantized import WeightFormat

GROUP = 32
_CODES, _SCALES = "_blocks", "_scales"


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint.

    Raises:
        CheckpointError: a part of one is missing or has another type or shape.
    """
    kind = WeightFormat("e2m1", "e8m0", group_cols=GROUP)
    for name, codes in entries.items():
        if name.endswith(_SCALES):
            part_of(entries, name.removesuffix(_SCALES), [_CODES], "the codes of the scales")
        if not name.endswith(_CODES):
            continue
        *lead, rows, blocks, width = codes_shape(codes, ["U8"], [4])
        if width != GROUP // 2:
            raise CheckpointError(
                f"{name}: expected blocks of {GROUP // 2} bytes, found {list(codes.shape)}"
            )
        weight = name.removesuffix(_CODES)
        scales = part_of(entries, weight, [_SCALES], f"the scales of {name}")
        sizes = (*lead, rows, blocks * GROUP)
        yield with_scales(weight, codes, sizes, scales, ["U8"], kind, is_transposed=True)
