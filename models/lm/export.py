"""Exports a trained model as a Hugging Face checkpoint that computes the same, and imports one.

Three architectures have our blocks: Qwen3 (no experts), Qwen3-MoE (softmax gate) and GLM-4-MoE
(sigmoid gate, selection bias, expert groups, shared experts). One tensor for every matrix of every
expert, so that a runtime can read a single expert.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from moe_runtime.checkpoints.safetensors_index import INDEX_FILE_NAME, read_checkpoint_index
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.files import replace_folder
from moe_runtime.layer import MoELayer
from moe_runtime.models.lm.blocks import Block, DenseFeedForward
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.routing import Gate, GroupLimitedTopK, SigmoidTopK, SoftmaxTopK, make_gate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Family = Literal["qwen3", "qwen3_moe", "glm4_moe"]


def hugging_face_family(config: LanguageModelConfig) -> Family:
    """The Hugging Face architecture that computes the same."""
    if config.moe is None:
        return "qwen3"
    gate = _gate(config, config.moe)
    family: Family = "qwen3_moe" if type(gate) is SoftmaxTopK else "glm4_moe"
    obstacles = list(_obstacles(config, config.moe, gate))
    if obstacles:
        raise UnsupportedModelError(
            f"no Hugging Face architecture expresses this model ({family} is the nearest): "
            f"{'; '.join(obstacles)}"
        )
    return family


def hugging_face_config(
    config: LanguageModelConfig, special_tokens: Mapping[str, int | None], dtype: torch.dtype
) -> "PreTrainedConfig":
    """The configuration of the same model in `transformers`."""
    from transformers import Glm4MoeConfig, Qwen3Config, Qwen3MoeConfig

    family = hugging_face_family(config)
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": 1.0,
        },
        **special_tokens,
    }
    if config.intermediate_size is not None:
        common["intermediate_size"] = config.intermediate_size
    if config.moe is None:
        return Qwen3Config(**common)
    # these need a width even without dense layers
    common.setdefault("intermediate_size", config.moe.top_k * config.moe.intermediate_size)
    common |= {
        "moe_intermediate_size": config.moe.intermediate_size,
        "num_experts_per_tok": config.moe.top_k,
    }
    gate = _gate(config, config.moe)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**common, **_qwen3_moe(config, config.moe, gate))
    return Glm4MoeConfig(**common, **_glm4_moe(config, config.moe, gate))


def _gate(config: LanguageModelConfig, moe: ExpertsConfig) -> Gate:
    return make_gate(moe.gate, config.hidden_size, moe.num_experts, moe.top_k, **moe.gate_options)


def _obstacles(config: LanguageModelConfig, moe: ExpertsConfig, gate: Gate) -> Iterator[str]:
    if moe.activation != "swiglu":
        yield f"its experts compute swiglu, not {moe.activation}"
    if moe.zero_experts is not None:
        yield "it has no zero-computation experts (zero_experts)"
    if moe.bias:
        yield "its experts have no biases"
    if moe.shortcut is not None:
        yield "its experts read their own block's representation (shortcut)"
    if moe.capacity_factor is not None or gate.capacity is not None:
        yield "it never drops tokens, so capacity_factor must be omitted"
    if moe.shared_expert_gate:
        yield "its shared experts have no gate (shared_expert_gate)"
    if type(gate) is SoftmaxTopK:
        if gate.bias_update_rate:
            yield "its softmax gate has no selection bias (use sigmoid_topk)"
        if gate.scale != 1.0:
            yield "its gate has no scale"
        if moe.shared_experts:
            yield "it has no shared experts (use sigmoid_topk)"
        return
    if not isinstance(gate, SigmoidTopK | GroupLimitedTopK):
        yield f"it has no gate {moe.gate!r} (softmax_topk, sigmoid_topk and group_limited_topk are)"
        return
    if isinstance(gate, GroupLimitedTopK):
        if gate.score != "sigmoid":
            yield f"its gate scores with sigmoid, not {gate.score}"
        if gate.group_score_experts != 2 and gate.num_expert_groups > 1:
            yield "its groups are scored by their two best experts (group_score_experts)"
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        yield f"its dense layers are the first ones, not {list(config.dense_layers)}"


def _qwen3_moe(config: LanguageModelConfig, moe: ExpertsConfig, gate: Gate) -> dict[str, Any]:
    assert isinstance(gate, SoftmaxTopK)
    return {
        "num_experts": moe.num_experts,
        # Softmax over the chosen scores equals renormalising.
        "norm_topk_prob": gate.renormalize or gate.softmax == "after",
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "router_aux_loss_coef": (moe.loss_weights or {}).get("load_balance", 0.0),
    }


def _glm4_moe(config: LanguageModelConfig, moe: ExpertsConfig, gate: Gate) -> dict[str, Any]:
    assert isinstance(gate, SigmoidTopK | GroupLimitedTopK)
    is_grouped = isinstance(gate, GroupLimitedTopK)
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": len(config.dense_layers),
        "norm_topk_prob": gate.renormalize,
        "routed_scaling_factor": gate.scale,
        "n_group": gate.num_expert_groups if is_grouped else 1,
        "topk_group": gate.num_limited_groups if is_grouped else 1,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    }


_SHARD_BYTES = 5 * 10**9
_ARCHITECTURES: Mapping[Family, str] = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
_FP32_SUFFIX = "e_score_correction_bias"


def export_hugging_face(
    model: LanguageModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    special_tokens: Mapping[str, int | None] | None = None,
    also: Callable[[Path], object] | None = None,
) -> None:
    """Writes `config.json`, `generation_config.json` and the safetensors files, all or none.

    A selection bias stays float32; `also` writes what else belongs into the folder.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    family = hugging_face_family(model.config)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = hugging_face_config(model.config, {**ids, **(special_tokens or {})}, dtype)
    tensors = dict(hugging_face_tensors(model, dtype))
    shards = split_torch_state_dict_into_shards(tensors, max_shard_size=_SHARD_BYTES)
    config.architectures = [_ARCHITECTURES[family]]

    def keeps(path: Path) -> bool:
        return path.name != INDEX_FILE_NAME and not path.match("model*.safetensors")

    with replace_folder(folder, keeps=keeps) as new:
        for file, names in shards.filename_to_tensors.items():
            save_file({name: tensors[name] for name in names}, new / file, {"format": "pt"})
            # safetensors makes files readable by their owner only
            (new / file).chmod(0o644)
        if shards.is_sharded:
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (new / INDEX_FILE_NAME).write_text(text, encoding="utf-8")
        config.save_pretrained(new)
        GenerationConfig.from_model_config(config).save_pretrained(new)
        if also is not None:
            also(new)


