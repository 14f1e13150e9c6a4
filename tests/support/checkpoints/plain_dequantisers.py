"""What the tensors of quantised weights mean, as the formats' documents have it.

Written without the code that is tested, and without care for speed or for clear errors: whatever is
missing or does not fit raises. Letters: N rows, K columns, E matrices of a stack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
