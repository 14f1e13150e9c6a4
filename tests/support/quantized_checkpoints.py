"""Tiny quantised checkpoints, each written by its own format's packer, and what they stand for.

Beside every quantised folder lies a plain one in fp32 with the values that the packer's own
dequantiser gives: what transformers computes from it is the reference.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_checkpoints
import torch
from moe_families import Family
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors that a weight is stored in, by their names, and its values in fp32."""
Packer = Callable[[str, Tensor], Packed]

FP8_LIMIT = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SHARED = r"self_attn.*_proj\.|shared_expert|mlp\.(gate|up|down)_proj"
EXPERTS = r"experts\.\d+\."


@dataclass(frozen=True)
class Quantized:
    """A family in a format.

    Attributes:
        name: of the format.
        family: what model.
        config: the quantization part of its configuration.
        packers: by a pattern of weights' names; the first that matches is taken.
    """

    name: str
    family: Family
    config: dict[str, Any]
    packers: dict[str, Packer] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Written:
    """A checkpoint and its plain twin."""

    sample: Quantized
    folder: Path
    plain: Path


def write(sample: Quantized, folder: Path) -> Written:
    """Write a random model of the sample's family in its format, and the plain twin."""
    model = tiny_checkpoints.tiny_model(sample.family).bfloat16()
    packed, plain = folder / "packed", folder / "plain"
    tiny_checkpoints.save(model, packed, sharded=False)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(packed / "model.safetensors").items():
        pack = next((p for key, p in sample.packers.items() if re.search(key, name)), None)
        if pack is None or tensor.ndim < 2 or "bias" in name or "norm" in name:
            stored[name], values[name] = tensor, tensor.float()
        else:
            parts, values[name] = pack(name, tensor.float())
            stored |= parts
    config = json.loads((packed / "config.json").read_text())
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": sample.config}))
    plain.mkdir()
    whole = {name: tensor.contiguous() for name, tensor in values.items()}
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return Written(sample, packed, plain)


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


def mxfp8(name: str, weight: Tensor) -> Packed:
    """FP8 with an exponent for 32 columns."""
    scales = e8m0_groups(weight, 32, FP8_LIMIT)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    codes = (weight / factors).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, codes.float() * factors


def compressed(kind: str, **arguments: Any) -> Packer:
    """A format of compressed-tensors, written and read back by it."""

    def pack(name: str, weight: Tensor) -> Packed:
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
        else:
            keeps = not args.group_size
            low, high = parts.amin(-1, keepdim=keeps), parts.amax(-1, keepdim=keeps)
        scales, _ = calculate_qparams(low, high, args, global_scale=factor)
        is_float_scale = scales.dtype in (torch.float32, torch.bfloat16)
        state["weight_scale"] = scales.bfloat16().float() if is_float_scale else scales
        stored = compressor.compress(state, scheme)
        values = _decompressed(compressor, dict(stored), scheme)
        if stored["weight_scale"].dtype == torch.float32:
            stored["weight_scale"] = stored["weight_scale"].bfloat16()
        stem = name.removesuffix("weight")
        return {f"{stem}{part}": tensor.contiguous() for part, tensor in stored.items()}, values

    return pack


def _decompressed(compressor: Any, stored: dict[str, Tensor], scheme: Any) -> Tensor:
    """Values in fp32, where the packer would round to bf16 on the way."""
    if "weight_global_scale" not in stored and stored["weight_scale"].dtype != torch.uint8:
        return compressor.decompress(stored, scheme)["weight"].float()
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scales = compressor._decompress_scale(stored["weight_scale"], torch.float32)
    if "weight_packed" in stored:
        rows, width = stored["weight_packed"].shape
        codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * width, dtype=torch.float32)
    else:
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


