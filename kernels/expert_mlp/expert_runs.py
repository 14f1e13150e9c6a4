"""What `expert_ffn` is given: experts, their rows, an activation.

Shape suffixes: R routed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights, Matrix
from moe_runtime.kernels.operands.activation import ActivationName, ActivationSpec

ExpertImpl = Literal["auto", "native", "reference", "torch"]
IMPLS: tuple[ExpertImpl, ...] = ("auto", "native", "reference", "torch")
RowIds = Tensor | Sequence[int]
ActivationFn = Callable[[Tensor | None, Tensor], Tensor]
ExpertActivation = ActivationName | ActivationSpec | ActivationFn
LinearFn = Callable[[Tensor, Matrix, Tensor | None], Tensor]


class ExpertRuns(NamedTuple):
    """Some experts, the number of rows of each, and where these rows are read and written."""

    experts: Sequence[ExpertWeights]
    counts: Sequence[int]
    token_ids_R: RowIds
    destinations_R: RowIds

    def cut(self, pieces: Iterable[Iterable[Sequence[Any]]]) -> Iterator[ExpertRuns]:
        """Each piece, a pair of experts and counts in the order of all, with its rows."""
        first = 0
        for experts, counts in pieces:
            last = first + sum(counts)
            rows = slice(first, last)
            yield ExpertRuns(experts, counts, self.token_ids_R[rows], self.destinations_R[rows])
            first = last
