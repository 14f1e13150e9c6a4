"""Tiny GGUF files, written by the `gguf` package, and what they stand for.

Names of tensors and their dequantised values come from that package too. Beside every file lies a
checkpoint in fp32 with these values: what transformers computes from it is the reference.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_checkpoints
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_corrected_gates import CORRECTED, SIZES, add_corrected_gates, turned
from gguf_linear_attention import LINEAR, NEXT, add_linear_attention, as_in_files, as_in_models
from moe_families import Family
from quantized_matrices import HALVES, any_blocks
from safetensors.torch import load_file, save_file
from torch import Tensor, cat

NUM_HEADS, KEY_ROWS = 4, 32


def heads_apart(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """`kv_b_proj` as two stacks."""
    found = {}
    for name, tensor in stored.items():
        if "kv_b_proj" in name:
            heads = tensor.unflatten(0, (NUM_HEADS, -1))
            keys, values = heads[:, :KEY_ROWS].transpose(1, 2), heads[:, KEY_ROWS:]
            found[name.replace("kv_b", "k_b")] = keys.contiguous()
            found[name.replace("kv_b", "v_b")] = values.contiguous()
        else:
            found[name] = tensor
    return found


def heads_together(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `heads_apart` took apart."""
    found = {}
    for name, tensor in values.items():
        if ".k_b_proj" in name:
            whole = cat((tensor.transpose(1, 2), values[name.replace("k_b", "v_b")]), dim=1)
            found[name.replace("k_b", "kv_b")] = whole.flatten(0, 1).contiguous()
        elif ".v_b_proj" not in name:
            found[name] = tensor
    return found


