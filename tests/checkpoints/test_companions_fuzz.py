"""Random damage to what belongs to quantised weights: right values, or one line that names it.

Parts are removed, retyped, reshaped, cut, doubled, exchanged and filled with other numbers, and the
configuration says something else. What is read then is what `plain_dequantisers` makes of the same
tensors; where they have no meaning for it, they must be refused.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_packers
from plain_dequantisers import values_of
from quantized_checkpoints import (
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_32,
    INT4_ZEROS,
    INT8_CHANNEL,
    INT8_ZEROS,
    MXFP4,
    NVFP4,
    groups,
)
from safetensors.torch import save_file
from torch import Tensor
from weight_packers import compressed

from moe_runtime.checkpoints.formats import PackedWeight, packed_weights
from moe_runtime.checkpoints.safetensors_index import read_header
from moe_runtime.errors import MoERuntimeError

CASES = 60
MODULES = ("layer.a", "layer.b")
SUFFIXES = (
    *(".weight", ".weight_scale", ".weight_scale_inv", ".scale", ".weight_scale_2", ".scales"),
    *(".weight_global_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape", ".g_idx"),
    *(".weight_packed", ".qzeros", ".qweight", "_scales", "_blocks", ".input_scale"),
)
DTYPES = (
    *(torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float8_e5m2),
    *(torch.float16, torch.bfloat16, torch.int16, torch.float32, torch.int32, torch.int64),
)
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 8, 4.0, "4", True, None),
    "num_bits": (2, 4, 8, 8.0, "4", None),
    "group_size": (-1, 0, 8, 12, 16, 32, 64, 32.0, True, "32", None, [32]),
    "strategy": ("group", "channel", "tensor", "tensor_group", "block", None, 3, ["group"]),
    "symmetric": (True, False, None, 0, 1, "no"),
    "type": ("int", "float", None, 4),
    "format": ("pack-quantized", "int-quantized", "float-quantized", "dense", None, 5),
    "actorder": (None, "static", "weight", "group", "dynamic", False, True, 7),
    "weight_block_size": ([16, 16], [16], [16, 0], None, "16", [16.0, 16.0], [32, 16], [1, 32]),
    "expert_dtype": ("fp4", "fp8", None, 3),
    "desc_act": (True, False, None, "yes", 1),
    "dynamic": ({}, {"-:x": {}}, {"+:x": {"bits": 8}}, None, 5, ["x"], "x", True),
    "checkpoint_format": ("gptq", "gptq_v2", "marlin", None, 2),
    "is_marlin_format": (True, False, None),
    "zero_point": (True, False, None, 0, 1),
    "version": ("gemm", "GEMM", "gemv", None, 2),
    "quant_algo": ("NVFP4", "FP8", "W4A8", None, 1),
    "quant_method": ("fp8", "mxfp8", "gptq", "awq", "modelopt", None, 3),
    "ignore": ([], ["re:layer"], ["re:("], "layer", 5, None),
}


@dataclass(frozen=True)
class Sample:
    """A format: its configuration, and what writes a matrix under the name of its weight."""

    config: dict[str, Any]
    pack: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
    shape: tuple[int, ...] = (40, 64)
    weight: str = ".weight"


def _one_group(kind: str, weights: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in weights.items() if not k.endswith("dtype")}
    return groups((["Linear"], kind, plain))


def _of_compressed(kind: str, weights: dict[str, Any], shape: tuple[int, ...] = (40, 64)) -> Sample:
    return Sample(_one_group(kind, weights), compressed(kind, **weights), shape)


SAMPLES = {
    "gpt-oss": Sample({"quant_method": "mxfp4"}, weight_packers.gpt_oss, (3, 64, 40), ""),
    "fp8": Sample(
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        weight_packers.fp8_block(torch.bfloat16, 16),
    ),
    "mxfp8": Sample({"quant_method": "mxfp8"}, weight_packers.mxfp8),
    "deepseek-v4": Sample(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
        weight_packers.deepseek_v4,
    ),
    "int4": _of_compressed("pack-quantized", INT4_32),
    "int4-zeros": _of_compressed("pack-quantized", INT4_ZEROS, (40, 60)),
    "int8": _of_compressed("pack-quantized", INT8_CHANNEL),
    "int8-zeros": _of_compressed("int-quantized", INT8_ZEROS),
    "fp8-channel": _of_compressed("float-quantized", FP8_CHANNEL),
    "fp8-tensor": _of_compressed("float-quantized", FP8_TENSOR),
    "mxfp4": _of_compressed("mxfp4-pack-quantized", MXFP4),
    "nvfp4": _of_compressed("nvfp4-pack-quantized", NVFP4),
    "nvfp4-modelopt": Sample(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, weight_packers.nvfp4_modelopt
    ),
    "gptq": Sample(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
        weight_packers.gptq(4, 32, version=1),
        (40, 60),
    ),
    "gptq-v2": Sample(
        {
            **{"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False},
            "checkpoint_format": "gptq_v2",
        },
        weight_packers.gptq(8, -1, version=2),
    ),
    "awq": Sample(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
        weight_packers.awq(32),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_damaged_parts_have_their_values_or_are_refused(name: str, tmp_path: Path) -> None:
    sample, chance = SAMPLES[name], random.Random(name)
    torch.manual_seed(1)
    original: dict[str, Tensor] = {}
    for module in MODULES:
        original |= sample.pack(f"{module}{sample.weight}", torch.randn(sample.shape))[0]
    counts = {True: 0, False: 0}
    for number in range(CASES):
        tensors, config = dict(original), copy.deepcopy(sample.config)
        done = [_damage(chance, tensors, config) for _ in range(chance.choice((0, 1, 1, 1, 2)))]
        said = _check(tensors, config, tmp_path / "model.safetensors", f"{number}: {done}")
        counts[said] += 1
    assert min(counts.values()) > CASES // 10, counts


def _check(tensors: dict[str, Tensor], config: dict[str, Any], file: Path, done: str) -> bool:
    """Whether the weights were read, with the right values."""
    save_file(tensors, file)
    try:
        weights = packed_weights(config, read_header(file))
        found = {weight.name: _stored_values(weight) for weight in weights.values()}
    except MoERuntimeError as error:
        message = str(error)
        assert message, done
        assert message.isprintable(), done
        named = "quantization_config" in message or any(module in message for module in MODULES)
        assert named, (done, message)
        return False
    assert found, done
    for name, values in found.items():
        expected = values_of(config, tensors, name.removesuffix(".weight"))
        assert torch.equal(values.isnan(), expected.isnan()), (done, name)
        assert torch.equal(values.nan_to_num(), expected.nan_to_num()), (done, name)
    return True


def _stored_values(weight: PackedWeight) -> Tensor:
    values = torch.full((weight.total_rows, weight.num_cols), torch.inf)
    raw = bytearray(weight.codes.file.read_bytes())
    for rows, cols, packing, ranges in weight.pieces(1000):
        parts = {}
        for name, part in ranges.items():
            stored = raw[part.offset : part.offset + part.span_bytes]
            parts[name] = part.view(torch.frombuffer(stored, dtype=torch.uint8))
        values[rows, cols] = packing.matrix(parts).dequantize()
    return values.view(*weight.lead, weight.num_rows, weight.num_cols)


def _damage(chance: random.Random, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Does one thing, and says what."""
    if not tensors or chance.random() < 0.3:
        return _other_setting(chance, config)
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    kind = chance.choice(("remove", "dtype", "cast", "shape", "cut", "double", "swap", "fill"))
    if kind == "remove":
        del tensors[name]
    elif kind == "dtype":
        same = [d for d in DTYPES if d.itemsize == tensor.dtype.itemsize and d != tensor.dtype]
        tensors[name] = tensor.view(chance.choice(same or [tensor.dtype]))
    elif kind == "cast":
        tensors[name] = tensor.float().to(chance.choice(DTYPES))
    elif kind == "shape":
        sizes = list(tensor.shape)
        shapes = [[tensor.numel()], [1, *sizes], [*sizes, 1], sizes[::-1], [1, tensor.numel()]]
        tensors[name] = tensor.reshape(chance.choice(shapes)).contiguous()
    elif kind == "cut":
        tensors[name] = _cut(chance, tensor)
    elif kind == "double":
        module = chance.choice(MODULES)
        tensors[module + chance.choice(SUFFIXES)] = tensor.clone()
    elif kind == "swap":
        other = chance.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other], tensor
    else:
        _fill(chance, tensors, name)
    return f"{kind} {name}"


