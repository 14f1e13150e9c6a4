"""Formats of floats: FP8 in blocks, MXFP4 of gpt-oss, NVFP4 and FP8 of NVIDIA ModelOpt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_runtime.checkpoints.formats.packed_weight import (
    PackedWeight,
    Settings,
    codes_of_modules,
    codes_shape,
    one_number,
    part_of,
    with_scales,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import WeightFormat

_FP8_SCALES = ("_scale_inv", "_scale")
_KINDS = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_MX_GROUP = 32


def fp8_weights(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """FP8 in blocks, as DeepSeek-V3 began it: `X.weight` F8_E4M3 `[N, K]`, `X.weight_scale_inv`.

    Scales multiply, whatever their name says: F32 or BF16 `[ceil(N / 128), ceil(K / 128)]`, E8M0
    for blocks of 1 x 32 (MXFP8), one a row, or one in all. Stacks of experts have a dimension more.
    DeepSeek-V4 calls scales `X.scale`, and has experts of FP4 among weights of FP8.
    """
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
            kind = WeightFormat("e2m1", "e8m0", group_cols=_MX_GROUP)
            sizes = (*lead, rows, 2 * width)
            yield with_scales(codes.name, codes, sizes, scales, ["F8_E8M0", "U8"], kind)
            continue
        sizes = codes_shape(codes, ["F8_E4M3"])
        rows, cols = block or _whole(scales, codes)
        kind = WeightFormat("e4m3", "f32", rows, cols)
        yield with_scales(codes.name, codes, sizes, scales, _KINDS, kind)
    for name, codes in entries.items():
        is_codes = codes.dtype == "F8_E4M3" or (is_fp4 and codes.dtype == "I8")
        if is_codes and not any(name.endswith(suffix) for suffix in _FP8_SCALES):
            ends = [
                *(name + suffix for suffix in _FP8_SCALES),
                name.removesuffix("weight") + "scale",
            ]
            part_of(entries, "", ends, f"the scales of {name}")


def _codes_of(name: str, entries: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """The codes that belong to a tensor of scales; None if it is not a tensor of scales."""
    if name.endswith(".weight_scale_inv"):
        return part_of(entries, name.removesuffix("_scale_inv"), [""], f"the codes of {name}")
    weights = [name.removesuffix(suffix) for suffix in _FP8_SCALES if name.endswith(suffix)]
    if name.endswith(".scale"):
        weights.append(name.removesuffix("scale") + "weight")
    found = [entries[weight] for weight in weights if weight in entries]
    return next((codes for codes in found if codes.dtype in ("F8_E4M3", "I8")), None)


def _whole(scales: TensorEntry, codes: TensorEntry) -> tuple[int, int]:
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


def mxfp4_weights(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """MXFP4 as gpt-oss has it: `X_blocks` U8 `[E, N, K / 32, 16]`, `X_scales` U8 `[E, N, K / 32]`.

    The module holds the transpose, `[E, K, N]`; rows of gate and up alternate.
    """
    kind = WeightFormat("e2m1", "e8m0", group_cols=_MX_GROUP)
    for weight, codes in codes_of_modules(entries, "_blocks", "_scales"):
        *lead, rows, blocks, width = codes_shape(codes, ["U8"], [4])
        if width != _MX_GROUP // 2:
            raise CheckpointError(
                f"{codes.name}: expected blocks of {_MX_GROUP // 2} bytes, found {[*codes.shape]}"
            )
        scales = part_of(entries, weight, ["_scales"], f"the scales of {codes.name}")
        sizes = (*lead, rows, blocks * _MX_GROUP)
        yield with_scales(weight, codes, sizes, scales, ["U8"], kind, is_transposed=True)


_NVFP4_GROUP = 16
_SCALES = ("weight_scale", "weight_scale_2")
_CODES = {"NVFP4": "U8 or F8_E4M3", "FP8": "F8_E4M3"}
"""Types of codes for each algorithm; some weights of an NVFP4 checkpoint are FP8."""


def modelopt_weights(
    settings: Settings, entries: Mapping[str, TensorEntry]
) -> Iterator[PackedWeight]:
    """NVFP4 and FP8 as NVIDIA ModelOpt writes them.

    NVFP4: `X.weight` U8 `[N, K / 2]`, `X.weight_scale` F8_E4M3 `[N, K / 16]`, and one F32
    `X.weight_scale_2`, which multiplies. FP8: `X.weight` F8_E4M3 and one F32 `X.weight_scale`.
    Experts in one stack `X` have `X_weight_scale` and `X_weight_scale_2`, one for all or for each.
    """
    algorithm = settings.text("quant_algo")
    if algorithm not in _CODES:
        settings.unsupported(f"quant_algo {algorithm}", " or ".join(_CODES))
    group = settings.size("group_size") or _NVFP4_GROUP
    nvfp4 = WeightFormat("e2m1", "e4m3", group_cols=group, global_scale="multiply")
    fp8, place = WeightFormat("e4m3", "f32", 0, 0), settings.place
    for name, codes in entries.items():
        if name.endswith(_SCALES):
            weight = name.rpartition("_scale")[0]
            names = (weight, weight.removesuffix("_weight"))
            part_of(entries, "", dict.fromkeys(names), f"the codes of {name}")
        is_stack = f"{name}_weight_scale" in entries
        if not name.endswith(".weight") and not is_stack:
            continue
        end = "_weight_scale" if is_stack else "_scale"
        if codes.dtype == "U8" and algorithm == "NVFP4":
            *lead, rows, width = codes_shape(codes, ["U8"], [3 if is_stack else 2], place)
            scales = part_of(entries, name, [end], f"the scales of {name}")
            factor = part_of(entries, name, [f"{end}_2"], f"the global scale of {name}")
            sizes = (*lead, rows, 2 * width)
            kinds, factor = ["F8_E4M3"], one_number(factor, *lead)
            yield with_scales(
                name, codes, sizes, scales, kinds, nvfp4, global_scale=factor, place=place
            )
        elif codes.dtype == "F8_E4M3":
            scales = part_of(entries, name, [end], f"the scales of {name}")
            sizes = codes_shape(codes, ["F8_E4M3"], [3 if is_stack else 2], place)
            yield with_scales(name, codes, sizes, scales, ["F32"], fp8, place=place)
        elif f"{name}{end}" in entries:
            raise UnsupportedModelError(
                f"{name}: expected {_CODES[algorithm]}, as it has scales and quant_algo of "
                f"{place} is {algorithm}, found {codes.dtype}"
            )
