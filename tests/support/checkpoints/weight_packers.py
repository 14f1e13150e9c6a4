"""How weights are written in formats of quantised checkpoints, each by the format's own packer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors that a weight is stored in, by their names, and its values in fp32."""
Packer = Callable[[str, Tensor], Packed]

FP8_LIMIT = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}


def blockwise(values: Tensor, rows: int, cols: int) -> Tensor:
    """The largest magnitude of each block, the last ones shorter."""
    parts = [[b.abs().max() for b in r.split(cols, 1)] for r in values.split(rows, 0)]
    return torch.stack([torch.stack(row) for row in parts])


def spread(scales: Tensor, rows: int, cols: int, shape: torch.Size) -> Tensor:
    """A block's number for each of its elements."""
    tall = scales.float().repeat_interleave(rows, 0)[: shape[0]]
    return tall.repeat_interleave(cols, 1)[:, : shape[1]]


def fp8_block(scale_dtype: torch.dtype, block: int = 128) -> Packer:
    """FP8 in blocks that need not be whole."""

    def pack(name: str, weight: Tensor) -> Packed:
        scales = (blockwise(weight, block, block) / FP8_LIMIT).to(scale_dtype)
        factors = spread(scales, block, block, weight.shape)
        codes = (weight / factors).clamp(-FP8_LIMIT, FP8_LIMIT).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scales}, codes.float() * factors

    return pack


def fp8_transformers(name: str, weight: Tensor) -> Packed:
    """FP8 by transformers' own quantiser, which leaves alone what has no whole blocks."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings: Any = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    parts = Fp8Quantize(settings)._quantize_one(name, weight)
    if len(parts) == 1:
        return {name: weight.bfloat16()}, weight
    factors = spread(parts[f"{name}_scale_inv"], 128, 128, weight.shape)
    return parts, parts[name].float() * factors


def e8m0_groups(weight: Tensor, group: int, largest: float) -> Tensor:
    """Exponents, as bytes, with which no element of a group exceeds the largest code."""
    most = weight.unflatten(-1, (-1, group)).abs().amax(-1).clamp(min=2.0**-120)
    return ((most / largest).log2().ceil() + 127).to(torch.uint8)


def e2m1_codes(scaled: Tensor) -> Tensor:
    """The nearest codes, two in a byte, the first one low."""
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[..., K / 2]`, exponents `[..., K / 32]` and values."""
    scales = e8m0_groups(weight, 32, 6.0)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    codes = e2m1_codes(weight / factors)
    signed = torch.cat((E2M1, -E2M1))
    values = torch.stack((signed[(codes & 15).int()], signed[(codes >> 4).int()]), -1).flatten(-2)
    return codes, scales, values * factors