def hugging_face_tensors(model: LanguageModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint under its Hugging Face name, on the CPU."""
    for name, tensor in hugging_face_views(model):
        kept = torch.float32 if name.endswith(_FP32_SUFFIX) else dtype
        yield name, tensor.detach().to("cpu", kept).contiguous()


def hugging_face_views(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint under its Hugging Face name, in the model's own memory."""
    family = hugging_face_family(model.config)
    yield "model.embed_tokens.weight", model.embedding.weight
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{number}"
        yield f"{prefix}.input_layernorm.weight", block.attention_norm.weight
        yield f"{prefix}.post_attention_layernorm.weight", block.feed_forward_norm.weight
        yield from _attention(block, f"{prefix}.self_attn")
        if isinstance(block.feed_forward, MoELayer):
            yield from _routed(block.feed_forward, f"{prefix}.mlp")
            if family == "glm4_moe":
                yield from _glm4_extras(block.feed_forward, f"{prefix}.mlp")
        else:
            assert isinstance(block.feed_forward, DenseFeedForward)
            dense = block.feed_forward
            yield from _gated(dense.gate_up_proj.weight, dense.down_proj.weight, f"{prefix}.mlp")
    yield "model.norm.weight", model.norm.weight
    if not model.config.tie_embeddings:
        yield "lm_head.weight", model.output.weight


def _attention(block: Block, prefix: str) -> Iterator[tuple[str, Tensor]]:
    attention = block.attention
    heads = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
    parts = attention.qkv_proj.weight.split([count * attention.head_dim for count in heads])
    for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
        yield f"{prefix}.{name}.weight", part
    yield f"{prefix}.o_proj.weight", attention.o_proj.weight
    yield f"{prefix}.q_norm.weight", attention.q_norm
    yield f"{prefix}.k_norm.weight", attention.k_norm


def _routed(layer: MoELayer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}.gate.weight", layer.gate.get_parameter("weight")
    gate_up = layer.experts.get_parameter("gate_up_proj")
    down = layer.experts.get_parameter("down_proj")
    for expert in range(layer.gate.num_experts):
        yield from _gated(gate_up[expert], down[expert], f"{prefix}.experts.{expert}")


def _glm4_extras(layer: MoELayer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors that GLM-4-MoE always has: a selection bias, and shared experts (width 0 if none)."""
    bias = dict(layer.gate.named_buffers()).get("expert_bias")
    zeros = torch.zeros(layer.gate.num_experts)
    yield f"{prefix}.gate.{_FP32_SUFFIX}", zeros if bias is None else bias
    gate_up, down = zeros.new_zeros(0, layer.hidden_size), zeros.new_zeros(layer.hidden_size, 0)
    if layer.shared is not None:
        gate_up = layer.shared.get_parameter("gate_up_proj.weight")
        down = layer.shared.get_parameter("down_proj.weight")
    yield from _gated(gate_up, down, f"{prefix}.shared_experts")


def _gated(gate_up: Tensor, down: Tensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
    gate, up = gate_up.chunk(2)
    yield f"{prefix}.gate_proj.weight", gate
    yield f"{prefix}.up_proj.weight", up
    yield f"{prefix}.down_proj.weight", down


# Settings that decide numbers or shapes.
_DECISIVE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "tie_word_embeddings", "attention_bias", "use_sliding_window"),
    *("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("mlp_only_layers", "decoder_sparse_step", "n_routed_experts", "n_shared_experts"),
    *("first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group", "use_qk_norm"),
)
_MOST_NAMED = 8


@torch.no_grad()
def import_hugging_face(model: LanguageModel, folder: Path) -> None:
    """Copies the weights of a Hugging Face checkpoint into a model of the same architecture.

    Where tensors are missing or others are there, they are named and the model is unchanged.
    """
    problems = list(_other_settings(model, folder))
    if problems:
        raise CheckpointError(
            f"{folder}: its config.json describes another model: {_listed(problems)}"
        )
    index = read_checkpoint_index(folder)
    views = dict(hugging_face_views(model))
    problems = [f"missing {name}" for name in views if name not in index]
    # a checkpoint may repeat the embedding as output projection
    spare = {"lm_head.weight"} if model.config.tie_embeddings else set[str]()
    problems += [f"unexpected {name}" for name in index if name not in views.keys() | spare]
    problems += [
        f"{name} must be {list(views[name].shape)}, got {list(entry.shape)}"
        for name, entry in index.items()
        if name in views and entry.shape != tuple(views[name].shape)
    ]
    if problems:
        raise CheckpointError(f"{folder}: its tensors do not fit the model: {_listed(problems)}")
    tensors = _read({name: entry.file for name, entry in index.items() if name in views})
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    placeless = [
        name
        for name, view in views.items()
        if view.untyped_storage().data_ptr() not in own and bool(tensors[name].any())
    ]
    if placeless:
        raise CheckpointError(f"{folder}: the model has no place for {_listed(placeless)}")
    for name, view in views.items():
        view.copy_(tensors[name])


def _other_settings(model: LanguageModel, folder: Path) -> Iterator[str]:
    from transformers import AutoConfig

    hugging_face_family(model.config)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: no config.json here; expected the folder of a Hugging Face checkpoint"
        )
    try:
        theirs: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    except (ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{folder}: config.json cannot be used: {reason}") from None
    ours = hugging_face_config(model.config, {}, torch.float32).to_dict()
    routed = model.config.moe is not None and not model.config.dense_layers
    for name in _DECISIVE:
        if name == "intermediate_size" and routed:
            continue  # there are no dense layers
        expected, got = _comparable(ours.get(name)), _comparable(theirs.get(name))
        if expected != got:
            yield f"{name} is {got!r}, this model's is {expected!r}"


def _comparable(value: Any) -> Any:
    """A setting; absent, false and empty are equal."""
    if isinstance(value, Mapping):
        # the default rotation is a whole one
        return {"partial_rotary_factor": 1.0, **value}
    return value or None


def _read(files: Mapping[str, Path]) -> dict[str, Tensor]:
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as reader:
            for name in files:
                if files[name] == file:
                    tensors[name] = reader.get_tensor(name)
    return tensors


def _listed(problems: list[str]) -> str:
    rest = len(problems) - _MOST_NAMED
    shown = "; ".join(problems[:_MOST_NAMED])
    return f"{shown}; and {rest} more" if rest > 0 else shown
