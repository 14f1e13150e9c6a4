"""Quantised checkpoints: finds the codes and scales of each weight of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

from moe_runtime.checkpoints.formats.packed_weight import CONFIG, PackedWeight, Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.lazy import LazyTable

Weight = TensorEntry | PackedWeight  # A weight of a checkpoint: a tensor, or several

Finder = Callable[[Settings, Mapping[str, TensorEntry]], Iterator[PackedWeight]]
"""Finds the quantised weights of a checkpoint: the configuration's part, and all its tensors."""

_HERE = "moe_runtime.checkpoints.formats"
FORMATS: Mapping[str, Finder] = LazyTable(
    {
        "mxfp4": f"{_HERE}.floats:mxfp4_weights",
        "fp8": f"{_HERE}.floats:fp8_weights",
        "mxfp8": f"{_HERE}.floats:fp8_weights",
        "compressed-tensors": f"{_HERE}.compressed_tensors:weights_of",
        "modelopt": f"{_HERE}.floats:modelopt_weights",
        "gptq": f"{_HERE}.columns:gptq_weights",
        "awq": f"{_HERE}.columns:awq_weights",
    }
)
"""By the `quant_method` of `config.json`."""
SIGNS: Mapping[str, tuple[str, ...]] = {
    ".g_idx": ("gptq",),
    ".qweight": ("gptq", "awq"),
    "_blocks": ("mxfp4",),
    ".weight_packed": ("compressed-tensors",),
    ".weight_scale_2": ("modelopt",),
    "_scale_inv": ("fp8", "mxfp8"),
    ".weight_scale": ("compressed-tensors", "modelopt", "fp8", "mxfp8"),
    ".scale": ("fp8", "mxfp8"),
}
"""Ends of the names of tensors that belong to quantised weights, and their formats."""
BESIDE_WEIGHTS = (
    *("input_scale", "input_global_scale", "k_scale", "v_scale", "weight_shape", "g_idx"),
)
"""Ends of the names of tensors that change no weight: of activations, caches, shapes and groups."""


def packed_weights(
    values: Mapping[str, Any], entries: Mapping[str, TensorEntry], place: str = CONFIG
) -> dict[str, PackedWeight]:
    """The quantised weights of a checkpoint by name, as the model's conversion table knows them."""
    settings = Settings(values, place)
    method = settings.text("quant_method")
    if method is None or method not in FORMATS:
        settings.unsupported(f"quant_method {clipped(method)}", " or ".join(FORMATS))
    ends = tuple(end for end, methods in SIGNS.items() if method in methods)
    if not any(name.endswith(ends) for name in entries) and sign_of(entries):
        _refuse_other(settings, method, entries)
    found: dict[str, PackedWeight] = {}
    for weight in FORMATS[method](settings, entries):
        if weight.name in found or (weight.name in entries and weight.name != weight.codes.name):
            raise CheckpointError(
                f"{weight.name}: expected it once, found it twice, quantised in "
                f"{weight.codes.name} too; save the checkpoint again with one of them"
            )
        found[weight.name] = weight
    if not found:
        _refuse_other(settings, method, entries)
    return found


def sign_of(names: Collection[str], but: str = "") -> str:
    """A tensor that belongs to a quantised weight, and its formats without ``but``; else empty."""
    ends = [end for end, methods in SIGNS.items() if but not in methods]
    found = ((end, name) for end in ends for name in names if name.endswith(end))
    end, name = next(found, ("", ""))
    return f"{name}, a part of {' or '.join(SIGNS[end])}" if end else ""


def shape_in_words(weight: Weight) -> str:
    """A weight's shape, and where it is quantised also its codes'."""
    shape = f"{[*weight.shape]}"
    if isinstance(weight, PackedWeight):
        shape += f" in {weight.codes.name} {[*weight.codes.shape]}"
    return shape


def _refuse_other(settings: Settings, method: str, entries: Mapping[str, TensorEntry]) -> NoReturn:
    sign = sign_of(entries, method)
    cause = f"but {sign}: correct quant_method" if sign else "remove the part if none is quantised"
    raise UnsupportedModelError(
        f"{settings.place}: expected weights in {method}, found none among the checkpoint's "
        f"{len(entries)} tensors; {cause}"
    )