def gpt_oss(name: str, weight: Tensor) -> Packed:
    """Blocks and scales of the transpose; the values by transformers' own dequantiser."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes, scales, _ = mxfp4(weight.transpose(1, 2).contiguous())
    scales.view(-1)[:3] = torch.tensor([0, 1, 128])  # 2 ** -127 is subnormal in fp32
    blocks = codes.unflatten(-1, (-1, 16))
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values


def deepseek_v4(name: str, weight: Tensor) -> Packed:
    """Experts of DeepSeek-V4: FP4 as signed bytes beside `.scale`."""
    codes, scales, values = mxfp4(weight)
    beside = name.removesuffix("weight") + "scale"
    return {name: codes.view(torch.int8), beside: scales.view(torch.float8_e8m0fnu)}, values


def fp8_exponents(name: str, weight: Tensor) -> Packed:
    """FP8 in blocks of 128 with powers of two beside them, as DeepSeek-V4's attention has it."""
    largest = blockwise(weight, 128, 128) / FP8_LIMIT
    scales = (largest.log2().ceil() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    factors = spread(scales, 128, 128, weight.shape)
    codes = (weight / factors).to(torch.float8_e4m3fn)
    beside = name.removesuffix("weight") + "scale"
    return {name: codes, beside: scales}, codes.float() * factors


def fp8_whole(suffix: str, *, by_row: bool) -> Packer:
    """FP8 with one scale for a row, or for all: F32 in a tensor of this end."""

    def pack(name: str, weight: Tensor) -> Packed:
        largest = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().amax()
        scales = largest / FP8_LIMIT
        codes = (weight / scales).clamp(-FP8_LIMIT, FP8_LIMIT).to(torch.float8_e4m3fn)
        unused = {name.removesuffix("weight") + "input_scale": torch.ones(())}
        return {name: codes, name + suffix: scales} | unused, codes.float() * scales

    return pack


def mxfp8(name: str, weight: Tensor) -> Packed:
    """FP8 with an exponent for 32 columns."""
    scales = e8m0_groups(weight, 32, FP8_LIMIT)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    codes = (weight / factors).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * factors


def compressed(kind: str, **arguments: Any) -> Packer:
    """A format of compressed-tensors, written and read back by it."""

    def pack(name: str, weight: Tensor) -> Packed:
        if not arguments.get("symmetric", True):
            weight = with_extremes(weight)
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        args = QuantizationArgs(**arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor: Any = BaseCompressor.get_value_from_registry(kind)
        state = {"weight": weight}
        factor = None
        if kind.startswith("nvfp4"):
            factor = state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
        parts = weight.unflatten(-1, (-1, args.group_size)) if args.group_size else weight
        if args.strategy == "tensor":
            low, high = weight.amin().view(1), weight.amax().view(1)
        elif args.strategy == "block":
            high = blockwise(weight, *args.block_structure)
            low = -high
        else:
            keeps = not args.group_size
            low, high = parts.amin(-1, keepdim=keeps), parts.amax(-1, keepdim=keeps)
        scales, zeros = calculate_qparams(low, high, args, global_scale=factor)
        if not args.symmetric:
            state["weight_zero_point"] = zeros
        is_float_scale = scales.dtype in (torch.float32, torch.bfloat16)
        state["weight_scale"] = scales.bfloat16().float() if is_float_scale else scales
        stored = compressor.compress(state, scheme)
        values = _decompressed(compressor, dict(stored), scheme)
        if stored["weight_scale"].dtype == torch.float32:
            stored["weight_scale"] = stored["weight_scale"].bfloat16()
        stem = name.removesuffix("weight")
        return {f"{stem}{part}": tensor.contiguous() for part, tensor in stored.items()}, values

    return pack


def in_words(numbers: np.ndarray, bits: int, order: Sequence[int] = ()) -> np.ndarray:
    """Words of the numbers of several rows: `[ceil(rows * bits / 32), cols]`.

    Args:
        numbers: `[rows, cols]`.
    """
    in_word = 32 // bits
    order = order or range(in_word)
    words = np.zeros((-(-len(numbers) // in_word), numbers.shape[1]), np.uint32)
    for number in range(len(words)):
        for place, row in enumerate(order):
            if number * in_word + row < len(numbers):
                found = numbers[number * in_word + row].astype(np.uint32)
                words[number] |= found << np.uint32(bits * place)
    return words


def quantised_columns(
    weight: Tensor, bits: int, group: int
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Codes `[N, K]`, zero points and scales `[N, groups]`, and values, each group rounded."""
    codes, zeros, scales, values = [], [], [], []
    for part in weight.split(group if group > 0 else weight.shape[1], dim=1):
        low = part.amin(1, keepdim=True).clamp(max=0)
        high = part.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).half().float()
        zero = (-low / scale).round().clamp(0, 2**bits - 1)
        code = (part / scale + zero).round().clamp(0, 2**bits - 1)
        codes.append(code)
        zeros.append(zero)
        scales.append(scale)
        values.append((code - zero) * scale)
    whole = torch.cat(codes, 1).int().numpy(), torch.cat(zeros, 1).int().numpy()
    return *whole, torch.cat(scales, 1), torch.cat(values, 1)


def gptq(bits: int, group: int, version: int) -> Packer:
    """GPTQ: words of columns; version 1 stores words of zero points less one each."""

    def pack(name: str, weight: Tensor) -> Packed:
        codes, zeros, scales, values = quantised_columns(with_extremes(weight), bits, group)
        words = in_words(zeros, bits)
        if version == 1:
            words -= np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        cols = weight.shape[1]
        stem = name.removesuffix("weight")
        stored = {
            f"{stem}qweight": torch.from_numpy(in_words(codes.T, bits).view(np.int32)),
            f"{stem}qzeros": torch.from_numpy(words.T.copy().view(np.int32)),
            f"{stem}scales": scales.t().half().contiguous(),
            f"{stem}g_idx": (torch.arange(cols) // (group if group > 0 else cols)).int(),
        }
        return stored, values

    return pack


def awq(group: int) -> Packer:
    """AWQ: words of eight rows, of which the lowest bits have row 0, then 2, and so on."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(name: str, weight: Tensor) -> Packed:
        codes, zeros, scales, values = quantised_columns(with_extremes(weight), 4, group)
        stem = name.removesuffix("weight")
        words = {"qweight": in_words(codes, 4, order), "qzeros": in_words(zeros, 4, order)}
        stored = {
            stem + part: torch.from_numpy(found.T.copy().view(np.int32))
            for part, found in words.items()
        }
        return stored | {f"{stem}scales": scales.t().half().contiguous()}, values

    return pack


def with_extremes(weight: Tensor) -> Tensor:
    """Rows without negative numbers and without positive ones: their zero points are extremes."""
    weight = weight.clone()
    weight[0], weight[-1] = weight[0].abs(), -weight[-1].abs()
    return weight


def _decompressed(compressor: Any, stored: dict[str, Tensor], scheme: Any) -> Tensor:
    """Values in fp32, where the packer would round to bf16 on the way."""
    if "weight_global_scale" not in stored and stored["weight_scale"].dtype != torch.uint8:
        return compressor.decompress(stored, scheme)["weight"].float()
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    if "weight_packed" in stored:
        scales = compressor._decompress_scale(stored["weight_scale"], torch.float32)
        rows, width = stored["weight_packed"].shape
        codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * width, dtype=torch.float32)
    else:
        scales = compressor._decompress_scale(stored["weight_scale"]).float()  # powers of two
        codes = stored["weight"].float()
    return dequantize(
        codes,
        scales,
        args=scheme.weights,
        global_scale=stored.get("weight_global_scale"),
        dtype=torch.float32,
    )


def nvfp4_modelopt(name: str, weight: Tensor) -> Packed:
    """The codes that compressed-tensors has, with the reciprocal of its global scale."""
    if weight.ndim == 3:
        each = [nvfp4_modelopt("x.weight", matrix) for matrix in weight]
        ends = {f"x.weight{end}": end and f"_weight{end}" for end in ("", "_scale", "_scale_2")}
        stacks = {
            name + end: torch.stack([one[part] for one, _ in each]) for part, end in ends.items()
        }
        return stacks, torch.stack([values for _, values in each])
    pack = compressed("nvfp4-pack-quantized", **NVFP4)
    parts, _ = pack(name, weight)
    stem = name.removesuffix(".weight")
    codes, scales = parts[f"{stem}.weight_packed"], parts[f"{stem}.weight_scale"]
    factor = 1 / parts[f"{stem}.weight_global_scale"]
    signed = torch.cat((E2M1, -E2M1))
    pairs = torch.stack((signed[(codes & 15).int()], signed[(codes >> 4).int()]), -1)
    values = pairs.flatten(-2) * (scales.float() * factor).repeat_interleave(16, -1)
    stored = {
        name: codes,
        f"{name}_scale": scales,
        f"{name}_scale_2": factor.reshape(()),
        f"{stem}.input_scale": torch.ones(()),
    }
    return stored, values
