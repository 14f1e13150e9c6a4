"""Model families by ggml's architecture name: configuration and tensor names.

Sizes come from the tensors if possible. Settings that metadata do not have (whether chosen weights
are normalised) are constants of the architecture, as in llama.cpp.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.families import give_experts_interface
from moe_runtime.checkpoints.gguf.header import GgufHeader, GgufTensor
from moe_runtime.checkpoints.strict_json import clipped, one_line
from moe_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TABLES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_SINKS = "self_attn.sinks"
CORRECTION = "e_score_correction_bias"
DT_BIAS, A_LOG = "linear_attn.dt_bias", "linear_attn.A_log"
_WHOLE = (_SINKS, CORRECTION, DT_BIAS, A_LOG)  # parts with the names of their tensors
SHARED_EXPERTS = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
DENSE = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
MIXTRAL_EXPERTS = {
    f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.")
BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+?)(?:\.(weight|bias))?")

FIELDS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
EXPERT_WIDTH = ("ffn_down_exps", -1)
SHARED_SIZES = {
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": ("ffn_gate_shexp", -2),
}
FUSED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
"""Tensors that contain several parts of each expert, with the same number of rows."""


class ValueChange(NamedTuple):
    """Converts values of a file to the model's."""

    convert: Callable[[Tensor], Tensor]  # maps a tensor of the model's sizes
    moves_rows: bool = False
    moved_columns: int = 0  # columns that stay adjacent if it only moves columns, else 0
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple  # the file's sizes to the model's


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    model_type: str
    model_class: str
    parts: Mapping[str, str]  # of a layer: ggml's names to those of `transformers`
    sizes: Mapping[str, tuple[str, int]]  # settings taken from a part's size: part, dimension
    constants: Mapping[str, Any] = field(default_factory=dict)  # settings
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)  # settings to key endings
    rope: Mapping[str, Any] = field(default_factory=dict)  # constants of extended positions
    conversions: Callable[[], list[private.WeightTransform]] = list
    adapt: Callable[[PreTrainedModel], None] = give_experts_interface  # changes the model
    rotated: float | None = None  # rotated share of a head; None: the family's default
    changes: Mapping[str, ValueChange] = field(default_factory=dict)  # by part; also the last norm


def _interleaved_experts() -> list[private.WeightTransform]:
    """gpt-oss: gate and up rows alternate, and weights are transposed."""
    experts = "mlp.experts"
    gate_up = [f"{experts}.*.{part}_proj" for part in ("gate", "up")]
    merged = [private.MergeModulelist(0), private.Concatenate(1), private.Interleave(1, True)]

    def convert(sources: list[str], target: str, *operations: Any) -> private.WeightTransform:
        return private.WeightConverter(sources, f"{experts}.{target}", [*operations])

    return [
        convert([f"{p}.weight" for p in gate_up], "gate_up_proj", *merged, private.Transpose(1, 2)),
        convert([f"{part}.bias" for part in gate_up], "gate_up_proj_bias", *merged),
        convert([f"{experts}.*.down_proj.weight"], "down_proj", merged[0], private.Transpose(1, 2)),
        convert([f"{experts}.*.down_proj.bias"], "down_proj_bias", merged[0]),
    ]


def _turned_heads() -> list[private.WeightTransform]:
    """Llama: the two values of a rotation are adjacent in files."""

    class OfKeys(private.PermuteForRope):
        """The same for key heads, which may be fewer."""

        def convert(self, *parts: Any, config: Any, **rest: Any) -> Any:
            heads = SimpleNamespace(num_attention_heads=config.num_key_value_heads)
            return super().convert(*parts, config=heads, **rest)

    turns = {"self_attn.q_proj.weight": private.PermuteForRope, "self_attn.k_proj.weight": OfKeys}
    # transformers 5.17 permutes only layers named here
    return [
        private.WeightConverter(name, name, [turn(permute_layer_names=[name])])
        for name, turn in turns.items()
    ]


