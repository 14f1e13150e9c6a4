"""Quantised checkpoints: which tensors are the codes and scales of which weight of the model.

A format is one file, which knows its names, types and shapes, and one row of `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_runtime.checkpoints.formats import compressed_tensors, fp8, gpt_oss, modelopt
from moe_runtime.checkpoints.formats.packed_weight import PackedWeight, Packing, range_in
from moe_runtime.checkpoints.formats.settings import Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import CODES, WeightFormat

Weight = TensorEntry | PackedWeight
"""A weight of a checkpoint: a tensor, or several."""

Finder = Callable[[Settings, Mapping[str, TensorEntry]], Iterator[PackedWeight]]
"""Finds the quantised weights of a checkpoint: the configuration's part, and all its tensors."""

FORMATS: Mapping[str, Finder] = {
    "mxfp4": gpt_oss.weights_of,
    "fp8": fp8.weights_of,
    "mxfp8": fp8.weights_of,
    "compressed-tensors": compressed_tensors.weights_of,
    "modelopt": modelopt.weights_of,
}
"""By the `quant_method` of `config.json`."""

_NAMES = {"e2m1": "fp4", "e4m3": "fp8", "uint4": "int4", "uint8": "int8", "int8": "int8"}
assert _NAMES.keys() == CODES.keys()


def packed_weights(
    values: Mapping[str, Any] | None, entries: Mapping[str, TensorEntry]
) -> dict[str, PackedWeight]:
    """The quantised weights of a checkpoint by name, as the model's conversion table knows them.

    Args:
        values: the quantisation part of the configuration; None where there is none.
        entries: all tensors.

    Raises:
        UnsupportedModelError: nothing here reads such weights yet.
        CheckpointError: configuration and tensors do not belong together; names the tensor.
    """
    if values is None:
        return {}
    settings = Settings(values)
    method = settings.text("quant_method")
    if method is None or method not in FORMATS:
        settings.unsupported(f"quant_method {clipped(method)}", " or ".join(FORMATS))
    found: dict[str, PackedWeight] = {}
    for weight in FORMATS[method](settings, entries):
        if weight.name in found or (weight.name in entries and weight.name != weight.codes.name):
            raise CheckpointError(f"{weight.name}: expected it once, found it twice")
        found[weight.name] = weight
    if not found:
        raise UnsupportedModelError(
            f"{settings.place}: expected weights in {method}, found none among the checkpoint's "
            f"{len(entries)} tensors; remove the part if they are not quantised"
        )
    return found


def described(kind: WeightFormat) -> str:
    """A format in a few words, such as `fp8, a f32 scale for 128 x 128`."""
    rows, cols = ("all" if size == 0 else str(size) for size in (kind.group_rows, kind.group_cols))
    return f"{_NAMES[kind.codes]}, a {kind.scales} scale for {rows} x {cols}"


__all__ = [
    "FORMATS",
    "PackedWeight",
    "Packing",
    "Weight",
    "described",
    "packed_weights",
    "range_in",
]
