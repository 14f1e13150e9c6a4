"""Embeddings whose rows stay in the checkpoint's file: tokens read theirs, by the page cache.

A model knows some hundred thousand tokens, and a step has few of them: experts make more of that
memory. Values are those of the file, as when all of them are in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.absent import AbsentTensor
from moe_runtime.checkpoints.dense_weights import PackedTensor, with_values
from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.errors import CheckpointError
from moe_runtime.memory.source import CheckpointFile, host_view

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.expert_map import ExpertMap
    from moe_runtime.checkpoints.formats import Weight


class StoredRows:
    """The rows ``[N, D]`` of a weight in its file. Raises CheckpointError: it cannot be opened."""

    def __init__(self, entry: TensorEntry) -> None:
        self.shape, self.dtype = entry.shape, TORCH_DTYPES[entry.dtype]
        self.device = torch.device("cpu")
        self._entry, self._file = entry, CheckpointFile(entry.file, direct=False)

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of tokens, ``[..., D]``, each token's read once.

        Raises:
            IndexError: a token is not one of the N.
            CheckpointError: the file has changed, or the disk reports an error.
        """
        tokens = ids.flatten().tolist()
        places = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
        rows = torch.empty(len(places), self.shape[1], dtype=self.dtype)
        for token, row in zip(places, rows, strict=True):
            if not 0 <= token < self.shape[0]:
                raise IndexError("index out of range in self")  # as torch has it
            self._read(token, row)
        self._file.require_unchanged()
        return rows[[places[token] for token in tokens]].view(*ids.shape, self.shape[1])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All rows."""
        rows = torch.empty(*self.shape, dtype=self.dtype)
        self._read(0, rows)
        self._file.require_unchanged()
        return rows.to(dtype)

    def _read(self, first: int, into: Tensor) -> None:
        entry, buffer = self._entry, host_view(into.flatten().view(torch.uint8))
        offset = entry.offset + first * self.shape[1] * self.dtype.itemsize
        try:
            self._file.read(offset, buffer, len(buffer))
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {entry.name} from {entry.file}: {error}") from None


class RowsTensor(PackedTensor):
    """The weight of an embedding whose rows are `StoredRows`; what else reads it gets values."""

    matrix: Any

    @staticmethod
    def __new__(cls, rows: StoredRows) -> RowsTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        made: Any = AbsentTensor.__new__(cls, torch.Size(rows.shape), rows.dtype, rows.device)
        made.matrix = rows
        return made

    def values(self) -> Tensor:
        return self.matrix.dequantize(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding and isinstance(args[1], RowsTensor):
            return _look_up_uncompiled(args[1].matrix.look_up, args[0])
        if func is nn.functional.linear:
            return with_values(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def alike(self) -> RowsTensor:
        return RowsTensor(self.matrix)

    def __repr__(self, **_: Any) -> str:
        return f"RowsTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


_look_up_uncompiled: Any = torch.compiler.disable(lambda look_up, ids: look_up(ids))


def may_stay_in_file(model: PreTrainedModel, name: str, entry: Weight) -> bool:
    """Whether a weight of a model is that of an embedding, as it is in the file, and is only
    looked up."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(module, nn.Embedding) or own_name != "weight" or module.max_norm is not None:
        return False
    if not isinstance(entry, TensorEntry) or entry.convert:
        return False
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    wide = private.dtype_plan(model, module.weight.dtype)
    return (
        entry.shape == module.weight.shape
        and TORCH_DTYPES.get(entry.dtype) == module.weight.dtype
        and name not in {*tied, *tied.values()}
        and not any(re.search(pattern.replace("*", ".*"), name) for pattern in wide)
    )


def keep_rows(model: PreTrainedModel, experts: ExpertMap, stored: Mapping[str, str]) -> None:
    """Gives embeddings the rows that stay in their files; ``stored`` maps entries to parameters."""
    for entry_name, name in stored.items():
        entry: Any = experts.dense_entries[entry_name]
        parameter = nn.Parameter(RowsTensor(StoredRows(entry)), requires_grad=False)
        private.mark_as_initialized(parameter)
        path, _, own_name = name.rpartition(".")
        model.get_submodule(path).register_parameter(own_name, parameter)
