"""A step of a few tokens through the experts of one layer: from routing to sums in one native call.

Shape suffixes: T tokens, K choices a token, D model in, O model out, R routed rows = T * K.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.combine.op import MAX_CHOICES
from moe_runtime.kernels.expert_mlp.expert_weights import ExpertShape, ExpertWeights
from moe_runtime.kernels.expert_mlp.separate_experts import DAMAGED, kernel_activation, row_limit
from moe_runtime.kernels.native import (
    DTYPE_CODES,
    STATUS_BAD_ROW,
    STATUS_DAMAGED,
    STATUS_NO_MEMORY,
    native_library,
)
from moe_runtime.kernels.operands.activation import ActivationSpec

STEP_ROWS = 64
"""Routed rows of a step: with more, what is checked for every call is a small part of it."""


class ExpertStep:
    """`expert_ffn` and `combine_assignments` in their bits, checked once instead of in every call.

    `most_rows` routed rows a step at most; 0 where the native kernel takes none.
    """

    def __init__(self, shape: ExpertShape, activation: str | ActivationSpec) -> None:
        self.shape = shape
        library = native_library()
        self.most_rows = self._row_limit = 0
        function = kernel_activation(activation)
        if library is not None and shape.dtype in DTYPE_CODES and function is not None:
            self._row_limit = min(row_limit(library, shape), STEP_ROWS)
            self.most_rows = STEP_ROWS
            self._row_dtypes = shape.row_dtypes
            self._dims = shape.dim_in, shape.dim_hidden, shape.dim_out
            self._function = function
            self._bias_code = DTYPE_CODES.get(shape.bias_dtype, 0)

    def __call__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        expert_of_row_R: Sequence[int],
        experts: Sequence[ExpertWeights],
    ) -> Tensor | None:
        """The sums `[T, O]` over each token's experts, weighted by its gate.

        Args:
            x_TD: `[T, D]`.
            weights_TK: Gate weights.
            expert_of_row_R: The place in `experts` of every token's choices, one after another.
            experts: Each once.

        Returns:
            None for what has to go through `expert_ffn`: many rows, another type or shape,
            gradients enabled.

        Raises:
            MemoryError: No memory to work in.
            ValueError: A row is of no expert.
        """
        num_tokens, num_choices = weights_TK.shape
        num_rows = num_tokens * num_choices
        # each expert's own number of rows decides for it, in `expert_ffn` too
        own_rows = 1 if len(experts) == num_rows else num_rows
        if own_rows > self._row_limit:
            own_rows = max(Counter(expert_of_row_R).values(), default=0)
        library = native_library()
        if (
            library is None
            or not 0 < own_rows <= self._row_limit
            or not 0 < num_choices <= MAX_CHOICES
            or num_rows > self.most_rows
            or len(expert_of_row_R) != num_rows
            or x_TD.shape != (num_tokens, self._dims[0])
            or x_TD.dtype not in self._row_dtypes
            or weights_TK.dtype not in DTYPE_CODES
            or not (x_TD.is_cpu and x_TD.is_contiguous())
            or not (weights_TK.is_cpu and weights_TK.is_contiguous())
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or forward_ad._current_level >= 0
        ):
            return None
        records: list[bytes] = []
        for weights in experts:
            if weights.record is None or weights.shape != self.shape:
                return None
            records.append(weights.record)
        out_TO = x_TD.new_empty((num_tokens, self._dims[2]))
        status = library.expert_step(
            b"".join(records),
            len(records),
            array("q", expert_of_row_R).tobytes(),
            x_TD.data_ptr(),
            self._dims[0] * x_TD.element_size(),
            num_tokens,
            num_choices,
            weights_TK.data_ptr(),
            out_TO.data_ptr(),
            *self._dims,
            DTYPE_CODES[x_TD.dtype],
            DTYPE_CODES[self.shape.dtype],
            self._bias_code,
            DTYPE_CODES[weights_TK.dtype],
            *self._function,
            torch.get_num_threads() == library.num_threads,
        )
        if status == STATUS_BAD_ROW:
            raise ValueError(f"expert_of_row must be in [0, {len(records)}), got {expert_of_row_R}")
        if status == STATUS_NO_MEMORY:
            raise MemoryError(f"no memory for {num_rows} routed rows")
        if status == STATUS_DAMAGED:
            raise CheckpointError(DAMAGED)
        return out_TO
