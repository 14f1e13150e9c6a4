"""Has a second run of a model choose what the first one chose, where it took the largest values.

Routers, and attention that selects keys, take the largest of some scores. In another precision near
ties fall otherwise, and gradients of other experts cannot be compared. Values and their gradients
are still those of the second run.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class Choices:
    """The indices that ``topk`` gave in each part of a layer, in order."""

    def __init__(self) -> None:
        self._ids: dict[str, list[Tensor]] = {}

    @contextmanager
    def recorded(self, model: torch.nn.Module) -> Iterator[None]:
        """Records one forward pass."""

        def record(part: str, scores: Tensor, *arguments: Any, **options: Any) -> Any:
            found = _topk(scores, *arguments, **options)
            self._ids.setdefault(part, []).append(found.indices)
            return found

        with _replaced(model, record):
            yield

    @contextmanager
    def repeated(self, model: torch.nn.Module) -> Iterator[None]:
        """Gives the recorded indices, from the first again where checkpointing computes anew."""
        turns = Counter[str]()

        def repeat(part: str, scores: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
            ids = self._ids[part][turns[part] % len(self._ids[part])]
            turns[part] += 1
            assert ids.shape[dim] == k
            return torch.return_types.topk((scores.gather(dim, ids), ids))

        with _replaced(model, repeat):
            yield


_topk = torch.topk


@contextmanager
def _replaced(model: torch.nn.Module, topk: Any) -> Iterator[None]:
    """Calls ``topk`` with the name of the part that runs before the usual arguments."""
    running: list[str] = [""]

    def enter(name: str) -> Any:
        return lambda *_: running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    def called(*arguments: Any, **options: Any) -> Any:
        return topk(running[-1], *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", called)
        patch.setattr(Tensor, "topk", called)
        hooks = []
        for name, module in model.named_modules():
            part = re.match(r".*layers\.\d+\.\w+", name)
            hooks.append(module.register_forward_pre_hook(enter(part[0] if part else "")))
            hooks.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