def add_latent_attention(writer: Any, config: Any) -> None:
    """The metadata of a model: with the widths of compressed heads where these lie apart."""
    is_sigmoid = config.model_type == "deepseek_v3"
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if is_sigmoid:
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(width)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        writer.add_key_length(width)
        writer.add_value_length(config.v_head_dim)
    positions = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(positions["factor"])
    writer.add_rope_scaling_orig_ctx_len(positions["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * positions["mscale_all_dim"])


_CORRECTION = ("correction_bias", "correction.bias")  # What a name ends with, and as it is mapped
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
VOCABULARY = (
    [chr(ord("!") + i) for i in range(89)]
    + ["ab"]
    + [f"<{i}>" for i in range(5)]
    + ["<|endoftext|>"]
)
WRITTEN_BY_GGUF = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q8_0, Kind.Q5_1, Kind.MXFP4)


@dataclass(frozen=True)
class Sample:
    """A family in types of ggml."""

    name: str  # of the sample
    architecture: str  # ggml's name
    family: Family  # what model
    # types of weights by a pattern of their names in the file; the first that matches
    kinds: dict[str, Kind] = field(default_factory=dict)
    is_fused: bool = False  # whether gates and ups of experts are one tensor

    def kind_of(self, name: str) -> Kind:
        if re.search(r"norm|\.bias$|_inp|_sinks|probs", name):
            return Kind.F32
        return next((kind for key, kind in self.kinds.items() if re.search(key, name)), Kind.BF16)


@dataclass(frozen=True)
class Written:
    """A file and its plain twin."""

    sample: Sample
    folder: Path
    plain: Path


WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": 64}
ALL_HEADS = {"num_key_value_heads": 4}
LATENT = {
    **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 4},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
        **{"original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
}
SAMPLES = [
    Sample(
        "olmoe-q4_k",
        "olmoe",
        Family("olmoe", "OlmoeForCausalLM", WIDE | ALL_HEADS | {"intermediate_size": 256}),
        {
            r"1\.ffn_down_exps": Kind.Q6_K,
            "down_exps": Kind.Q5_K,
            "exps": Kind.Q4_K,
            "attn_v": Kind.IQ4_XS,
            "attn": Kind.Q4_K,
            "token_embd": Kind.Q6_K,
        },
    ),
    Sample(
        "qwen2moe-mixed",  # rows of 40 columns are not whole blocks
        "qwen2moe",
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {"hidden_size": 64, "moe_intermediate_size": 40}
            | {"shared_expert_intermediate_size": 32},
        ),
        {r"[01]\.ffn_down_exps": Kind.F16, "down_exps": Kind.F32}
        | {r"1\.ffn_up_exps": Kind.BF16, r"2\.ffn_up_exps": Kind.F16, "": Kind.Q8_0},
    ),
    Sample(
        "qwen2moe-q8_0",
        "qwen2moe",
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {"hidden_size": 64, "moe_intermediate_size": 96}
            | {"shared_expert_intermediate_size": 32},
        ),
        {"gate_exps": Kind.Q4_0, "up_exps": Kind.Q5_1, "shexp": Kind.Q8_0, "": Kind.Q8_0},
    ),
    Sample(
        "qwen3moe-mxfp4",
        "qwen3moe",
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {"hidden_size": 64, "moe_intermediate_size": 96, "tie_word_embeddings": True}
            | {"norm_topk_prob": True},
        ),
        {"gate_exps": Kind.MXFP4, "up_exps": Kind.IQ4_NL, "down_exps": Kind.MXFP4},
    ),
    Sample(
        "gpt-oss-mxfp4",
        "gpt-oss",
        Family("gpt_oss", "GptOssForCausalLM", {"hidden_size": 64, "intermediate_size": 96}),
        {"exps": Kind.MXFP4, "attn": Kind.Q8_0, "output": Kind.Q8_0},
    ),
    *(
        Sample(
            f"gpt-oss-{kind.name.lower()}",  # beside biases in F32
            "gpt-oss",
            Family("gpt_oss", "GptOssForCausalLM", {"hidden_size": 64, "intermediate_size": 96}),
            {"": kind},
        )
        for kind in (Kind.BF16, Kind.F16)
    ),
    Sample(
        "mixtral-q8_0",
        "llama",
        Family(
            "mixtral",
            "MixtralForCausalLM",
            {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "sliding_window": None},
        ),
        {"attn_q": Kind.Q8_0, "attn_v": Kind.Q8_0, "gate_exps": Kind.Q4_0, "exps": Kind.Q8_0},
    ),
    Sample(
        "deepseek2-softmax",
        "deepseek2",
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.5},
        ),
        {"exps": Kind.Q4_0, "shexp": Kind.Q8_0, "attn_kv_b": Kind.Q8_0, "attn_q": Kind.Q8_0},
    ),
    Sample(
        "deepseek2-sigmoid",
        "deepseek2",
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            LATENT
            | {"q_lora_rank": 32, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
            | {"num_mtp_layers": 0},
        ),
        {"down_exps": Kind.Q5_1, "exps": Kind.Q8_0, "attn": Kind.Q8_0, "ffn": Kind.Q8_0},
    ),
    *(
        Sample(
            f"{architecture}-q8_0", architecture, family, {"gate_exps": Kind.Q4_0, "": Kind.Q8_0}
        )
        for architecture, family in CORRECTED.items()
    ),
    Sample(
        "solar-open-q8_0",
        "glm4moe",
        Family("solar_open", "SolarOpenForCausalLM", SIZES | turned(1.0) | {"n_shared_experts": 1}),
        {"gate_exps": Kind.Q4_0, "": Kind.Q8_0},
    ),
    *(
        Sample(
            name,
            name.split("-")[0],
            family,
            {"conv1d": Kind.F32, "ssm_a": Kind.F32, "gate_exps": Kind.Q4_0, "": Kind.Q8_0},
        )
        for name, family in (("qwen35moe-q8_0", LINEAR), ("qwen3next-ssm_in", NEXT))
    ),
    Sample(
        "qwen3next-q5_1",
        "qwen3next",
        NEXT,
        {"conv1d": Kind.F32, "ssm_a": Kind.F32, "down": Kind.Q8_0, "_qkv": Kind.Q8_0}
        | {"": Kind.Q5_1},
        is_fused=True,
    ),
    Sample(
        "qwen3moe-f16",
        "qwen3moe",
        Family("qwen3_moe", "Qwen3MoeForCausalLM", {"hidden_size": 64, "norm_topk_prob": True}),
        {"": Kind.F16},
    ),
    Sample(
        "olmoe-bf16",
        "olmoe",
        Family("olmoe", "OlmoeForCausalLM", {"hidden_size": 64} | ALL_HEADS),
        is_fused=True,
    ),
]


