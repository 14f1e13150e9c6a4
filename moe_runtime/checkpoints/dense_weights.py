"""Everything of a model but its routed experts: loaded by transformers, tensor by tensor.

Each tensor is read straight into memory of its own, so that loading needs no more than the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.expert_map import ExpertMap, refuse_dense
from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.memory.layout import BLOCK_BYTES
from moe_runtime.memory.slab import aligned_bytes, host_view
from moe_runtime.memory.source import READ_BYTES, CheckpointFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.formats import Weight

ALIGNED_BYTES = 64
"""What divides the address of a dense weight. Where MKL has no AVX2, it sums a product of one fp32
row in another order unless 16 does; so the layout of a checkpoint would change bits."""


class _LazyTensor:
    """A tensor of the checkpoint that is read when transformers asks for it."""

    def __init__(self, entry: Weight, reader: DenseReader) -> None:
        self._entry = entry
        self._reader = reader

    def __getitem__(self, index: object) -> Tensor:
        tensor = self._reader.read(self._entry)
        return tensor if index is Ellipsis else tensor[index]  # type: ignore[index]

    def get_shape(self) -> list[int]:
        """Sizes of the tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Element type, as safetensors names it."""
        return self._entry.dtype


class DenseReader:
    """Reads dense weights, quantised ones as values of `dtype`, and reports how far it is."""

    def __init__(
        self, entries: Iterable[Weight], dtype: torch.dtype, progress: Progress | None
    ) -> None:
        entries = list(entries)
        self._dtype = dtype
        self._files: dict[Path, CheckpointFile] = {}
        for entry in entries:
            parts = [entry] if isinstance(entry, TensorEntry) else entry.parts.values()
            for part in parts:
                if part.file not in self._files:
                    self._files[part.file] = CheckpointFile(part.file)
        self._progress = progress
        self._done = 0
        self._total = sum(entry.num_bytes for entry in entries)

    def read(self, entry: Weight) -> Tensor:
        """The values of a weight, in memory of their own."""
        if not isinstance(entry, TensorEntry):
            from moe_runtime.checkpoints.packed_parameter import read_values

            values = read_values(self, entry, self._dtype)
        else:
            dtype = TORCH_DTYPES.get(entry.dtype)
            if dtype is None:
                raise UnsupportedModelError(
                    f"{entry.name} is {entry.dtype}, which nothing computes with; expected BF16, "
                    "F16 or F32"
                )
            flat = self.bytes_of(entry.name, entry.file, entry.offset, entry.num_bytes)
            values = flat.view(dtype).view(entry.shape)
        if entry.convert is not None:
            values = entry.convert(values)
        self.report(entry)
        return values

    def report(self, entry: Weight) -> None:
        """Counts a weight as read."""
        self._done += entry.num_bytes
        if self._progress is not None:
            self._progress("loading dense weights", self._done, self._total)

    def bytes_of(self, name: str, file: Path, offset: int, num_bytes: int) -> Tensor:
        """A range of a file as `uint8`, at a multiple of `ALIGNED_BYTES`."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        lead = offset % BLOCK_BYTES
        start, needed, excess = offset - lead, lead + num_bytes, lead % ALIGNED_BYTES
        memory = aligned_bytes(-(-needed // BLOCK_BYTES) * BLOCK_BYTES)
        buffer = host_view(memory)
        try:
            for begin in range(0, len(buffer), READ_BYTES):
                part = buffer[begin : begin + READ_BYTES]
                wanted = min(len(part), needed - begin)
                self._files[file].read(start + begin, part, wanted)
                if excess:  # moved while the processor's cache has it
                    first, end = max(begin, lead), begin + wanted
                    buffer[first - excess : end - excess] = buffer[first:end]
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {name} from {file}: {error}") from None
        self._files[file].require_unchanged()
        return memory[lead - excess : needed - excess]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def load_dense(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    experts: ExpertMap,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Loads all weights that are not routed experts into a model on the meta device."""
    reader = DenseReader(experts.dense_entries.values(), checkpoint.dtype, progress)
    config = private.LoadStateDictConfig(
        pretrained_model_name_or_path=str(checkpoint.folder),
        device_map={"": device},
        dtype=checkpoint.dtype,
        dtype_plan=private.dtype_plan(model, checkpoint.dtype),
        weight_mapping=cast(Any, experts.weight_mapping),
    )
    packed = experts.packed_dense
    lazy = {
        name: _LazyTensor(entry, reader)
        for name, entry in experts.dense_entries.items()
        if name not in packed
    }
    try:
        if packed:
            from moe_runtime.checkpoints.packed_parameter import keep_packed

            keep_packed(model, experts, reader, checkpoint.dtype)
        info, _ = private.convert_and_load_state_dict_in_model(model, lazy, config)
    finally:
        reader.close()
    for name, found, expected in sorted(info.mismatched_keys, key=str):
        refuse_dense(name, expected, found, experts.dense_entries, checkpoint.entries)
    for name, error in info.conversion_errors.items():
        raise CheckpointError(f"{name} cannot be converted: {error.strip().splitlines()[-1]}")
    _forget_expert_parameters(model, experts)
    info.missing_keys.difference_update(packed.values())
    info = private.finish_loading(model, config, info)
    if info.missing_keys:
        names = sorted(info.missing_keys)
        raise CheckpointError(
            f"{checkpoint.folder} lacks {len(names)} tensors of {type(model).__name__}, "
            f"among them {', '.join(names[:3])}"
        )


def _forget_expert_parameters(model: PreTrainedModel, experts: ExpertMap) -> None:
    """Keeps transformers from initialising or tying expert parameters, which the model has not."""
    for module in experts.modules:
        # some families initialise their experts from the block around them
        block = model.get_submodule(module.name.rpartition(".")[0])
        private.mark_as_initialized(block)
    gone = {f"{module.name}.{name}" for module in experts.modules for name in module.parameters}
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {key: tied[key] for key in tied if key not in gone}
