"""Who has the processors while a model computes: the kernels and the readers, not torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.kernels.linear import UNLIMITED, native_row_limit
from moe_runtime.kernels.native import native_library

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rest_torch_threads(model: PreTrainedModel) -> None:
    """Runs torch on one thread during a model's forward passes, if the native kernels do the work.

    The kernels that read weights have threads of their own. Torch's spin for milliseconds after
    each of its operations, on processors that the kernels and the threads reading experts need: a
    prompt streaming from disk takes more than twice as long beside them. The number is the same at
    every budget, because torch's sums may depend on it. Where torch multiplies many rows faster
    than the kernels do, it keeps its threads.
    """
    library = native_library()
    if library is None or native_row_limit(library, model.dtype) != UNLIMITED:
        return
    threads = _OneThread()
    model.register_forward_pre_hook(threads.begin)
    model.register_forward_hook(threads.end, always_call=True)


class _OneThread:
    """Sets torch to one thread, and back to what it was."""

    def __init__(self) -> None:
        self._before: int | None = None

    def begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiler cannot follow it
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def end(self, *_: Any) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
