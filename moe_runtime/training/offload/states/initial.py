"""First weights of experts that never are in memory together.

A model is built inside `StreamedInit`: stacks of expert matrices are made without storage, and what
would be drawn for them is skipped over by drawing it once, a matrix at a time. Afterwards each
expert's matrices are drawn again, from the place in the stream of random numbers where they were:
the same bits as in a model built in memory (where an expert's matrix has a multiple of 16 elements,
the number that torch draws at once).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.types import ExpertKey

_ATEN = torch.ops.aten


@dataclass
class _Draw:
    """The last values drawn for a stack: how, and from which state of the generator on."""

    mean: float
    std: float
    state: Tensor
    drawn: int = 0


class StreamedInit(TorchDispatchMode):
    """Makes tensors of three dimensions without storage, and remembers what is drawn for them."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: dict[int, _Draw] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is _ATEN.empty.memory_format and len(args[0]) == 3:
            return func(*args, **{**options, "device": torch.device("meta")})
        if func is _ATEN.normal_.default and args[0].is_meta:
            self._skip(*args)
            return args[0]
        return func(*args, **options)

    def tensors_of(self, sites: Sequence[ExpertsModuleSpec], key: ExpertKey) -> list[Tensor]:
        """One expert's first weights; to be called for a layer's experts in ascending order.

        Args:
            sites: the modules of experts of the model that was built.
            key: the expert.
        """
        module = sites[key.layer].module
        names = sites[key.layer].parameter_names
        return [self._draw(module.get_parameter(name), key.expert) for name in names]

    def _skip(self, stack: Tensor, mean: float = 0.0, std: float = 1.0) -> None:
        self._draws[_place(stack)] = _Draw(mean, std, torch.get_rng_state())
        matrix = torch.empty(stack.shape[1:], dtype=stack.dtype)
        for _ in range(len(stack)):
            matrix.normal_(mean, std)

    def _draw(self, stack: Tensor, expert: int) -> Tensor:
        draw = self._draws.get(_place(stack))
        if draw is None:
            return torch.zeros(stack.shape[1:], dtype=stack.dtype)
        assert draw.drawn <= expert, "experts are drawn in order"
        generator = torch.Generator()
        generator.set_state(draw.state)
        matrix = torch.empty(stack.shape[1:], dtype=stack.dtype)
        # those that are passed over have their place in the stream
        for _ in range(draw.drawn, expert + 1):
            matrix.normal_(draw.mean, draw.std, generator=generator)
        draw.drawn = expert + 1
        draw.state = generator.get_state()
        return matrix


def _place(stack: Tensor) -> int:
    return stack.untyped_storage()._cdata
