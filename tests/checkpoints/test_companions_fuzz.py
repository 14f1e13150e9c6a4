"""Random damage to what belongs to quantised weights: right values, or one line that names it.

Parts are removed, retyped, reshaped, cut, doubled, exchanged and filled with other numbers, and the
configuration says something else. What is read then is what the plain dequantisers here make of the
same tensors; where they have no meaning for them, they must be refused.
"""

import copy
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_packers
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

Tensors = Mapping[str, Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def values_of(config: Mapping[str, Any], tensors: Tensors, module: str) -> Tensor:
    """The values in fp32 of a module's weight, `[N, K]` or `[E, N, K]`."""
    return _METHODS[config["quant_method"]](config, tensors, module)


def _nibbles(packed: Tensor) -> Tensor:
    bytes_ = packed.view(torch.uint8).int()
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def _in_words(words: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """`[R, C]` words as the `[R * 32 / bits, C]` numbers in them."""
    assert words.dtype == torch.int32
    places = order or tuple(range(32 // bits))
    shifts = [bits * places.index(number) for number in range(len(places))]
    unsigned = words.long() & 0xFFFFFFFF
    return torch.stack([unsigned >> s & (1 << bits) - 1 for s in shifts], 1).flatten(0, 1)


def _scales(stored: Tensor) -> Tensor:
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = stored.view(torch.uint8).double()
        values = torch.exp2(exponents - 127)
        return torch.where(exponents == 255, torch.nan, values).float()
    assert stored.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    return stored.float()


def _sized(tensor: Tensor, *shape: int) -> Tensor:
    """A tensor of these sizes; those of one may lie elsewhere or be missing."""
    assert [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]
    return tensor.reshape(shape)


def _spread(groups: Tensor, rows: int, cols: int, shape: tuple[int, ...]) -> Tensor:
    """A group's number for each element of `shape`; groups of 0 are all."""
    *lead, height, width = shape
    rows, cols = rows or height, cols or width
    groups = _sized(groups, *lead, -(-height // rows), -(-width // cols))
    tall = groups.repeat_interleave(rows, -2)[..., :height, :]
    return tall.repeat_interleave(cols, -1)[..., :width]


def _gpt_oss(config: Mapping[str, Any], tensors: Tensors, module: str) -> Tensor:
    blocks, scales = tensors[f"{module}_blocks"], tensors[f"{module}_scales"]
    assert blocks.dtype == scales.dtype == torch.uint8
    assert blocks.ndim == 4
    assert blocks.shape[-1] == 16
    assert scales.numel() == blocks.numel() // 16
    values = E2M1[_nibbles(blocks)] * _scales(scales.reshape(blocks.shape[:-1]))[..., None]
    return values.flatten(-2)


def _fp8(config: Mapping[str, Any], tensors: Tensors, module: str) -> Tensor:
    codes = tensors[f"{module}.weight"]
    names = [f"{module}.weight_scale_inv", f"{module}.weight_scale", f"{module}.scale"]
    (stored,) = (tensors[name] for name in names if name in tensors)
    block = config.get("weight_block_size")
    if config.get("expert_dtype") == "fp4" and codes.dtype == torch.int8:
        values, block = E2M1[_nibbles(codes)], (1, 32)
        assert stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
    else:
        assert codes.dtype == torch.float8_e4m3fn
        values = codes.float()
    if block is None and config["quant_method"] == "mxfp8":
        block = (1, 32)
    if block is None:
        block = (0, 0) if stored.numel() == 1 else (1, 0)
    rows, cols = block
    return values * _spread(_scales(stored), rows, cols, values.shape)


def _compressed(config: Mapping[str, Any], tensors: Tensors, module: str) -> Tensor:
    how = config["config_groups"]["group_0"]
    kind, args = how.get("format") or config["format"], how["weights"]
    assert not any(re.match(name[3:], module) for name in config.get("ignore") or [])
    assert f"{module}.weight_g_idx" not in tensors
    groups = {"tensor": (0, 0), "channel": (1, 0)}.get(
        str(args.get("strategy")), (1, args.get("group_size"))
    )
    stored = tensors[f"{module}.weight_scale"]
    if kind == "pack-quantized":
        return _packed_integers(args, groups, tensors, module)
    if kind in ("int-quantized", "float-quantized"):
        codes, zeros = tensors[f"{module}.weight"], tensors.get(f"{module}.weight_zero_point")
        assert codes.dtype == (torch.int8 if kind[0] == "i" else torch.float8_e4m3fn)
        values = codes.float()
        assert (zeros is not None) == (args.get("symmetric") is False)
        if zeros is not None:
            values = values - _spread(zeros.float(), *groups, values.shape)
        return values * _spread(_scales(stored), *groups, values.shape)
    if kind == "mxfp8-quantized":
        codes = tensors[f"{module}.weight"]
        return codes.float() * _spread(_scales(stored), 1, 32, codes.shape)
    codes = _nibbles(tensors[f"{module}.weight_packed"])
    if kind == "mxfp4-pack-quantized":
        return E2M1[codes] * _spread(_scales(stored), 1, 32, codes.shape)
    assert kind == "nvfp4-pack-quantized"
    scales = stored.float() / tensors[f"{module}.weight_global_scale"].reshape(())
    return E2M1[codes] * _spread(scales, *groups, codes.shape)


def _packed_integers(
    args: Mapping[str, Any], groups: tuple[int, int], tensors: Tensors, module: str
) -> Tensor:
    bits, is_symmetric = args["num_bits"], args.get("symmetric") is not False
    rows, cols = tensors[f"{module}.weight_shape"].tolist()
    codes = _in_words(tensors[f"{module}.weight_packed"].T, bits).T
    assert rows == len(codes)
    codes = codes[:, :cols]
    assert codes.shape == (rows, cols)
    zeros = torch.tensor(float(1 << bits - 1))
    assert (f"{module}.weight_zero_point" in tensors) == (not is_symmetric)
    if not is_symmetric:
        sizes = -(-rows * bits // 32), -(-cols // (groups[1] or cols))
        stored = _in_words(_sized(tensors[f"{module}.weight_zero_point"], *sizes), bits)[:rows]
        zeros = _spread(stored.float(), *groups, codes.shape)
    scales = _scales(tensors[f"{module}.weight_scale"])
    return (codes - zeros) * _spread(scales, *groups, codes.shape)


def _modelopt(config: Mapping[str, Any], tensors: Tensors, module: str) -> Tensor:
    stored, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if stored.dtype == torch.float8_e4m3fn:
        return stored.float() * _scales(scales).reshape(())
    assert stored.dtype == torch.uint8
    codes = _nibbles(stored)
    group = config.get("group_size") or 16
    factors = scales.float() * tensors[f"{module}.weight_scale_2"].reshape(())
    return E2M1[codes] * _spread(factors, 1, group, codes.shape)


def _gptq(config: Mapping[str, Any], tensors: Tensors, module: str) -> Tensor:
    bits, version = config["bits"], config.get("checkpoint_format") or "gptq"
    codes_KN = _in_words(tensors[f"{module}.qweight"], bits)
    group = config["group_size"] if config["group_size"] > 0 else len(codes_KN)
    index = tensors.get(f"{module}.g_idx")
    if index is None:
        assert not config.get("desc_act")
        index = torch.arange(len(codes_KN)) // group
    codes_KN, index = codes_KN[: len(index)], index.long()
    sizes = int(index.max()) + 1, codes_KN.shape[1]
    words = _sized(tensors[f"{module}.qzeros"], sizes[0], -(-sizes[1] * bits // 32))
    if version == "gptq":
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = (words.long() + ones).to(torch.int32)
    zeros_GN = _in_words(words.T, bits).T[:, : sizes[1]]
    scales_GN = _scales(_sized(tensors[f"{module}.scales"], *sizes))
    return ((codes_KN - zeros_GN[index]) * scales_GN[index]).T


def _awq(config: Mapping[str, Any], tensors: Tensors, module: str) -> Tensor:
    assert config["bits"] == 4
    assert (config.get("version") or "gemm").lower() == "gemm"
    codes_KN = _in_words(tensors[f"{module}.qweight"].T, 4, AWQ_ORDER).T
    group = config["group_size"] if config["group_size"] > 0 else len(codes_KN)
    index = torch.arange(len(codes_KN)) // group
    sizes = int(index.max()) + 1, codes_KN.shape[1]
    words = _sized(tensors[f"{module}.qzeros"], sizes[0], sizes[1] // 8)
    zeros_GN = _in_words(words.T, 4, AWQ_ORDER).T
    scales_GN = _scales(_sized(tensors[f"{module}.scales"], *sizes))
    return ((codes_KN - zeros_GN[index]) * scales_GN[index]).T


_METHODS = {
    "mxfp4": _gpt_oss,
    "fp8": _fp8,
    "mxfp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}


CASES = 30
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
def test_damaged_parts_have_their_values_or_are_refused(name, tmp_path):
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
    for rows, ranges in weight.pieces(1000):
        parts = {}
        for name, part in ranges.items():
            stored = raw[part.offset : part.offset + part.span_bytes]
            parts[name] = part.view(torch.frombuffer(stored, dtype=torch.uint8))
        values[rows] = weight.packing.matrix(parts).dequantize()
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