def groups(*parts: tuple[list[str], str, dict[str, Any]], **rest: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors."""
    config_groups = {
        f"group_{number}": {"targets": targets, "format": kind, "weights": weights}
        for number, (targets, kind, weights) in enumerate(parts)
    }
    return {"quant_method": "compressed-tensors", "config_groups": config_groups, **rest}


INT4_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT4_64 = INT4_32 | {"group_size": 64}
INT8_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8_CHANNEL = INT8_CHANNEL | {"type": "float"}
FP8_TENSOR = FP8_CHANNEL | {"strategy": "tensor"}
MXFP4 = INT4_32 | {
    "type": "float",
    "scale_dtype": torch.uint8,
    "zp_dtype": torch.uint8,
}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}
LINEAR = ["Linear"]
IN_JSON = {"scale_dtype": None, "zp_dtype": None}
PACKED = "pack-quantized"
int4 = functools.partial(compressed, PACKED)

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
EVEN = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
RAGGED = {"hidden_size": 160, "moe_intermediate_size": 72}
ALL_HEADS = {"num_key_value_heads": 4}

SAMPLES = [
    Quantized(
        "gpt_oss-mxfp4",
        Family("gpt_oss", "GptOssForCausalLM", {"hidden_size": 64, "intermediate_size": 96}),
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
        {r"experts\.(gate_up|down)_proj$": gpt_oss},
    ),
    Quantized(
        "deepseek_v3-fp8",
        Family("deepseek_v3", "DeepseekV3ForCausalLM", ALL_HEADS | WIDE),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {EXPERTS + "|" + SHARED: fp8_transformers},
    ),
    Quantized(
        "qwen3_moe-fp8-ragged",
        Family("qwen3_moe", "Qwen3MoeForCausalLM", RAGGED),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        {EXPERTS + "|" + SHARED: fp8_block(torch.bfloat16)},
    ),
    Quantized(
        "deepseek_v3-int4",
        Family("deepseek_v3", "DeepseekV3ForCausalLM", ALL_HEADS | EVEN),
        groups((LINEAR, PACKED, INT4_32), format=PACKED, ignore=["lm_head", "re:.*self_attn.*"]),
        {EXPERTS: int4(**INT4_32)},
    ),
    Quantized(
        "mixtral-nvfp4",
        Family("mixtral", "MixtralForCausalLM", {"hidden_size": 64, "intermediate_size": 96}),
        groups((LINEAR, "nvfp4-pack-quantized", NVFP4 | IN_JSON), ignore=["lm_head"]),
        {EXPERTS + "|" + SHARED: compressed("nvfp4-pack-quantized", **NVFP4)},
    ),
    Quantized(
        "glm4_moe-mixed",
        Family("glm4_moe", "Glm4MoeForCausalLM", EVEN),
        groups(
            (LINEAR, "float-quantized", FP8_CHANNEL),
            (["re:.*experts.*down_proj"], "int-quantized", INT8_CHANNEL),
            ([r"re:.*experts\.\d+\.(gate|up)_proj"], PACKED, INT4_64),
            format="mixed-precision",
        ),
        {
            EXPERTS + "down_proj": compressed("int-quantized", **INT8_CHANNEL),
            EXPERTS: int4(**INT4_64),
            "self_attn.*_proj": compressed("float-quantized", **FP8_CHANNEL),
        },
    ),
    Quantized(
        "qwen3_moe-nvfp4-modelopt",
        Family("qwen3_moe", "Qwen3MoeForCausalLM", EVEN),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {EXPERTS + "|" + SHARED: nvfp4_modelopt},
    ),
    Quantized(
        "olmoe-mxfp8",
        Family("olmoe", "OlmoeForCausalLM", EVEN),
        {"quant_method": "mxfp8"},
        {EXPERTS + "|" + SHARED: mxfp8},
    ),
    Quantized(
        "olmoe-mxfp4",
        Family("olmoe", "OlmoeForCausalLM", EVEN),
        groups((LINEAR, "mxfp4-pack-quantized", MXFP4 | IN_JSON)),
        {EXPERTS: compressed("mxfp4-pack-quantized", **MXFP4)},
    ),
    Quantized(
        "olmoe-fp8-tensor",
        Family("olmoe", "OlmoeForCausalLM", EVEN),
        groups((LINEAR, "float-quantized", FP8_TENSOR)),
        {EXPERTS + "|" + SHARED: compressed("float-quantized", **FP8_TENSOR)},
    ),
    Quantized(
        "deepseek_v4-fp4",
        Family(
            "deepseek_v4",
            "DeepseekV4ForCausalLM",
            {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8} | EVEN,
        ),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
        {EXPERTS: deepseek_v4, r"attn\.w(q_a|q_b|kv|o_b)\.": fp8_exponents},
    ),
]
"""Formats that are read, in families whose checkpoints use them or could."""
