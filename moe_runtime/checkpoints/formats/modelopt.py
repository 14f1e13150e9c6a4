"""NVFP4 and FP8 as NVIDIA ModelOpt writes them.

NVFP4: `X.weight` U8 `[N, K / 2]`, `X.weight_scale` F8_E4M3 `[N, K / 16]`, and one F32
`X.weight_scale_2`, which multiplies. FP8: `X.weight` F8_E4M3 and one F32 `X.weight_scale`. Experts
in one stack `X` have `X_weight_scale` and `X_weight_scale_2`, one for all or one for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_runtime.checkpoints.formats.packed_weight import (
    PackedWeight,
    codes_shape,
    one_number,
    part_of,
    with_scales,
)
from moe_runtime.checkpoints.formats.settings import Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.quantized import WeightFormat

GROUP = 16
_SCALES = ("weight_scale", "weight_scale_2")
_CODES = {"NVFP4": "U8 or F8_E4M3", "FP8": "F8_E4M3"}
"""Types of the codes by the algorithm: among weights of NVFP4 there may be some of FP8."""


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint."""
    algorithm = settings.text("quant_algo")
    if algorithm not in _CODES:
        settings.unsupported(f"quant_algo {algorithm}", " or ".join(_CODES))
    group = settings.size("group_size") or GROUP
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
