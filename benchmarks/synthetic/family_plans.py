"""What the synthetic checkpoints of each family are made of, and their configurations.

Routing depends on the token: attention output and expert outputs are scaled down and token
embeddings up, so that the residual stream keeps the direction of the token's embedding and text
with repeated tokens repeats its experts. A plain random model would route nearly all tokens alike
and flatter every cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_runtime.benchmarks.synthetic.drawn_tensors import Stored, TensorPlan
from moe_runtime.benchmarks.synthetic.model_shapes import (
    GptOssShape,
    GroupedShape,
    MixtralShape,
    ModelShape,
    Qwen3Fp8Shape,
    Qwen3Shape,
)

WEIGHT_STD = 0.02
OUTPUT_SCALE = 1e-3
EMBEDDING_SCALE = 50.0
SMALL_STD = WEIGHT_STD * OUTPUT_SCALE
MAX_POSITIONS = 16384


def plan_tensors(shape: ModelShape) -> Iterator[TensorPlan]:
    """Every weight of the checkpoint in the order of its layers."""
    table = (shape.vocab_size, shape.model_width)
    yield TensorPlan("model.embed_tokens.weight", table, WEIGHT_STD * EMBEDDING_SCALE)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        if isinstance(shape, GptOssShape):
            yield from _gpt_oss_layer(shape, prefix)
        elif isinstance(shape, Qwen3Shape):
            yield from _qwen3_layer(shape, prefix)
        elif isinstance(shape, MixtralShape):
            yield from _mixtral_layer(shape, prefix)
        else:
            yield from _olmoe_layer(shape, prefix)
    yield TensorPlan("model.norm.weight", (shape.model_width,), None)
    yield TensorPlan("lm_head.weight", table, WEIGHT_STD)


def config_of(shape: ModelShape) -> dict[str, object]:
    """The content of `config.json`."""
    if isinstance(shape, GptOssShape):
        return _gpt_oss_config(shape)
    if isinstance(shape, Qwen3Shape):
        return _qwen3_config(shape)
    if isinstance(shape, MixtralShape):
        return _mixtral_config(shape)
    return _olmoe_config(shape)


def _olmoe_layer(shape: ModelShape, prefix: str) -> Iterator[TensorPlan]:
    width = shape.model_width
    yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
    yield from _separate_experts(shape, prefix, "bf16")
    yield TensorPlan(f"{prefix}.mlp.gate.weight", (shape.num_experts, width), WEIGHT_STD)
    yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)
    for part, std in (("q", WEIGHT_STD), ("k", WEIGHT_STD), ("v", WEIGHT_STD), ("o", SMALL_STD)):
        yield TensorPlan(f"{prefix}.self_attn.{part}_proj.weight", (width, width), std)
    yield TensorPlan(f"{prefix}.self_attn.q_norm.weight", (width,), None)
    yield TensorPlan(f"{prefix}.self_attn.k_norm.weight", (width,), None)


def _qwen3_layer(shape: Qwen3Shape, prefix: str) -> Iterator[TensorPlan]:
    width, stored = shape.model_width, "bf16"
    if isinstance(shape, Qwen3Fp8Shape):
        stored = "fp8"
    yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
    yield from _separate_experts(shape, prefix, stored)
    yield TensorPlan(f"{prefix}.mlp.gate.weight", (shape.num_experts, width), WEIGHT_STD)
    yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)
    yield from _grouped_attention(shape, prefix, stored)
    yield TensorPlan(f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,), None)
    yield TensorPlan(f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,), None)


def _mixtral_layer(shape: MixtralShape, prefix: str) -> Iterator[TensorPlan]:
    width, hidden, block = shape.model_width, shape.expert_width, f"{prefix}.block_sparse_moe"
    yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
    for expert in range(shape.num_experts):
        stem = f"{block}.experts.{expert}"
        yield TensorPlan(f"{stem}.w1.weight", (hidden, width), WEIGHT_STD)
        yield TensorPlan(f"{stem}.w2.weight", (width, hidden), SMALL_STD)
        yield TensorPlan(f"{stem}.w3.weight", (hidden, width), WEIGHT_STD)
    yield TensorPlan(f"{block}.gate.weight", (shape.num_experts, width), WEIGHT_STD)
    yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)
    yield from _grouped_attention(shape, prefix, "bf16")


def _gpt_oss_layer(shape: GptOssShape, prefix: str) -> Iterator[TensorPlan]:
    width, hidden, experts = shape.model_width, shape.expert_width, shape.num_experts
    stem = f"{prefix}.mlp.experts"
    yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
    rows = (experts, 2 * hidden, width)
    yield TensorPlan(f"{stem}.gate_up_proj", rows, WEIGHT_STD, "mxfp4")
    yield TensorPlan(f"{stem}.gate_up_proj_bias", (experts, 2 * hidden), WEIGHT_STD)
    yield TensorPlan(f"{stem}.down_proj", (experts, width, hidden), SMALL_STD, "mxfp4")
    yield TensorPlan(f"{stem}.down_proj_bias", (experts, width), SMALL_STD)
    yield TensorPlan(f"{prefix}.mlp.router.weight", (experts, width), WEIGHT_STD)
    yield TensorPlan(f"{prefix}.mlp.router.bias", (experts,), SMALL_STD)
    yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)
    yield from _grouped_attention(shape, prefix, "bf16")
    for part, num_rows in (("q", shape.query_width), ("k", shape.kv_width), ("v", shape.kv_width)):
        yield TensorPlan(f"{prefix}.self_attn.{part}_proj.bias", (num_rows,), WEIGHT_STD)
    yield TensorPlan(f"{prefix}.self_attn.o_proj.bias", (width,), SMALL_STD)
    yield TensorPlan(f"{prefix}.self_attn.sinks", (shape.num_heads,), WEIGHT_STD)


def _separate_experts(shape: ModelShape, prefix: str, stored: Stored) -> Iterator[TensorPlan]:
    width, hidden = shape.model_width, shape.expert_width
    for expert in range(shape.num_experts):
        stem = f"{prefix}.mlp.experts.{expert}"
        yield TensorPlan(f"{stem}.down_proj.weight", (width, hidden), SMALL_STD, stored)
        yield TensorPlan(f"{stem}.gate_proj.weight", (hidden, width), WEIGHT_STD, stored)
        yield TensorPlan(f"{stem}.up_proj.weight", (hidden, width), WEIGHT_STD, stored)


def _grouped_attention(shape: GroupedShape, prefix: str, stored: Stored) -> Iterator[TensorPlan]:
    width, stem = shape.model_width, f"{prefix}.self_attn"
    for part, num_rows in (("q", shape.query_width), ("k", shape.kv_width), ("v", shape.kv_width)):
        yield TensorPlan(f"{stem}.{part}_proj.weight", (num_rows, width), WEIGHT_STD, stored)
    yield TensorPlan(f"{stem}.o_proj.weight", (width, shape.query_width), SMALL_STD, stored)


def _common_config(shape: ModelShape) -> dict[str, object]:
    return {
        "attention_dropout": 0.0,
        "eos_token_id": shape.vocab_size - 1,
        "hidden_act": "silu",
        "hidden_size": shape.model_width,
        "initializer_range": WEIGHT_STD,
        "intermediate_size": shape.expert_width,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": shape.num_heads,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.num_layers,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _olmoe_config(shape: ModelShape) -> dict[str, object]:
    return _common_config(shape) | {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_experts": shape.num_experts,
        "num_key_value_heads": shape.num_heads,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
    }


def _qwen3_config(shape: Qwen3Shape) -> dict[str, object]:
    config = _common_config(shape) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": shape.head_dim,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.expert_width,
        "norm_topk_prob": True,
        "num_experts": shape.num_experts,
        "num_key_value_heads": shape.num_kv_heads,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
    }
    if isinstance(shape, Qwen3Fp8Shape):
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    return config


def _mixtral_config(shape: MixtralShape) -> dict[str, object]:
    return _common_config(shape) | {
        "architectures": ["MixtralForCausalLM"],
        "head_dim": shape.head_dim,
        "model_type": "mixtral",
        "num_key_value_heads": shape.num_kv_heads,
        "num_local_experts": shape.num_experts,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    }


def _gpt_oss_config(shape: GptOssShape) -> dict[str, object]:
    kinds = ("sliding_attention", "full_attention")
    return _common_config(shape) | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "head_dim": shape.head_dim,
        "layer_types": [kinds[layer % 2] for layer in range(shape.num_layers)],
        "model_type": "gpt_oss",
        "num_key_value_heads": shape.num_kv_heads,
        "num_local_experts": shape.num_experts,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    }
