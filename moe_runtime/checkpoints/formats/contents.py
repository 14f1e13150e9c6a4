"""Reads the few tensors whose content decides how a quantised weight is read."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError

_INTEGERS = {"I32": torch.int32, "I64": torch.int64}


class Contents:
    """Reads whole numbers from tensors; files stay open until the stack is left."""

    def __init__(self, stack: ExitStack) -> None:
        """Opens nothing yet."""
        self._stack = stack
        self._files: dict[Any, Any] = {}

    def numbers(self, entry: TensorEntry, count: int) -> torch.Tensor:
        """The numbers of a tensor of one dimension.

        Raises:
            CheckpointError: it has another type or shape, or cannot be read.
        """
        if entry.dtype not in _INTEGERS or entry.shape != (count,):
            raise CheckpointError(
                f"{entry.name}: expected I32 or I64 [{count}], found {entry.dtype} "
                f"{list(entry.shape)}"
            )
        try:
            if entry.file not in self._files:
                self._files[entry.file] = self._stack.enter_context(entry.file.open("rb"))
            file = self._files[entry.file]
            file.seek(entry.offset)
            content = bytearray(file.read(entry.num_bytes))
            if len(content) < entry.num_bytes:
                raise EOFError(f"the file ends at byte {entry.offset + len(content)}")
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {entry.name} from {entry.file}: {error}") from None
        return torch.frombuffer(content, dtype=_INTEGERS[entry.dtype])
