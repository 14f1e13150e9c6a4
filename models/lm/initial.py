"""A model's weights from a Hugging Face checkpoint: the way back of `export`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.safetensors_index import read_checkpoint_index
from moe_runtime.errors import CheckpointError
from moe_runtime.models.lm.export import hugging_face_views
from moe_runtime.models.lm.hugging_face import hugging_face_config, hugging_face_family
from moe_runtime.models.lm.model import LanguageModel

# What decides the numbers, or the shapes; a checkpoint's other settings do not matter here.
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

    Args:
        model: of an architecture that `export_hugging_face` writes; it keeps its dtype and device.
        folder: `config.json` and safetensors files with one tensor for each matrix of each expert.

    Raises:
        UnsupportedModelError: no Hugging Face architecture expresses the model.
        CheckpointError: the folder holds no readable checkpoint, or one of another architecture or
            with other tensors; they are named, and the model is unchanged.
        OSError: a file cannot be read.
    """
    problems = list(_other_settings(model, folder))
    if problems:
        raise CheckpointError(
            f"{folder}: its config.json describes another model: {_listed(problems)}"
        )
    index = read_checkpoint_index(folder)
    views = dict(hugging_face_views(model))
    problems = [f"missing {name}" for name in views if name not in index]
    # A checkpoint may spell out the output projection that the embedding is.
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
    """What the checkpoint's configuration and the model's disagree in."""
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
            continue  # the width of dense layers, of which there are none
        expected, got = _comparable(ours.get(name)), _comparable(theirs.get(name))
        if expected != got:
            yield f"{name} is {got!r}, this model's is {expected!r}"


def _comparable(value: Any) -> Any:
    """A setting so that absent, false and empty ones are the same, as they are in meaning."""
    if isinstance(value, Mapping):
        # A whole rotation is what is meant where no share of it is given.
        return {"partial_rotary_factor": 1.0, **value}
    return value or None


def _read(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """The tensors of these names, each from its file."""
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
