"""Settings that `transformers` has for a model, from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.gguf.architectures import BLOCK, Architecture, num_layers_of, refuse
from moe_runtime.checkpoints.gguf.header import GgufHeader
from moe_runtime.checkpoints.strict_json import clipped, one_line
from moe_runtime.errors import UnsupportedModelError

_REALS = ("_epsilon", "rope.freq_base", "rope.scaling.factor")
_MAY_BE_0 = ("_token_id", "leading_dense_block_count", "expert_shared_count", "sliding_window")
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def settings_of(header: GgufHeader, architecture: Architecture, file: Path) -> dict[str, Any]:
    """The configuration that `transformers` has for a model.

    Raises:
        CheckpointError: something that it needs is missing.
        UnsupportedModelError: positions are extended in a way that is not read.
    """
    metadata, name = header.metadata, header.metadata["general.architecture"]
    values: dict[str, Any] = dict(architecture.constants)
    for setting, key in architecture.fields.items():
        if f"{name}.{key}" not in metadata:
            refuse(file, f"{name}.{key} among its metadata", "no such key")
        values[setting] = _number(metadata, f"{name}.{key}", file)
    if (num_layers := num_layers_of(header)) is not None:
        values["num_hidden_layers"] = num_layers
    elif further := metadata.get(f"{name}.nextn_predict_layers"):
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
    values["rope_parameters"] = positions = _positions(metadata, name, file)
    if positions["rope_type"] != "default":
        positions.update(architecture.rope)
    if architecture.rotated is not None:
        positions["partial_rotary_factor"] = architecture.rotated
    for setting, token in _TOKENS.items():
        key = f"tokenizer.ggml.{token}_token_id"
        values[setting] = _number(metadata, key, file) if key in metadata else None
    return values


def _number(metadata: Mapping[str, Any], key: str, file: Path) -> Any:
    """The number of a key that is there: positive, or a whole one."""
    value, least = metadata[key], int(not key.endswith(_MAY_BE_0))
    if key.endswith(_REALS):
        if type(value) is not float or not 0 < value < math.inf:
            refuse(file, f"{key} to be a real number above 0", clipped(value))
    elif type(value) is not int or value < least:
        refuse(file, f"{key} to be a whole number of at least {least}", clipped(value))
    return value


def _positions(metadata: Mapping[str, Any], name: str, file: Path) -> dict[str, Any]:
    """How positions are rotated."""
    key = f"{name}.rope.freq_base"
    theta = _number(metadata, key, file) if key in metadata else 10000.0
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    values = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": metadata.get(f"{name}.rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get(
            f"{name}.rope.scaling.original_context_length"
        ),
    }
    if kind != "yarn" or None in values.values():
        raise UnsupportedModelError(
            f"{one_line(str(file))}: expected {name}.rope.scaling.type none, or yarn with factor "
            f"and original_context_length, found {clipped(kind)}"
        )
    for key in ("factor", "original_context_length"):
        _number(metadata, f"{name}.rope.scaling.{key}", file)
    return values
