"""Torch's threads while a model computes: the kernels and the readers need the processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.kernels.linear import UNLIMITED, native_row_limit
from moe_runtime.kernels.native import native_library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_PRODUCTS = 2**28
"""Multiplications of queries and keys from which attention is given torch's threads."""


def rest_torch_threads(model: PreTrainedModel) -> None:
    """Runs torch on one thread during a model's forward passes, if the native kernels do the work.

    Torch's threads spin for milliseconds after each operation, on processors that kernels and
    readers need: a prompt streaming from disk takes more than twice as long. The number is the same
    at every budget, because torch's sums may depend on it. Where torch multiplies many rows faster,
    it keeps its threads.
    """
    library = native_library()
    if library is None or native_row_limit(library, model.dtype) != UNLIMITED:
        return
    OneThread().hold(model)


def torch_threads_for(query: torch.Tensor, key: torch.Tensor) -> AbstractContextManager[None]:
    """Gives torch as many threads as the kernels have for attention over a long prompt.

    That takes longer than torch's threads spin afterwards. Heads and pieces of the prompt are
    computed apart, so the number of threads changes no bits.
    """
    if torch.compiler.is_compiling() or not query.is_cpu or torch.get_num_threads() != 1:
        return nullcontext()
    library = native_library()
    if library is None or native_row_limit(library, query.dtype) != UNLIMITED:
        return nullcontext()
    if library.num_threads == 1 or query.numel() * key.shape[-2] < LEAST_PRODUCTS:
        return nullcontext()
    return _threads(library.num_threads)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


class OneThread:
    """Sets torch to one thread during the forward passes of a model."""

    _before: int | None = None

    def hold(self, model: PreTrainedModel) -> None:
        model.register_forward_pre_hook(self.begin)
        model.register_forward_hook(self.end, always_call=True)

    def begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiler cannot follow it
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def end(self, *_: Any) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
