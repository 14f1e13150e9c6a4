"""Opens a checkpoint, and builds its model on the meta device."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from moe_runtime.checkpoints.checkpoint import (
    COMPUTE_DTYPES,
    QUANT_METHOD,
    Checkpoint,
    Progress,
    plain_entries,
)
from moe_runtime.checkpoints.hub import (
    SMALL_FILES,
    HubName,
    download,
    headers_of,
    parse_hub_name,
    suggestion,
)
from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    PACKED_INDEX_NAME,
    TORCH_DTYPES,
    TensorEntry,
    read_checkpoint_index,
)
from moe_runtime.checkpoints.strict_json import (
    QUANTIZATION_NAMES,
    check_config,
    check_generation_settings,
    check_layers,
    clipped,
    in_our_words,
    named_lookup,
    one_line,
    parse_object,
)
from moe_runtime.checkpoints.transformers_private import warn_if_untested
from moe_runtime.errors import CheckpointError, UnsupportedModelError, blamed_on
from moe_runtime.files import at_home, read_bounded
from moe_runtime.memory.source import FileStamp

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

    from moe_runtime.checkpoints.formats import PackedWeight

_MAX_BYTES = 64 << 20
_WEIGHTS = "*.safetensors"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "*merges.txt")
"""Files that a tokenizer can be made from."""
_SAME_LAYOUT = {"kimi_k2": "deepseek_v3"}
"""Families with code in their repositories, and the equal family of transformers."""
QUANTIZATION_FILE = "hf_quant_config.json"


def find_checkpoint(
    path_or_id: str | Path, *, weights: bool = True, progress: Progress | None = None
) -> Path:
    """A checkpoint's folder or GGUF file; a model on the hub is downloaded."""
    found = _local_or_hub(path_or_id)
    return found if isinstance(found, Path) else download(found, weights=weights, progress=progress)


@contextmanager
def found_headers(path_or_id: str | Path, progress: Progress | None = None) -> Iterator[Path]:
    """A checkpoint's folder or GGUF file; of a model on the hub only small files and headers."""
    found = _local_or_hub(path_or_id)
    with nullcontext(found) if isinstance(found, Path) else headers_of(found, progress) as folder:
        yield folder


def _local_or_hub(path_or_id: str | Path) -> Path | HubName:
    name = str(path_or_id)
    if not name:
        raise CheckpointError("expected a checkpoint's folder or its name on the hub, got no name")
    try:
        folder = Path(at_home(name))
        is_folder, is_there = folder.is_dir(), folder.exists()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{one_line(name)}: not the name of a folder: {error}") from None
    if is_folder:
        return folder
    if is_there:
        if folder.suffix != ".gguf" or not folder.is_file():
            raise CheckpointError(
                f"{folder} is a file; expected a checkpoint's folder or .gguf file"
            )
        return folder
    on_hub = None if isinstance(path_or_id, Path) else parse_hub_name(name)
    if on_hub is None:
        raise CheckpointError(
            f"{one_line(name)} is not a directory; expected the folder of a checkpoint, a .gguf "
            f"file, or OWNER/NAME on the hub{suggestion(folder)}"
        )
    return on_hub


