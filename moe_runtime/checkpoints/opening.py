"""A checkpoint and the model that transformers would make of it, without its weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from moe_runtime.checkpoints.checkpoint import (
    COMPUTE_DTYPES,
    QUANT_METHOD,
    Checkpoint,
    Progress,
    plain_entries,
)
from moe_runtime.checkpoints.model_files import find_checkpoint, read_config, take_quantization
from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    PACKED_INDEX_NAME,
    TORCH_DTYPES,
    TensorEntry,
    read_checkpoint_index,
)
from moe_runtime.checkpoints.settings_check import check_layers, named_lookup
from moe_runtime.checkpoints.transformers_private import warn_if_untested
from moe_runtime.errors import UnsupportedModelError, blamed_on
from moe_runtime.memory.source import FileStamp

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from moe_runtime.checkpoints.formats import PackedWeight
    from moe_runtime.checkpoints.packed_experts import PackedExpertIndex


def open_checkpoint(
    path_or_id: str | Path, dtype: str | torch.dtype, *, progress: Progress | None = None
) -> Checkpoint:
    """Finds a checkpoint and reads its configuration and headers."""
    folder = find_checkpoint(path_or_id, progress=progress)
    folder = folder.absolute()  # whatever the working directory is later
    files = folder.parent.glob("*.gguf") if folder.is_file() else folder.glob("*.safetensors")
    stamps = {file: FileStamp.of(file) for file in files if file.is_file()}
    if folder.is_file():
        from moe_runtime.checkpoints.gguf import read_model

        found = read_model(folder)
        dtype = _compute_dtype(dtype, found.config, (), True)
        return replace(found, dtype=dtype, stamps=_of_used(stamps, found.entries))
    config = read_config(folder)
    # the model is built as one of plain weights: it computes what they stand for
    quantization, place = take_quantization(config, folder)
    is_packed = quantization is not None and quantization.get("quant_method") == QUANT_METHOD
    entries = read_checkpoint_index(folder, PACKED_INDEX_NAME if is_packed else INDEX_FILE_NAME)
    check_layers(config, entries, folder / "config.json")
    runs: PackedExpertIndex | None = None
    packed: dict[str, PackedWeight] = {}
    # most checkpoints are neither packed nor quantised
    if is_packed:
        from moe_runtime.checkpoints.packed_experts import PackedExpertIndex

        runs = PackedExpertIndex(folder, entries)
    elif quantization is not None:
        from moe_runtime.checkpoints.formats import packed_weights

        packed = packed_weights(quantization, _judged(config, entries), place)
    compute_dtype = _compute_dtype(dtype, config, plain_entries(entries, packed), bool(packed))
    own = _of_used(stamps, entries)
    return Checkpoint(folder, config, entries, compute_dtype, packed, runs, stamps=own)


def build_on_meta(checkpoint: Checkpoint) -> PreTrainedModel:
    """Makes the checkpoint's model with all its parameters on the meta device."""
    import transformers

    warn_if_untested(transformers.__version__)
    _set_dtype(checkpoint.config, checkpoint.dtype)
    model_class = _model_class(checkpoint.config)
    file = checkpoint.folder / ("" if checkpoint.folder.is_file() else "config.json")
    with ExitStack() as stack:
        for context in model_class.get_init_context(checkpoint.dtype, False, False, None):
            stack.enter_context(context)
        what = f"{file} does not describe a {model_class.__name__}"
        with blamed_on(what), named_lookup(checkpoint.config):
            model = model_class(checkpoint.config)
        checkpoint.adapt(model)
        return model


def _of_used(
    stamps: Mapping[Path, FileStamp], entries: Mapping[str, TensorEntry]
) -> dict[Path, FileStamp]:
    """Stamps of the files that hold tensors: others in the folder may change."""
    used = {entry.file for entry in entries.values()}
    return {file: stamp for file, stamp in stamps.items() if file in used}


def _judged(config: PreTrainedConfig, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors that `transformers` does not ignore, as layers that predict further tokens."""
    patterns = _model_class(config)._keys_to_ignore_on_load_unexpected or ()
    ignored = re.compile("|".join(map("({})".format, patterns)) or r"(?!)")
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)

    def is_ignored(name: str) -> bool:
        layer = re.search(r"layers\.(\d+)\.", name)
        is_own = layer is not None and "mtp" not in name and int(layer[1]) < num_layers
        return ignored.search(name) is not None and not is_own

    return {name: entry for name, entry in entries.items() if not is_ignored(name)}


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Has every part of a model made in one type, whichever a nested configuration names."""
    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _set_dtype(part, dtype)


def _compute_dtype(
    dtype: str | torch.dtype,
    config: PreTrainedConfig,
    plain: Iterable[TensorEntry],
    is_packed: bool,
) -> torch.dtype:
    if dtype == "auto":
        stored = _stored_dtype(config, plain, is_packed)
        if stored not in COMPUTE_DTYPES:
            raise UnsupportedModelError(
                f"the checkpoint's own type is {stored}; name another one to compute in: dtype "
                "float32, bfloat16 or float16"
            )
        return stored
    named = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or named not in COMPUTE_DTYPES:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype}")
    return named


def _stored_dtype(
    config: PreTrainedConfig, plain: Iterable[TensorEntry], is_packed: bool
) -> torch.dtype:
    declared = getattr(config, "dtype", None)
    if declared is None and is_packed:
        # of plain weights their own type counts, as in transformers
        declared = getattr(config.get_text_config(), "dtype", None)
    if isinstance(declared, torch.dtype) and (declared in COMPUTE_DTYPES or not is_packed):
        return declared
    sizes: Counter[torch.dtype] = Counter()
    for entry in plain:
        stored = TORCH_DTYPES.get(entry.dtype)
        if stored is not None and stored.is_floating_point:
            sizes[stored] += entry.num_bytes
    if not sizes and is_packed:
        return torch.bfloat16
    if not sizes:
        raise UnsupportedModelError("the checkpoint has no tensor in bf16, fp16 or fp32")
    return sizes.most_common(1)[0][0]


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    import transformers
    from transformers import AutoModelForCausalLM, PreTrainedModel

    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return cast("type[PreTrainedModel]", mapping[type(config)])
    named = ", ".join(config.architectures or ()) or config.model_type
    raise UnsupportedModelError(f"transformers {transformers.__version__} knows no model {named}")
