"""FP8 in blocks, as DeepSeek-V3 began it: `X.weight` F8_E4M3 `[N, K]`, `X.weight_scale_inv`.

Scales multiply, whatever their name says: F32 or BF16 `[ceil(N / 128), ceil(K / 128)]`, E8M0 for
blocks of 1 x 32 (MXFP8), one a row, or one in all. Stacks of experts have a dimension more.
DeepSeek-V4 calls scales `X.scale`, and has experts of FP4 among weights of FP8.
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
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.quantized import WeightFormat

_SCALES = ("_scale_inv", "_scale")
_KINDS = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_FP4_GROUP = 32


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint, `quant_method` fp8 or mxfp8."""
    fmt = settings.text("fmt")
    if fmt is not None and "e4m3" not in fmt.lower():
        settings.unsupported(f"fmt {clipped(fmt)}", "e4m3")
    block = settings.block("weight_block_size")
    if block is None and settings.get("quant_method") == "mxfp8":
        block = (1, 32)
    is_fp4 = settings.get("expert_dtype") == "fp4"
    for name, scales in entries.items():
        codes = _codes_of(name, entries)
        if codes is None:
            continue
        if is_fp4 and codes.dtype == "I8":
            *lead, rows, width = codes_shape(codes, ["I8"])
            kind = WeightFormat("e2m1", "e8m0", group_cols=_FP4_GROUP)
            sizes = (*lead, rows, 2 * width)
            yield with_scales(codes.name, codes, sizes, scales, ["F8_E8M0", "U8"], kind)
            continue
        sizes = codes_shape(codes, ["F8_E4M3"])
        rows, cols = block or _whole(scales, codes)
        kind = WeightFormat("e4m3", "f32", rows, cols)
        yield with_scales(codes.name, codes, sizes, scales, _KINDS, kind)
    for name, codes in entries.items():
        is_codes = codes.dtype == "F8_E4M3" or (is_fp4 and codes.dtype == "I8")
        if is_codes and not any(name.endswith(suffix) for suffix in _SCALES):
            ends = [*(name + suffix for suffix in _SCALES), name.removesuffix("weight") + "scale"]
            part_of(entries, "", ends, f"the scales of {name}")


def _codes_of(name: str, entries: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """The codes that a tensor has the scales of; None where it has none of any weight."""
    if name.endswith(".weight_scale_inv"):
        return part_of(entries, name.removesuffix("_scale_inv"), [""], f"the codes of {name}")
    weights = [name.removesuffix(suffix) for suffix in _SCALES if name.endswith(suffix)]
    if name.endswith(".scale"):
        weights.append(name.removesuffix("scale") + "weight")
    found = [entries[weight] for weight in weights if weight in entries]
    return next((codes for codes in found if codes.dtype in ("F8_E4M3", "I8")), None)


def _whole(scales: TensorEntry, codes: TensorEntry) -> tuple[int, int]:
    """Rows and columns that share a scale where the configuration names no block."""
    *lead, rows, _ = codes.shape
    found = [size for size in scales.shape if size != 1]
    if found == [size for size in lead if size != 1]:
        return 0, 0
    if found == [size for size in (*lead, rows) if size != 1]:
        return 1, 0
    raise CheckpointError(
        f"{scales.name}: expected one scale, or one for each of {rows} rows of {codes.name} "
        f"{[*codes.shape]}, as quantization_config of config.json has no weight_block_size, found "
        f"{[*scales.shape]}"
    )
