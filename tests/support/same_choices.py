"""Has a second run of a model choose what the first one chose, where it took the largest values.

Routers, and attention that selects keys, take the largest of some scores. In another precision near
ties fall otherwise, and gradients of other experts cannot be compared. Values and their gradients
are still those of the second run.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor


class Choices:
    """The indices that ``topk`` gave in each run of a part of a layer, in order."""

    def __init__(self) -> None:
        self._runs: dict[str, list[list[Tensor]]] = {}

    @contextmanager
    def recorded(self, model: torch.nn.Module) -> Iterator[None]:
        """Records one forward pass."""

        def begin(part: str) -> None:
            self._runs.setdefault(part, []).append([])

        def record(part: str, scores: Tensor, *arguments: Any, **options: Any) -> Any:
            found = _topk(scores, *arguments, **options)
            self._runs[part][-1].append(found.indices)
            return found

        with _replaced(model, begin, record):
            yield

    @contextmanager
    def repeated(self, model: torch.nn.Module) -> Iterator[None]:
        """Gives the recorded indices; where checkpointing computes anew, the last run's first."""
        turns, left = Counter[str](), dict[str, Iterator[Tensor]]()

        def begin(part: str) -> None:
            if runs := self._runs.get(part):
                again, place = divmod(turns[part], len(runs))
                turns[part] += 1
                left[part] = cycle(runs[-1 - place if again % 2 else place])

        def repeat(part: str, scores: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
            ids = next(left[part])
            assert ids.shape[dim] == k
            return torch.return_types.topk((scores.gather(dim, ids), ids))

        with _replaced(model, begin, repeat):
            yield


_topk = torch.topk


@contextmanager
def _replaced(
    model: torch.nn.Module, begin: Callable[[str], None], topk: Callable[..., Any]
) -> Iterator[None]:
    """Calls ``topk`` with the name of the part that runs before the usual arguments.

    ``begin`` hears of each run of a part, and of one of what is not part of a layer, ``""``.
    """
    running: list[str] = [""]

    def enter(name: str, part: str) -> Any:
        def entered(*_: Any) -> None:
            running.append(part)
            if name == part:
                begin(part)

        return entered

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
            entered = enter(name, part[0] if part else "")
            hooks.append(module.register_forward_pre_hook(entered))
            hooks.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
