"""A checkpoint and the model that transformers would make of it, without its weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from moe_runtime.checkpoints.families import give_experts_interface
from moe_runtime.checkpoints.model_files import find_checkpoint, read_config, take_quantization
from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    PACKED_INDEX_NAME,
    TensorEntry,
    read_checkpoint_index,
)
from moe_runtime.checkpoints.settings_check import check_layers, named_lookup
from moe_runtime.checkpoints.transformers_private import warn_if_untested
from moe_runtime.errors import UnsupportedModelError, blamed_on
from moe_runtime.memory.source import FileStamp

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from moe_runtime.checkpoints.dense_weights import Progress
    from moe_runtime.checkpoints.formats import PackedWeight, Weight
    from moe_runtime.checkpoints.packing.expert_runs import PackedExpertIndex
    from moe_runtime.checkpoints.transformers_private import WeightTransform

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types of safetensors files that dense weights may have."""

QUANT_METHOD = "moe_runtime"
"""What a packed checkpoint calls itself in ``config.json``."""

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that models are computed in."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder whose headers have been read.

    Attributes:
        folder: where the files lie; of a GGUF checkpoint, its file.
        config: the model's configuration.
        entries: every tensor of the checkpoint by name.
        dtype: the type in which the model computes.
        packed: its quantised weights by the names that the model's conversion table knows.
        runs: where experts lie that `moe-runtime pack` wrote, if it did.
        conversions: what makes its weights those of the model, before the model's own table.
        adapt: changes the model that transformers makes, on the meta device, to one of its weights.
        stamps: of the files of its tensors, taken before their headers were read.
        origins: tensors of a GGUF file by the names of weights here; empty for other checkpoints.
    """

    folder: Path
    config: PreTrainedConfig
    entries: dict[str, TensorEntry]
    dtype: torch.dtype
    packed: dict[str, PackedWeight] = field(default_factory=dict)
    runs: PackedExpertIndex | None = None
    conversions: Sequence[WeightTransform] = ()
    adapt: Callable[[PreTrainedModel], None] = give_experts_interface
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> list[Weight]:
        """Every weight once: quantised ones, and tensors that are no part of one or of a run."""
        runs = set() if self.runs is None else self.runs.names
        plain = _plain(self.entries, self.packed)
        return [*(entry for entry in plain if entry.name not in runs), *self.packed.values()]

    @property
    def is_plain(self) -> bool:
        """Whether every weight lies as it is in safetensors files, neither quantised nor packed."""
        return not self.packed and self.runs is None and not self.folder.is_file()

    def require_unchanged(self) -> None:
        """Refuses files that were written or replaced after the checkpoint was opened.

        Raises:
            CheckpointError: one was; the message names it.
        """
        for path, stamp in self.stamps.items():
            stamp.require(path, path)


def open_checkpoint(
    path_or_id: str | Path, dtype: str | torch.dtype, *, progress: Progress | None = None
) -> Checkpoint:
    """Finds a checkpoint and reads its configuration and headers.

    Args:
        path_or_id: a folder, a GGUF file, or the name of a model on the hub.
        dtype: a torch type, its name, or ``"auto"`` for the checkpoint's own.
        progress: of a download, as for ``find_checkpoint``.

    Raises:
        CheckpointError: nothing readable is there.
        UnsupportedModelError: the architecture is unknown, or weights are quantised in a way that
            is not read yet.
        ValueError: the dtype is not one to compute in.
    """
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
        from moe_runtime.checkpoints.packing.expert_runs import PackedExpertIndex

        runs = PackedExpertIndex(folder, entries)
    elif quantization is not None:
        from moe_runtime.checkpoints.formats import packed_weights

        packed = packed_weights(quantization, _judged(config, entries), place)
    compute_dtype = _compute_dtype(dtype, config, _plain(entries, packed), bool(packed))
    own = _of_used(stamps, entries)
    return Checkpoint(folder, config, entries, compute_dtype, packed, runs, stamps=own)


def build_on_meta(checkpoint: Checkpoint) -> PreTrainedModel:
    """Makes the checkpoint's model with all its parameters on the meta device.

    Raises:
        UnsupportedModelError: transformers knows no model for the configuration.
        CheckpointError: the configuration contradicts itself.
    """
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
    """The tensors but for those that `transformers` leaves aside, as further predicting layers."""
    patterns = _model_class(config)._keys_to_ignore_on_load_unexpected or ()
    left_aside = re.compile("|".join(map("({})".format, patterns)) or r"(?!)")
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)

    def is_left_aside(name: str) -> bool:
        layer = re.search(r"layers\.(\d+)\.", name)
        is_own = layer is not None and "mtp" not in name and int(layer[1]) < num_layers
        return left_aside.search(name) is not None and not is_own

    return {name: entry for name, entry in entries.items() if not is_left_aside(name)}


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Has every part of a model made in one type, whichever a nested configuration names."""
    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _set_dtype(part, dtype)


def _plain(entries: dict[str, TensorEntry], packed: dict[str, PackedWeight]) -> list[TensorEntry]:
    """The tensors that are no part of a quantised weight."""
    parts = {entry.name for weight in packed.values() for entry in weight.entries}
    return [entry for entry in entries.values() if entry.name not in parts]


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