ARCHITECTURES = {
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": _SINKS,
            "ffn_gate_inp": "mlp.router",
            **EXPERTS,
        },
        {"intermediate_size": EXPERT_WIDTH},
        fields={
            **FIELDS,
            "head_dim": "attention.key_length",
            "sliding_window": "attention.sliding_window",
        },
        rope={"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        conversions=_interleaved_experts,
    ),
    "llama": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        {**ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate", **MIXTRAL_EXPERTS},
        {"intermediate_size": EXPERT_WIDTH},
        {"sliding_window": None},
        conversions=_turned_heads,
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        {**ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate", **EXPERTS},
        {"intermediate_size": EXPERT_WIDTH},
        {"norm_topk_prob": False},
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**ATTENTION, **SHARED_EXPERT, "ffn_gate_inp": "mlp.gate", **EXPERTS},
        SHARED_SIZES,
        {"norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**ATTENTION, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate", **EXPERTS},
        {"moe_intermediate_size": EXPERT_WIDTH, "head_dim": ("attn_q_norm", -1)},
        {"norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
}
"""By `general.architecture`, for architectures whose files all have the same row."""


def architecture_of(header: GgufHeader) -> Architecture:
    name = header.name
    if isinstance(name, str) and name in _BY_FILE:
        return _BY_FILE[name](header)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted([*ARCHITECTURES, *_BY_FILE]))
        found = f"architecture {clipped(name)}; its safetensors checkpoint may be supported"
        header.unsupported(f"a GGUF file of {known}", found)
    return ARCHITECTURES[name]


