"""Tiny quantised checkpoints, each written by its own format's packer, and what they stand for.

Beside every quantised folder lies a plain one in fp32 with the values that the packer's own
dequantiser gives: what transformers computes from it is the reference.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_checkpoints
import torch
from moe_families import LINEAR_THEN_FULL, Family
from safetensors.torch import load_file, save_file
from torch import Tensor
from weight_packers import (
    NVFP4,
    Packer,
    awq,
    compressed,
    deepseek_v4,
    fp8_block,
    fp8_exponents,
    fp8_transformers,
    fp8_whole,
    gpt_oss,
    gptq,
    mxfp8,
    nvfp4_modelopt,
)

SHARED = r"self_attn.*_proj\.|shared_expert|mlp\.(gate|up|down)_proj"
EXPERTS = r"experts\.\d+\."


@dataclass(frozen=True)
class Quantized:
    """A family in a format."""

    name: str  # of the format
    family: Family  # what model
    config: dict[str, Any]  # the quantization part of its configuration
    # by a pattern of weights' names; the first that matches is taken
    packers: dict[str, Packer] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16  # of everything else
    has_stacks: bool = False  # whether the experts of a layer are one tensor in the files

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
    model = tiny_checkpoints.tiny_model(sample.family).to(sample.dtype)
    packed, plain = folder / "packed", folder / "plain"
    tiny_checkpoints.save(model, packed, sharded=False, own_names=sample.has_stacks)
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


def groups(*parts: tuple[list[str], str, dict[str, Any]], **rest: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors."""
    config_groups = {
        f"group_{number}": {"targets": targets, "format": kind, "weights": weights}
        for number, (targets, kind, weights) in enumerate(parts)
    }
    return {"quant_method": "compressed-tensors", "config_groups": config_groups, **rest}


INT4_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT4_64 = INT4_32 | {"group_size": 64}
INT4_ZEROS = INT4_32 | {"group_size": 12, "symmetric": False}
INT8_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8_ZEROS = INT8_CHANNEL | {"symmetric": False}
FP8_CHANNEL = INT8_CHANNEL | {"type": "float"}
FP8_TENSOR = FP8_CHANNEL | {"strategy": "tensor"}
MXFP4 = INT4_32 | {"type": "float", "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
FP8_BLOCK = FP8_CHANNEL | {"strategy": "block", "block_structure": [48, 64]}
MXFP8 = MXFP4 | {"num_bits": 8}
INT4_128 = INT4_32 | {"group_size": 128}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True}
LINEAR = ["Linear"]
IN_JSON = {"scale_dtype": None, "zp_dtype": None}
PACKED = "pack-quantized"
int4 = functools.partial(compressed, PACKED)

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
EVEN = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
ODD = {"hidden_size": 48, "moe_intermediate_size": 36}
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
        "qwen3_moe-int4-zeros",
        Family("qwen3_moe", "Qwen3MoeForCausalLM", ODD),
        groups((LINEAR, PACKED, INT4_ZEROS | {"actorder": "static"}), ignore=["lm_head"]),
        {EXPERTS + "|" + SHARED: int4(**INT4_ZEROS)},
    ),
    Quantized(
        "glm4_moe-int8-zeros",
        Family("glm4_moe", "Glm4MoeForCausalLM", ODD | {"intermediate_size": 60}),
        groups(
            (LINEAR, "int-quantized", INT8_ZEROS),
            (["re:.*(experts|self_attn).*(down|q)_proj"], PACKED, INT8_ZEROS),
            ignore=["lm_head"],
        ),
        {
            r"(experts|self_attn).*(down|q)_proj": int4(**INT8_ZEROS),
            EXPERTS + "|" + SHARED: compressed("int-quantized", **INT8_ZEROS),
        },
    ),
    Quantized(
        "qwen3_moe-gptq",
        Family("qwen3_moe", "Qwen3MoeForCausalLM", ODD),
        GPTQ | {"bits": 4, "group_size": 32, "sym": False},
        {EXPERTS + "|" + SHARED: gptq(4, 32, version=1)},
        torch.float16,
    ),
    Quantized(
        "deepseek_v3-gptq-int8",
        Family("deepseek_v3", "DeepseekV3ForCausalLM", ALL_HEADS | EVEN),
        GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        {EXPERTS: gptq(8, -1, version=2)},
    ),
    Quantized(
        "glm4_moe-awq",
        Family(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            {"hidden_size": 48, "moe_intermediate_size": 40, "intermediate_size": 56},
        ),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        {EXPERTS + "|" + SHARED: awq(32)},
    ),
    Quantized(
        "qwen3_moe-nvfp4-modelopt",
        Family("qwen3_moe", "Qwen3MoeForCausalLM", EVEN),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {EXPERTS + "|" + SHARED: nvfp4_modelopt},
    ),
    Quantized(
        "qwen3_5_moe-nvfp4-stacked",
        Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", LINEAR_THEN_FULL | EVEN),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {r"experts\.(gate_up|down)_proj$": nvfp4_modelopt},
        has_stacks=True,
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
        "olmoe-by-projection",
        Family("olmoe", "OlmoeForCausalLM", WIDE),
        groups(
            (["re:.*experts.*gate_proj"], "mxfp8-quantized", MXFP8 | IN_JSON),
            (["re:.*experts.*up_proj"], PACKED, INT4_128),
            (["re:.*experts.*down_proj"], "float-quantized", FP8_BLOCK),
            (["re:.*self_attn.*"], "naive-quantized", FP8_CHANNEL),
            (["re:.*[qk]_proj"], "naive-quantized", INT8_CHANNEL),
            format="mixed-precision",
        ),
        {
            EXPERTS + "gate": compressed("mxfp8-quantized", **MXFP8),
            EXPERTS + "up": int4(**INT4_128),
            EXPERTS: compressed("float-quantized", **FP8_BLOCK),
            "[qk]_proj": compressed("naive-quantized", **INT8_CHANNEL),
            "_proj": compressed("naive-quantized", **FP8_CHANNEL),
        },
    ),
    Quantized(
        "olmoe-fp8-modelopt",
        Family("olmoe", "OlmoeForCausalLM", EVEN),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        {EXPERTS + "|" + SHARED: fp8_whole("_scale", by_row=False)},
    ),
    Quantized(
        "qwen3_moe-fp8-rows",
        Family("qwen3_moe", "Qwen3MoeForCausalLM", ODD),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {EXPERTS: fp8_whole("_scale_inv", by_row=True), SHARED: fp8_whole("_scale", by_row=False)},
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
