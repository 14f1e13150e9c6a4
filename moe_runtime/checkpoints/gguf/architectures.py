"""Models by ggml's names of architectures: what their configuration is made of, and their tensors.

Sizes come from the tensors where these have them, as metadata leave some out. What metadata say
nothing of (whether chosen weights are normalised) is a constant of the architecture in llama.cpp,
and so it is here. `transformers` has a table of its own, which leaves expert widths at their
defaults and has no olmoe.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.families import give_experts_interface
from moe_runtime.checkpoints.gguf.header import GgufHeader, GgufTensor
from moe_runtime.checkpoints.strict_json import clipped, one_line
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.lazy import LazyTable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.transformers_private import WeightTransform

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
_WHOLE = (_SINKS, CORRECTION, DT_BIAS, A_LOG)  # parts whose names are those of their tensors
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
FUSED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
"""Tensors that have the rows of several parts of each expert, as many of each."""


class ValueChange(NamedTuple):
    """What makes the model's values of those in a file."""

    convert: Callable[[Tensor], Tensor]  # takes and gives a tensor of the model's sizes
    moves_rows: bool = False
    moved_columns: int = 0  # how many stay side by side, where it only moves columns; else 0
    # gives the model's sizes for those in the file
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    model_type: str
    model_class: str
    # of a layer, by ggml's names, as a checkpoint of `transformers` calls them
    parts: Mapping[str, str]
    # settings that are a size of a part: its name, and which dimension
    sizes: Mapping[str, tuple[str, int]]
    # settings that are the same for all models of the architecture
    constants: Mapping[str, Any] = field(default_factory=dict)
    # settings that metadata have, by the ends of their keys
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)
    # of positions that are extended, as `constants`
    rope: Mapping[str, Any] = field(default_factory=dict)
    # gives what makes such weights those of the model
    conversions: Callable[[], list[WeightTransform]] = list
    # changes the model that transformers makes to one of such weights
    adapt: Callable[[PreTrainedModel], None] = give_experts_interface
    # the share of a head's values that positions turn; None for the family's own
    rotated: float | None = None
    # of values, by the model's names of parts, and of the norm behind all layers
    changes: Mapping[str, ValueChange] = field(default_factory=dict)


def _interleaved_experts() -> list[WeightTransform]:
    """gpt-oss: rows of gate and up take turns, and weights are transposed."""
    experts = "mlp.experts"
    gate_up = [f"{experts}.*.{part}_proj" for part in ("gate", "up")]
    merged = [private.MergeModulelist(0), private.Concatenate(1), private.Interleave(1, True)]

    def convert(sources: list[str], target: str, *operations: Any) -> WeightTransform:
        return private.WeightConverter(sources, f"{experts}.{target}", [*operations])

    return [
        convert([f"{p}.weight" for p in gate_up], "gate_up_proj", *merged, private.Transpose(1, 2)),
        convert([f"{part}.bias" for part in gate_up], "gate_up_proj_bias", *merged),
        convert([f"{experts}.*.down_proj.weight"], "down_proj", merged[0], private.Transpose(1, 2)),
        convert([f"{experts}.*.down_proj.bias"], "down_proj_bias", merged[0]),
    ]


def _turned_heads() -> list[WeightTransform]:
    """Llama's: the two values that an angle turns lie one behind the other in files."""

    class OfKeys(private.PermuteForRope):
        """The same for the heads of keys, of which there may be fewer."""

        def convert(self, *parts: Any, config: Any, **rest: Any) -> Any:
            heads = SimpleNamespace(num_attention_heads=config.num_key_value_heads)
            return super().convert(*parts, config=heads, **rest)

    turns = {"self_attn.q_proj.weight": private.PermuteForRope, "self_attn.k_proj.weight": OfKeys}
    # transformers 5.17 turns what is named alone
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
        {
            "moe_intermediate_size": EXPERT_WIDTH,
            "shared_expert_intermediate_size": ("ffn_gate_shexp", -2),
        },
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
"""By `general.architecture`, where all files of one have the same row."""

_HERE = "moe_runtime.checkpoints.gguf"
_MADE: Mapping[str, Callable[[GgufHeader], Architecture]] = LazyTable(
    {
        "deepseek2": f"{_HERE}.families:deepseek2",
        "ernie4_5-moe": f"{_HERE}.families:ernie4_5_moe",
        "glm4moe": f"{_HERE}.families:glm4moe",
        "minimax-m2": f"{_HERE}.families:minimax_m2",
        "qwen35moe": f"{_HERE}.families:qwen35moe",
        "qwen3next": f"{_HERE}.families:qwen3next",
    }
)
"""What makes the row of a file, where files differ."""


def architecture_of(header: GgufHeader) -> Architecture:
    """The row of a file's architecture."""
    name = header.name
    if isinstance(name, str) and name in _MADE:
        return _MADE[name](header)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted([*ARCHITECTURES, *_MADE]))
        found = f"architecture {clipped(name)}; its safetensors checkpoint may be supported"
        header.unsupported(f"a GGUF file of {known}", found)
    return ARCHITECTURES[name]


def named_weights(
    header: GgufHeader, architecture: Architecture
) -> Iterator[tuple[str, GgufTensor, int]]:
    """What a checkpoint of `transformers` calls each tensor, and which matrix of it that is.

    Yields:
        Name, tensor and -1, or the number of a matrix in the stack that the tensor is. Gates and
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
    """Layers of the model itself, where others are behind them; else None."""
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
"""Values without effect, by the ends of keys; for all other keys 0 and false have none."""
_SOFTMAX = 1
_DESCRIPTIVE = (
    *("vocab_size", "feed_forward_length", "expert_feed_forward_length", "expert_shared_count"),
    *("expert_shared_feed_forward_length", "attention.recurrent_layers", "full_attention_interval"),
    *("rope.scaling.finetuned", "rope.dimension_sections", "rope.scaling.original_context_length"),
    *("attention.head_count_kv", "tensor_data_layout"),  # latent attention has none of the former
)
"""Keys that change no number: tensors have these sizes, too, or they matter to images alone."""


def settings_of(header: GgufHeader, architecture: Architecture) -> dict[str, Any]:
    """The configuration that `transformers` has for a model."""
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
    """Refuses keys of the architecture that nothing has used and that would change numbers."""
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
    """The number of a key that is there: positive, or a whole one."""
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
    """How positions are rotated; a factor without a type is linear, as in llama.cpp."""

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
    """What queries and keys are multiplied by where a file does not say it."""
    return 1 + 0.1 * math.log(max(1.0, positions.get("factor", 1.0)))