def _cut(chance: random.Random, tensor: Tensor) -> Tensor:
    if not tensor.ndim:
        return tensor.repeat(chance.choice((0, 2, 3)))
    dim = chance.randrange(tensor.ndim)
    size = max(0, tensor.shape[dim] + chance.choice((-8, -1, 1, 8)))
    places = torch.arange(size) % max(1, tensor.shape[dim])
    integers = tensor.view(_INTEGERS[tensor.dtype.itemsize])
    return integers.index_select(dim, places).view(tensor.dtype)


def _fill(chance: random.Random, tensors: dict[str, Tensor], name: str) -> None:
    """Other bytes; of numbers that count or place something, other numbers nearby."""
    tensor = tensors[name].clone()
    if not tensor.numel():
        return
    if name.endswith(("_shape", "g_idx")) and tensor.dtype in (torch.int32, torch.int64):
        place = chance.randrange(tensor.numel())
        tensor.view(-1)[place] += chance.choice((-64, -1, 1, 2, 2**30))
    else:
        flat = tensor.reshape(-1).view(torch.uint8)
        for _ in range(chance.choice((1, 4))):
            flat[chance.randrange(len(flat))] = chance.choice((0, 1, 127, 128, 255))
        tensor = flat.view(tensor.dtype).view(tensor.shape)
    tensors[name] = tensor


def _other_setting(chance: random.Random, config: dict[str, Any]) -> str:
    group = config.get("config_groups", {}).get("group_0")
    places = [config] if group is None else [config, group, group["weights"], group["weights"]]
    place = chance.choice(places)
    known = [name for name in place if name in SETTINGS]
    name = chance.choice(known * 3 + sorted(SETTINGS))
    if name in place and chance.random() < 0.2:
        del place[name]
        return f"no {name}"
    place[name] = chance.choice(SETTINGS[name])
    return f"{name} = {place[name]!r}"


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