def files_of(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder that a download of it has."""
    if folder.is_file():  # GGUF
        return [folder]
    return [file for pattern in (*SMALL_FILES, _WEIGHTS) for file in folder.glob(pattern)]


def read_config(folder: Path) -> PreTrainedConfig:
    """Reads ``config.json``, or the configuration of a GGUF file."""
    if folder.is_file():
        from moe_runtime.checkpoints.gguf import read_model

        return read_model(folder).config
    import transformers

    if os.path.lexists(folder / "adapter_config.json"):
        raise UnsupportedModelError(
            f"{folder}: has an adapter (adapter_config.json), which is not a model; "
            "give the folder of its base model, and this one with --adapter"
        )
    file = folder / "config.json"
    if not os.path.lexists(file):
        raise CheckpointError(f"{folder} has no config.json; expected a Hugging Face checkpoint")
    check_config(values := _read_object(file), file)
    if (name := values["model_type"]) not in {*transformers.CONFIG_MAPPING, *_SAME_LAYOUT}:
        why = f"transformers {transformers.__version__} knows no model_type {clipped(name)}"
        raise UnsupportedModelError(f"{file}: {why}; install one that does, if there is one")
    try:
        with blamed_on(f"{file} cannot be read"):
            if name not in transformers.CONFIG_MAPPING:
                other = {"model_type": _SAME_LAYOUT[name], "auto_map": None}
                return transformers.CONFIG_MAPPING[_SAME_LAYOUT[name]].from_dict(values | other)
            return transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    except CheckpointError as error:
        raise in_our_words(error, file) from error.__cause__


def take_quantization(config: PreTrainedConfig, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Removes the quantisation settings from a configuration; returns them, or None, and their
    place.

    ModelOpt may write it into `hf_quant_config.json`, which counts where `config.json` says
    nothing.
    """
    found: Any = None
    for part in (config.get_text_config(), config):
        for name in QUANTIZATION_NAMES:
            value = vars(part).pop(name, None)
            found = found if value is None else value
    if hasattr(found, "to_dict"):
        found = found.to_dict()
    file = folder / QUANTIZATION_FILE
    if found is None and os.path.lexists(file):
        quantization = _read_object(file).get("quantization")
        if not isinstance(quantization, dict):
            found = clipped(quantization)
            raise CheckpointError(f"{file}: expected quantization to be an object, found {found}")
        found = {"quant_method": "modelopt", **quantization}
        return found, f"quantization of {QUANTIZATION_FILE}"
    return found, "quantization_config of config.json"


def load_tokenizer(folder: Path) -> Any:
    if not folder.is_file():
        read_config(folder)  # its errors are not the tokenizer's
    return read_tokenizer(folder)


def read_tokenizer(folder: Path) -> Any:
    """Reads the tokenizer of a folder or GGUF file; needs no model."""
    if folder.is_file():
        from moe_runtime.checkpoints.gguf import load_tokenizer

        return load_tokenizer(folder)
    from transformers import AutoTokenizer

    files = [folder / name for name in _TOKENIZER_FILES if os.path.lexists(folder / name)]
    for file in files:
        _read_whole(file)
    missing = CheckpointError(f"{folder}: has no tokenizer files, such as tokenizer.json")
    try:
        with blamed_on(f"{folder}: the tokenizer cannot be loaded; its files are damaged"):
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
    except CheckpointError:
        for file in files:
            _read_object(file)
        if not _has_vocabulary(folder):
            raise missing from None
        raise
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer if there are no files
        raise missing
    return tokenizer


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Ids of all tokens of a tokenizer; None if a checkpoint has none."""
    if not folder.is_file() and not _has_vocabulary(folder):
        return None
    return read_tokenizer(folder).get_vocab()


def _has_vocabulary(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _VOCABULARIES)


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Reads ``generation_config.json``, or the settings of a GGUF file; None if there are none."""
    from transformers import GenerationConfig

    if folder.is_file():
        from moe_runtime.checkpoints.gguf import generation_settings

        return generation_settings(folder)
    file = folder / "generation_config.json"
    if not os.path.lexists(file):
        return None
    check_generation_settings(_read_object(file), file)
    with blamed_on(f"{file} cannot be read"):
        return GenerationConfig.from_pretrained(folder)


def _read_whole(file: Path) -> bytes:
    try:
        return read_bounded(file, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return parse_object(_read_whole(file), has_infinity=True)
    except ValueError as error:
        found = one_line(str(error))
        raise CheckpointError(
            f"{file} cannot be read: expected a JSON object in UTF-8, found {found}"
        ) from None


def open_checkpoint(
    path_or_id: str | Path, dtype: str | torch.dtype, *, progress: Progress | None = None
) -> Checkpoint:
    """Finds a checkpoint, and reads its configuration and headers."""
    folder = find_checkpoint(path_or_id, progress=progress)
    folder = folder.absolute()  # the working directory may change later
    files = folder.parent.glob("*.gguf") if folder.is_file() else folder.glob("*.safetensors")
    stamps = {file: FileStamp.of(file) for file in files if file.is_file()}
    if folder.is_file():
        from moe_runtime.checkpoints.gguf import read_model

        found = read_model(folder)
        dtype = _compute_dtype(dtype, found.config, (), True)
        return replace(found, dtype=dtype, stamps=_of_used(stamps, found.entries))
    config = read_config(folder)
    # the model is built as one with plain weights
    quantization, place = take_quantization(config, folder)
    is_packed = quantization is not None and quantization.get("quant_method") == QUANT_METHOD
    entries = read_checkpoint_index(folder, PACKED_INDEX_NAME if is_packed else INDEX_FILE_NAME)
    check_layers(config, entries, folder / "config.json")
    runs, packed = None, dict[str, Any]()
    if is_packed:
        from moe_runtime.checkpoints.packed_experts import PackedExpertIndex

        runs = PackedExpertIndex(folder, entries)
    elif quantization is not None:
        from moe_runtime.checkpoints.formats import packed_weights

        packed = packed_weights(quantization, _used_by_transformers(config, entries), place)
    compute_dtype = _compute_dtype(dtype, config, plain_entries(entries, packed), bool(packed))
    own = _of_used(stamps, entries)
    return Checkpoint(folder, config, entries, compute_dtype, packed, runs, stamps=own)


def packed_among(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, PackedWeight]:
    """Quantised weights among tensors that are not part of the checkpoint's model."""
    from moe_runtime.checkpoints.formats import packed_weights, sign_of

    quantization, place = take_quantization(read_config(folder), folder)
    if quantization is None or not sign_of(entries):
        return {}
    return packed_weights(quantization, entries, place)


def build_on_meta(checkpoint: Checkpoint) -> PreTrainedModel:
    """Builds the checkpoint's model on the meta device."""
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
    """Stamps of the files with tensors; other files in the folder may change."""
    used = {entry.file for entry in entries.values()}
    return {file: stamp for file, stamp in stamps.items() if file in used}


def _used_by_transformers(
    config: PreTrainedConfig, entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Tensors that `transformers` does not ignore as it does prediction layers."""
    patterns = _model_class(config)._keys_to_ignore_on_load_unexpected or ()
    ignored = re.compile("|".join(map("({})".format, patterns)) or r"(?!)")
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)

    def is_ignored(name: str) -> bool:
        layer = re.search(r"layers\.(\d+)\.", name)
        is_own = layer is not None and "mtp" not in name and int(layer[1]) < num_layers
        return ignored.search(name) is not None and not is_own

    return {name: entry for name, entry in entries.items() if not is_ignored(name)}


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
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
        # for plain weights their own dtype counts, as in transformers
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