def write(sample: Sample, folder: Path, *, most_tensors: int = 0) -> Written:
    """Writes a random model of the sample's family, and the plain twin."""
    model = tiny_checkpoints.tiny_model(sample.family).bfloat16()
    plain = folder / "plain"
    tiny_checkpoints.save(model, plain, sharded=False)
    stored = {name: t.float() for name, t in load_file(plain / "model.safetensors").items()}
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, sample.architecture, split_max_tensors=most_tensors)
    _add_metadata(writer, model.config)
    if sample.architecture == "llama":
        stored = _turned(stored, model.config, 2)
    if is_linear := sample.architecture in ("qwen35moe", "qwen3next"):
        stored = as_in_files(stored, model.config, is_split="ssm_in" not in sample.name)
    values = _add_tensors(writer, sample, stored, model.config.num_hidden_layers)
    if is_linear:
        values = as_in_models(values, model.config)
    if sample.architecture == "llama":
        values = _turned(values, model.config, -1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return Written(sample, min(folder.glob("*.gguf")), plain)


def _turned(tensors: dict[str, torch.Tensor], config: Any, halves: int) -> dict[str, torch.Tensor]:
    """Rows of queries and keys as Llama's files have them, pairs together, or back."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = dict(tensors)
    for name, tensor in tensors.items():
        count = next((number for part, number in heads.items() if part in name), 0)
        if count:
            shape = (halves, -1) if halves > 0 else (-1, 2)
            rows = tensor.unflatten(0, (count, tensor.shape[0] // count)).unflatten(1, shape)
            found[name] = rows.transpose(1, 2).flatten(0, 2).contiguous()
    return found


def _add_tensors(
    writer: Any, sample: Sample, stored: dict[str, torch.Tensor], num_layers: int
) -> dict[str, torch.Tensor]:
    """Adds all weights, and gives their values under the names that they had."""
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch)
    names = gguf.get_tensor_name_map(architecture, num_layers)
    if sample.architecture == "gpt-oss":
        stored = _apart(stored)
    stored = {name.replace(*_CORRECTION): tensor for name, tensor in stored.items()}
    if is_apart := sample.name == "deepseek2-sigmoid":
        stored = heads_apart(stored)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(stored, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        found = EXPERT.fullmatch(name)
        groups[name if found is None else f"{found[1]}.{found[3]}"].append(name)
    values: dict[str, torch.Tensor] = {}
    gates: dict[str, np.ndarray] = {}
    for key, parts in groups.items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        name += ".weight" * name.endswith("sinks")
        kind = sample.kind_of(name)
        codes, found = _written(np.stack([stored[part].numpy() for part in parts]), kind)
        values |= {part: value.contiguous() for part, value in zip(parts, found, strict=True)}
        stacked = codes if len(parts) > 1 else codes[0]
        if name.endswith("probs_b.bias"):
            stacked = stacked.reshape(-1)
        if name.endswith("ffn_gate_inp_shexp.weight"):
            stacked = stacked[0]  # a vector in the files of llama.cpp
        if sample.is_fused and "gate_exps" in name:
            gates[name] = stacked
            continue
        if sample.is_fused and "up_exps" in name:
            gate = gates[name.replace("up_exps", "gate_exps")]
            name, stacked = name.replace("up", "gate_up"), np.concatenate((gate, stacked), axis=1)
        writer.add_tensor(name, stacked, raw_dtype=kind)
    values = {name.replace(*_CORRECTION[::-1]): tensor for name, tensor in values.items()}
    if is_apart:
        return heads_together(values)
    return _together(values) if sample.architecture == "gpt-oss" else values


def _apart(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of gpt-oss one by one, rows of gate and up apart and outputs first, as files have."""
    found = {}
    for name, tensor in stored.items():
        stem, is_stack, part = name.partition(".experts.")
        part, _, is_bias = part.partition("_proj")
        if not is_stack or is_bias not in ("", "_bias"):
            found[name] = tensor
            continue
        rows = tensor if is_bias else tensor.transpose(1, 2)
        slices = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if part == "gate_up" else {part: rows}
        for own_name, matrices in slices.items():
            for expert, matrix in enumerate(matrices):
                end = "bias" if is_bias else "weight"
                found[f"{stem}.experts.{expert}.{own_name}_proj.{end}"] = matrix.contiguous()
    return found


def _together(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `_apart` took apart."""
    stems = {name.partition(".experts.")[0] for name in values if ".experts." in name}
    for stem in stems:
        for end in ("weight", "bias"):
            experts: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
            for part, found in experts.items():
                while (name := f"{stem}.experts.{len(found)}.{part}_proj.{end}") in values:
                    found.append(values.pop(name))
            gate, up, down = map(torch.stack, experts.values())
            both = torch.stack((gate, up), dim=2).flatten(1, 2)
            for part, tensor in (("gate_up", both), ("down", down)):
                suffix = "" if end == "weight" else "_bias"
                turned = tensor.transpose(1, 2) if end == "weight" else tensor
                values[f"{stem}.experts.{part}_proj{suffix}"] = turned.contiguous()
    return values


def _written(weights: np.ndarray, kind: Kind) -> tuple[np.ndarray, torch.Tensor]:
    """Numbers as the file has them, and what they stand for."""
    codes = gguf.quantize(weights, kind) if kind in WRITTEN_BY_GGUF else _any_codes(weights, kind)
    return codes, torch.from_numpy(np.array(gguf.dequantize(codes, kind), dtype=np.float32))


def _any_codes(weights: np.ndarray, kind: Kind) -> np.ndarray:
    """Random codes of a type that nothing here quantises to, which stand for numbers as large."""
    name = kind.name.lower()
    size = gguf.GGML_QUANT_SIZES[kind]
    generator = torch.Generator().manual_seed(weights.size)
    count = weights.size // size[0]
    blocks = any_blocks(name, count, generator)
    for place in HALVES[name]:
        blocks[:, place : place + 2] = torch.tensor([1.0]).half().view(torch.uint8)
    scale = weights.std() / gguf.dequantize(blocks.numpy(), kind).std()
    for place in HALVES[name]:
        blocks[:, place : place + 2] = torch.tensor([float(scale)]).half().view(torch.uint8)
    return blocks.numpy().reshape(*weights.shape[:-1], -1)


def _add_metadata(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if (width := getattr(config, "intermediate_size", None)) is not None:
        writer.add_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type.startswith("deepseek"):
        add_latent_attention(writer, config)
    elif config.model_type in ("glm4_moe", "solar_open", "ernie4_5_moe", "minimax_m2"):
        add_corrected_gates(writer, config)
    elif config.model_type in ("qwen3_5_moe_text", "qwen3_next"):
        add_linear_attention(writer, config)
    else:
        writer.add_expert_count(config.num_experts)
    writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", width))
    if (shared := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(shared)
    writer.add_expert_used_count(getattr(config, "moe_k", None) or config.num_experts_per_tok)
    if config.model_type == "gpt_oss":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        positions = config.rope_parameters
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(positions["factor"])
        length = positions["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(length)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * 90 + [3] * 6)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(95)
