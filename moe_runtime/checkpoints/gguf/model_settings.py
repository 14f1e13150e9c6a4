"""Settings that `transformers` has for a model, from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.gguf.architectures import (
    BLOCK,
    Architecture,
    num_layers_of,
    refuse,
    unsupported,
)
from moe_runtime.checkpoints.gguf.header import GgufHeader
from moe_runtime.checkpoints.strict_json import clipped

_REALS = ("_epsilon", "rope.freq_base", "_factor", "scaling.factor", "_linear", "_fast", "_slow")
_MAY_BE_0 = ("_token_id", "leading_dense_block_count", "expert_shared_count", "sliding_window")
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
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


def settings_of(header: GgufHeader, architecture: Architecture, file: Path) -> dict[str, Any]:
    """The configuration that `transformers` has for a model.

    Raises:
        CheckpointError: something that it needs is missing.
        UnsupportedModelError: a key changes what the model computes in a way that is not read.
    """
    metadata, name = header.metadata, header.name
    values: dict[str, Any] = dict(architecture.constants)
    for setting, key in architecture.fields.items():
        if f"{name}.{key}" not in metadata:
            refuse(file, f"{name}.{key} among its metadata", "no such key")
        values[setting] = _number(header, key, file)
    if (num_layers := num_layers_of(header)) is not None:
        values["num_hidden_layers"] = num_layers
    elif further := header.value("nextn_predict_layers"):
        refuse(file, f"{name}.nextn_predict_layers below block_count", clipped(further))
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        refuse(file, "a matrix token_embd.weight", "none")
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
    values["rope_parameters"] = positions = _positions(header, architecture, file)
    if architecture.rotated is not None:
        positions["partial_rotary_factor"] = architecture.rotated
    for setting, token in _TOKENS.items():
        key = f"tokenizer.ggml.{token}_token_id"
        values[setting] = _number(header, key, file, metadata[key]) if key in metadata else None
    _require_understood(header, values, file)
    return values


def _require_understood(header: GgufHeader, values: Mapping[str, Any], file: Path) -> None:
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
            refuse(file, f"{key} to be true or false", clipped(value))
        if own == key or own in header.understood or own in _DESCRIPTIVE:
            continue
        neutral = next((found for end, found in _NEUTRAL.items() if own.endswith(end)), (0,))
        expected = alike.get(own, neutral[0])
        is_close = isinstance(value, float) and math.isclose(value, expected, rel_tol=1e-5)
        if value != expected and not is_close and (own in alike or value not in neutral):
            unsupported(file, f"{key} to be {clipped(expected)}", clipped(value))


def _number(header: GgufHeader, key: str, file: Path, value: Any = None) -> Any:
    """The number of a key that is there: positive, or a whole one."""
    if value is None:
        value, key = header.value(key), f"{header.name}.{key}"
    least = int(not key.endswith(_MAY_BE_0))
    if key.endswith(_REALS):
        if type(value) is not float or not 0 < value < math.inf:
            refuse(file, f"{key} to be a real number above 0", clipped(value))
    elif type(value) is not int or value < least:
        refuse(file, f"{key} to be a whole number of at least {least}", clipped(value))
    return value


def _positions(header: GgufHeader, architecture: Architecture, file: Path) -> dict[str, Any]:
    """How positions are rotated; a factor without a type is linear, as in llama.cpp."""

    def given(key: str, otherwise: Any = None) -> Any:
        return otherwise if header.value(key) is None else _number(header, key, file)

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
        unsupported(file, expected, clipped(kind))
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