def named_weights(
    header: GgufHeader, architecture: Architecture
) -> Iterator[tuple[str, GgufTensor, int]]:
    """The name of each tensor in checkpoints of `transformers`, and the matrix number.

    Yields name, tensor and -1, or the number of a matrix in the stack that the tensor is. Gates and
    ups in one tensor are a stack of both, one after the other.
    """
    num_layers = num_layers_of(header)
    for tensor in header.tensors:
        if tensor.name in _TABLES:
            yield _TABLES[tensor.name], tensor, -1
            continue
        layer = _LAYER.match(tensor.name)
        if num_layers is not None and layer is not None and int(layer[1]) >= num_layers:
            continue
        found = BLOCK.fullmatch(tensor.name)
        own = "" if found is None else found[2]
        parts = [architecture.parts.get(name) for name in FUSED.get(own, (own,))]
        part = parts[0]
        is_whole = part is not None and part.endswith(_WHOLE)
        if found is None or part is None or (found[3] is None and not is_whole):
            raise UnsupportedModelError(
                f"{one_line(str(header.file))}: no part of {architecture.model_class} is called "
                f"{clipped(tensor.name)} in GGUF files; expected a file that llama.cpp's converter "
                "wrote, without additions"
            )
        prefix, end = f"model.layers.{int(found[1])}.", f".{found[3]}"
        if "{}" not in part:
            yield prefix + part + ("" if is_whole else end), tensor, -1
            continue
        num_dims = 2 if found[3] == "bias" else 3
        if len(tensor.shape) != num_dims:
            header.refuse(f"{tensor.name} of {num_dims} dimensions", clipped([*tensor.shape]))
        num_experts, num_rows, *rest = tensor.shape
        if num_rows % len(parts):
            header.refuse(f"{tensor.name} of as many rows for gates as for ups", str(num_rows))
        shape = (num_experts * len(parts), num_rows // len(parts), *rest)
        stack = replace(tensor, shape=shape)
        names = itertools.product(range(num_experts), parts)
        for number, (expert, part) in enumerate(names):
            yield prefix + str(part).format(expert) + end, stack, number


def num_layers_of(header: GgufHeader) -> int | None:
    """Layers of the model itself if prediction layers follow them, else None."""
    every, further = header.value("block_count"), header.value("nextn_predict_layers")
    if type(every) is int and type(further) is int and 0 < further < every:
        return every - further
    return None


_REALS = ("_epsilon", "rope.freq_base", "_factor", "scaling.factor", "_linear", "_fast", "_slow")
_MAY_BE_0 = ("_token_id", "leading_dense_block_count", "expert_shared_count", "sliding_window")
_TOKEN_ROLES = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_NEUTRAL = {
    **{"temperature_scale": (0,), "_scale": (0, 1), "_layer_step": (0, 1)},
    **{"_group_count": (0, 1), "_group_used_count": (0, 1)},
}
"""Values without effect, by key ending; for other keys 0 and false have none."""
_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`
_DESCRIPTIVE = (
    *("vocab_size", "feed_forward_length", "expert_feed_forward_length", "expert_shared_count"),
    *("expert_shared_feed_forward_length", "attention.recurrent_layers", "full_attention_interval"),
    *("rope.scaling.finetuned", "rope.dimension_sections", "rope.scaling.original_context_length"),
    *("attention.head_count_kv", "tensor_data_layout"),  # latent attention has no key-value heads
)
"""Keys that change no number: sizes that tensors have, too, and settings for images."""


def settings_of(header: GgufHeader, architecture: Architecture) -> dict[str, Any]:
    """The configuration of a model in `transformers`."""
    metadata, name = header.metadata, header.name
    values: dict[str, Any] = dict(architecture.constants)
    for setting, key in architecture.fields.items():
        if f"{name}.{key}" not in metadata:
            header.refuse(f"{name}.{key} among its metadata", "no such key")
        values[setting] = _number(header, key)
    if (num_layers := num_layers_of(header)) is not None:
        values["num_hidden_layers"] = num_layers
    elif further := header.value("nextn_predict_layers"):
        header.refuse(f"{name}.nextn_predict_layers below block_count", clipped(further))
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        header.refuse("a matrix token_embd.weight", "none")
    values["vocab_size"], values["hidden_size"] = tensors["token_embd.weight"].shape
    parts = {
        found[2]: tensor
        for tensor in reversed(header.tensors)
        if (found := BLOCK.fullmatch(tensor.name)) and found[3] == "weight"
    }
    for setting, (part, dim) in architecture.sizes.items():
        if part in parts and len(parts[part].shape) >= -dim:
            values[setting] = parts[part].shape[dim]
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values["rope_parameters"] = positions = _positions(header, architecture)
    if architecture.rotated is not None:
        positions["partial_rotary_factor"] = architecture.rotated
    for setting, token in _TOKEN_ROLES.items():
        key = f"tokenizer.ggml.{token}_token_id"
        values[setting] = _number(header, key, metadata[key]) if key in metadata else None
    _require_understood(header, values)
    return values


def _require_understood(header: GgufHeader, values: Mapping[str, Any]) -> None:
    """Refuses unused keys of the architecture that would change numbers."""
    theta = values["rope_parameters"]["rope_theta"]
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    turned = header.metadata.get(f"{header.name}.rope.dimension_count", head)
    alike = {
        **dict.fromkeys(("attention.key_length", "attention.value_length"), head),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), head),
        **{"rope.dimension_count": head, "rope.dimension_count_swa": turned},
        **{"rope.freq_base_swa": theta, "embedding_length": values["hidden_size"]},
        **{"attention.causal": True, "expert_gating_func": _SOFTMAX},
        "expert_weights_norm": values.get("norm_topk_prob", True),
        **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"), 1),
        "rope.scaling.yarn_attn_factor": _attention_factor(values["rope_parameters"]),
    }
    for key, value in header.metadata.items():
        own = key.removeprefix(f"{header.name}.")
        if own == "expert_weights_norm" and not isinstance(value, bool):
            header.refuse(f"{key} to be true or false", clipped(value))
        if own == key or own in header.understood or own in _DESCRIPTIVE:
            continue
        neutral = next((found for end, found in _NEUTRAL.items() if own.endswith(end)), (0,))
        expected = alike.get(own, neutral[0])
        is_close = isinstance(value, float) and math.isclose(value, expected, rel_tol=1e-5)
        if value != expected and not is_close and (own in alike or value not in neutral):
            header.unsupported(f"{key} to be {clipped(expected)}", clipped(value))


def _number(header: GgufHeader, key: str, value: Any = None) -> Any:
    """The number of a required key: a positive real number, or a whole number."""
    if value is None:
        value, key = header.value(key), f"{header.name}.{key}"
    least = int(not key.endswith(_MAY_BE_0))
    if key.endswith(_REALS):
        if type(value) is not float or not 0 < value < math.inf:
            header.refuse(f"{key} to be a real number above 0", clipped(value))
    elif type(value) is not int or value < least:
        header.refuse(f"{key} to be a whole number of at least {least}", clipped(value))
    return value


def _positions(header: GgufHeader, architecture: Architecture) -> dict[str, Any]:
    def given(key: str, otherwise: Any = None) -> Any:
        return otherwise if header.value(key) is None else _number(header, key)

    lead, positions = "rope.scaling.", {"rope_theta": given("rope.freq_base", 10000.0)}
    kind = header.value(f"{lead}type", "linear")
    names = (f"{lead}factor", "rope.scale_linear", f"{lead}yarn_beta_fast", f"{lead}yarn_beta_slow")
    factor, old, *_ = map(header.value, names)
    if kind == "none" or (kind == "linear" and factor is None and old is None):
        return {"rope_type": "default", **positions}
    positions |= {"rope_type": kind, "factor": given(names[0], given(names[1]))}
    if kind == "linear":
        return positions
    if kind != "yarn" or positions["factor"] is None:
        expected = f"{header.name}.{lead}type none, linear, or yarn with a factor"
        header.unsupported(expected, clipped(kind))
    length = given(f"{lead}original_context_length", header.value("context_length"))
    scale = given(f"{lead}attn_factor", 1.0)
    positions |= {"original_max_position_embeddings": length, **architecture.rope}
    if scale != 1:
        positions["attention_factor"] = scale * _attention_factor(positions)
    for name in ("beta_fast", "beta_slow"):
        if (number := given(f"{lead}yarn_{name}")) is not None:
            positions[name] = number
    return positions


def _attention_factor(positions: Mapping[str, Any]) -> float:
    """The default factor of queries and keys."""
    return 1 + 0.1 * math.log(max(1.0, positions.get("factor", 1.0)))


_SIZES = {"moe_intermediate_size": EXPERT_WIDTH, "intermediate_size": ("ffn_gate", -2)}
_COMMON = {setting: key for setting, key in FIELDS.items() if "num_experts" not in setting}
_ROUTED = {
    **_COMMON,
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
}
_GATED = {**ATTENTION, "ffn_gate_inp": "mlp.gate", **EXPERTS, **DENSE, **SHARED_EXPERTS}


def glm4moe(header: GgufHeader) -> Architecture:
    """GLM-4.5 to 4.7, and Solar Open."""
    parts, value, head_dim = header.parts, header.value, _head_dim(header)
    rotated = _rotated(header, head_dim)
    _require_sigmoid(header, otherwise=_SIGMOID)
    has_biases = "attn_q.bias" in parts
    if not has_biases and rotated != 1:  # GLM has biases
        expected = f"glm4moe.rope.dimension_count {head_dim} without biases, as Solar Open is"
        header.unsupported(expected, f"{rotated} of it: convert it again, or set the key")
    constants = {
        "head_dim": head_dim,
        "attention_bias": has_biases,
        "use_qk_norm": "attn_q_norm.weight" in parts,
        "first_k_dense_replace": value("leading_dense_block_count", 0),
        **_choice_of_groups(header),
        "num_nextn_predict_layers": 0,
    }
    own = {
        **_GATED,
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b": f"mlp.gate.{CORRECTION}",
    }
    row = ("glm4_moe", "Glm4MoeForCausalLM", own, _SIZES, constants, _ROUTED)
    return Architecture(*row, rotated=rotated)


def ernie4_5_moe(header: GgufHeader) -> Architecture:
    parts, head_dim = header.parts, _head_dim(header)
    if (rotated := _rotated(header, head_dim)) != 1:
        header.unsupported("positions that turn all values of a head", f"{rotated} of them")
    width, shared = (_rows_of(header, f"ffn_gate_{end}.weight") for end in ("exps", "shexp"))
    constants = {
        "head_dim": head_dim,
        "use_bias": "attn_q.bias" in parts,
        "moe_layer_start_index": header.value("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_num_shared_experts": shared // max(1, width),
    }
    fields = {
        **_COMMON,
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    }
    own = {**_GATED, "exp_probs_b": f"mlp.moe_statics.{CORRECTION}"}
    return Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", own, _SIZES, constants, fields)


def minimax_m2(header: GgufHeader) -> Architecture:
    head_dim = _head_dim(header)
    _require_sigmoid(header, otherwise=None)
    own = {
        **ATTENTION,
        **HEAD_NORMS,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": f"block_sparse_moe.{CORRECTION}",
        **MIXTRAL_EXPERTS,
    }
    return Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        own,
        {"intermediate_size": EXPERT_WIDTH},
        {"head_dim": head_dim},
        {
            **_COMMON,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        rotated=_rotated(header, head_dim),
    )


def deepseek2(header: GgufHeader) -> Architecture:
    """DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash."""
    value, parts = header.value, {name.partition(".")[0] for name in header.parts}
    # files of GLM-4.7-Flash may lack the key, but have a correction, which no softmax has
    otherwise = _SIGMOID if "exp_probs_b" in parts else _SOFTMAX
    gating = value("expert_gating_func", otherwise)
    is_normed = bool(value("expert_weights_norm", False))
    if gating not in (_SOFTMAX, _SIGMOID) or (gating == _SOFTMAX and is_normed):
        found = f"expert_gating_func {clipped(gating)}, expert_weights_norm {is_normed}"
        header.unsupported("a softmax whose weights are not normalised, or a sigmoid", found)
    if temperature := value("attention.temperature_scale", 0.0):
        header.unsupported("no attention.temperature_scale", clipped(temperature))
    _require_scaling(header)
    apart = parts & {"attn_kv_b", "attn_k_b", "attn_v_b"}
    if apart not in ({"attn_kv_b"}, {"attn_k_b", "attn_v_b"}):
        found = ", ".join(sorted(apart)) or "none"
        header.refuse("either attn_kv_b, or attn_k_b and attn_v_b", found)
    width, of_values = (
        value(f"attention.{end}_length_mla", value(f"attention.{end}_length"))
        for end in ("key", "value")
    )
    rotated = value("rope.dimension_count", 0)
    if not all(type(size) is int for size in (width, of_values, rotated)) or width <= rotated:
        keys = "deepseek2.attention.key_length and value_length beyond rope.dimension_count"
        header.refuse(keys, clipped([width, of_values, rotated]))
    constants = {
        "num_key_value_heads": value("attention.head_count"),
        "q_lora_rank": value("attention.q_lora_rank") if "attn_q_a" in parts else None,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": of_values,
        **_choice_of_groups(header),
    }
    own = {
        **_GATED,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": _HEADS[0],
        "attn_v_b": _HEADS[1],
    }
    if gating == _SIGMOID:
        own["exp_probs_b"] = f"mlp.gate.{CORRECTION}"
        constants |= {"rope_interleave": True, "num_mtp_layers": 0}
    else:
        is_grouped = constants["n_group"] != 1
        constants["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"
    fields = {
        **_ROUTED,
        "first_k_dense_replace": "leading_dense_block_count",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
    }
    del fields["num_key_value_heads"]
    kind = "3" if gating == _SIGMOID else "2"
    row = (f"deepseek_v{kind}", f"DeepseekV{kind}ForCausalLM", own, _SIZES, constants, fields)
    return Architecture(*row, rope=_yarn(value), conversions=_joined_heads)


def qwen35moe(header: GgufHeader) -> Architecture:
    """Qwen3.5 and 3.6."""
    row = _linear_attention(header)
    num_keys, num_values = (header.value(f"ssm.{e}") for e in ("group_count", "time_step_rank"))
    width = row.constants["linear_value_head_dim"]
    heads = functools.partial(_of_one_key, num_keys=num_keys, num_values=num_values)
    of_values = functools.partial(heads, begin=2 * num_keys * header.value("ssm.state_size"))
    moved = ValueChange(heads, moves_rows=True)
    parts = {
        **row.parts,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    }
    changes = {
        **row.changes,
        parts["attn_qkv"]: ValueChange(of_values, moves_rows=True),
        **{parts[own]: moved for own in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt")},
        parts["ssm_a"]: ValueChange(lambda decay: heads(_logarithm(decay))),
        parts["ssm_conv1d"]: ValueChange(of_values, shape=_of_convolution),
        parts["ssm_out"]: ValueChange(lambda out: heads(out.T).T.contiguous(), moved_columns=width),
    }
    return replace(row, parts=parts, changes=changes)


def qwen3next(header: GgufHeader) -> Architecture:
    """Qwen3-Next."""
    row = _linear_attention(header)
    is_split = not any(tensor.name.endswith(".ssm_in.weight") for tensor in header.tensors)
    return replace(
        row,
        model_type="qwen3_next",
        model_class="Qwen3NextForCausalLM",
        parts={
            **row.parts,
            "attn_qkv": "linear_attn.in_proj_qkvz.qkv",
            "attn_gate": "linear_attn.in_proj_qkvz.z",
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        constants={**row.constants, "norm_topk_prob": True, "decoder_sparse_step": 1},
        adapt=_split_projections if is_split else row.adapt,
    )


def _rows_of(header: GgufHeader, name: str) -> int:
    tensor = header.parts.get(name)
    return 0 if tensor is None or len(tensor.shape) < 2 else tensor.shape[-2]


def _head_dim(header: GgufHeader) -> int:
    rows, heads = _rows_of(header, "attn_q.weight"), header.value("attention.head_count")
    if type(heads) is not int or heads < 1 or not rows or rows % heads:
        header.refuse("a matrix attn_q with as many rows for each head", clipped(heads))
    return rows // heads


def _rotated(header: GgufHeader, head_dim: int) -> float:
    turned = header.value("rope.dimension_count", head_dim)
    if type(turned) is not int or not 0 < turned <= head_dim:
        header.refuse(f"rope.dimension_count of 1 to {head_dim}", clipped(turned))
    return turned / head_dim


def _require_sigmoid(header: GgufHeader, otherwise: int | None) -> None:
    """Refuses other gates; `otherwise` is the default of files without the key."""
    gating = header.value("expert_gating_func", otherwise)
    if gating != _SIGMOID:
        header.unsupported(f"expert_gating_func {_SIGMOID}, a sigmoid", clipped(gating))


def _choice_of_groups(header: GgufHeader) -> dict[str, Any]:
    value = header.value
    return {
        "routed_scaling_factor": value("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(value("expert_weights_norm", False)),
        "n_group": value("expert_group_count", 1),
        "topk_group": value("expert_group_used_count", 1),
    }


_HEADS = ("self_attn.k_b_proj", "self_attn.v_b_proj")
"""Parts of `kv_b_proj`: keys `[heads, rank, width]`, values `[heads, width, rank]`."""


def _joined_heads() -> list[private.WeightTransform]:
    """Stacks keys and values of each head, as in `kv_b_proj`."""

    class OfHeads(private.Concatenate):
        """Transposes the keys' matrices, and joins each with its head's values."""

        def convert(self, input_dict: Any, source_patterns: Any, *rest: Any, **named: Any) -> Any:
            first, second = source_patterns
            keys, values = (
                tensors[0] if isinstance(tensors := input_dict[name], list) else tensors
                for name in (first, second)
            )
            parts = {first: [keys.transpose(1, 2)], second: [values]}
            found = super().convert(parts, source_patterns, *rest, **named)
            return {name: joined.flatten(0, 1) for name, joined in found.items()}

    sources = [f"{name}.weight" for name in _HEADS]
    return [private.WeightConverter(sources, "self_attn.kv_b_proj.weight", [OfHeads(1)])]


def _require_scaling(header: GgufHeader) -> None:
    """Refuses position scaling that only llama.cpp applies to the softmax."""
    lead = "rope.scaling."
    kind, scale = header.value(f"{lead}type", "linear"), header.value(f"{lead}attn_factor", 1.0)
    factor = header.value(f"{lead}factor", header.value("rope.scale_linear", 1.0))
    multiplier = header.value(f"{lead}yarn_log_multiplier", 0.0)
    if kind == "linear" and factor != 1:
        header.unsupported(f"{lead}type yarn or none", f"linear by {clipped(factor)}")
    if type(multiplier) is not float or (kind == "yarn" and not multiplier):
        header.unsupported(f"{lead}yarn_log_multiplier, a real number", clipped(multiplier))
    if scale != 1:
        header.unsupported(f"{lead}attn_factor 1", clipped(scale))


def _yarn(value: Any) -> Mapping[str, Any]:
    """Settings of extended positions; files have a tenth of the softmax scale."""
    named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    given = {setting: value(f"rope.scaling.{key}") for setting, key in named.items()}
    scale = round(10 * value("rope.scaling.yarn_log_multiplier", 0.0), 6)
    found = {setting: number for setting, number in given.items() if number is not None}
    return {"attention_factor": 1.0, "mscale": scale, "mscale_all_dim": scale, **found}


def _linear_attention(header: GgufHeader) -> Architecture:
    size = functools.partial(_number, header)
    num_keys, num_values = size("ssm.group_count"), size("ssm.time_step_rank")
    _, all_widths = size("ssm.state_size"), size("ssm.inner_size")
    if num_values % num_keys or all_widths % num_values:
        expected = "ssm.inner_size in whole heads, ssm.time_step_rank, for each of ssm.group_count"
        header.refuse(expected, clipped([all_widths, num_values, num_keys]))
    head_dim, rotated = size("attention.key_length"), size("rope.dimension_count")
    if rotated > head_dim or rotated % 2:
        header.refuse(f"an even rope.dimension_count up to {head_dim}", clipped(rotated))
    linear = {tensor.name for tensor in header.tensors if tensor.name.endswith(".ssm_a")}
    num_layers = num_layers_of(header) or size("block_count")
    if num_layers > len(header.tensors):
        header.refuse("no more than as many layers as it has tensors", clipped(num_layers))
    kinds = ("full_attention", "linear_attention")
    layer_types = [kinds[f"blk.{i}.ssm_a" in linear] for i in range(num_layers)]
    if kinds[0] not in layer_types:
        header.refuse(f"full attention in one of {num_layers} layers", "ssm_a in each")
    parts = {
        **{own: part for own, part in ATTENTION.items() if own != "ffn_norm"},
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt": DT_BIAS,
        "ssm_a": A_LOG,
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ffn_gate_inp": "mlp.gate",
        **EXPERTS,
        **SHARED_EXPERT,
    }
    norms = ["model.norm", *(parts[n] for n in ("attn_norm", "post_attention_norm", *HEAD_NORMS))]
    return Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        parts,
        SHARED_SIZES,
        {"linear_value_head_dim": all_widths // num_values, "layer_types": layer_types},
        {
            **FIELDS,
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_key_head_dim": "ssm.state_size",
            "linear_num_key_heads": "ssm.group_count",
            "linear_num_value_heads": "ssm.time_step_rank",
            "head_dim": "attention.key_length",
        },
        rotated=rotated / head_dim,
        changes={
            **dict.fromkeys(norms, ValueChange(lambda weight: weight.float() - 1)),
            A_LOG: ValueChange(_logarithm),
            parts["ssm_conv1d"]: ValueChange(lambda weight: weight, shape=_of_convolution),
        },
    )


def _of_one_key(rows: Tensor, *, num_keys: int, num_values: int, begin: int = 0) -> Tensor:
    """Rows of value heads, from `begin` on, grouped by key head."""
    if (len(rows) - begin) % num_values:
        return rows
    in_file = rows[begin:].unflatten(0, (num_values // num_keys, num_keys, -1))
    moved = rows.clone()
    moved[begin:] = in_file.transpose(0, 1).flatten(0, 2)
    return moved


def _of_convolution(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:1], 1, *sizes[1:])


def _logarithm(decay: Tensor) -> Tensor:
    return decay.float().neg().log()


class SplitProjection(nn.Module):
    """`in_proj_qkvz` as one projection of queries, keys and values, and one of gates."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        dim = attention.hidden_size
        self.num_keys = attention.num_k_heads
        self.widths = (attention.key_dim, attention.key_dim, attention.value_dim)
        self.qkv = nn.Linear(dim, sum(self.widths), bias=False)
        self.z = nn.Linear(dim, attention.value_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., 2 * keys + 2 * values]`."""
        parts = (*self.qkv(x).split(self.widths, -1), self.z(x))
        heads = [part.unflatten(-1, (self.num_keys, -1)) for part in parts]
        return torch.cat(heads, -1).flatten(-2)


def _split_projections(model: PreTrainedModel) -> None:
    for module in list(model.modules()):
        if hasattr(module, "in_proj_qkvz"):
            module.in_proj_qkvz = SplitProjection(module)


_BY_FILE: Mapping[str, Callable[[GgufHeader], Architecture]] = {
    "deepseek2": deepseek2,
    "ernie4_5-moe": ernie4_5_moe,
    "glm4moe": glm4moe,
    "minimax-m2": minimax_m2,
    "qwen35moe": qwen35moe,
    "qwen3next": qwen3next,
}
"""Functions for architectures whose files differ. Source: llama.cpp's converter and graphs."""
