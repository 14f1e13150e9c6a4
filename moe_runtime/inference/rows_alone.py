"""Steps of several rows with the bits of single steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_runtime.checkpoints.transformers_private import attention_names
from moe_runtime.inference.cpu.attention import ATTENTION, EAGER_ATTENTION
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.known_classes import can_share_a_pass
from moe_runtime.kernels.linear import native_row_limit, quantized_row_limit
from moe_runtime.kernels.linear.op import linear_of_few_shapes
from moe_runtime.kernels.native import native_library

VALUES_TRIED = 1 << 13
"""Inputs of a trial of experts. Many, since most sums with another last bit round equally."""

_VALUE_BY_VALUE = (
    "addcdiv addcmul celu cos elu erf exp exp2 expm1 gelu hardsigmoid hardswish lerp log log10 "
    "log1p log2 logit logsigmoid mish pow __pow__ __rpow__ rsqrt selu sigmoid silu sin softplus "
    "softsign sqrt tanh"
)
_ALONG_A_DIMENSION = "cumsum log_softmax logsumexp mean prod softmax softmin std sum var"
_NORMS = "norm normalize vector_norm"
_OF_TRAILING_DIMENSIONS = "group_norm layer_norm rms_norm"
_PRODUCTS = "bmm linear matmul __matmul__ mm"
_OWNERS = (torch, Tensor, F, torch.special, torch.linalg)


def _named(names: str, *endings: str) -> Iterator[Callable[..., Any]]:
    for owner in _OWNERS:
        for name in (first + ending for first in names.split() for ending in ("", *endings)):
            if (found := getattr(owner, name, None)) is not None:
                yield found


_PLACE_OF_DIMENSION = dict.fromkeys(_named(_ALONG_A_DIMENSION), 1) | dict.fromkeys(
    _named(_NORMS), 2
)
_PRODUCT_FUNCTIONS = frozenset((*_named(_PRODUCTS), linear_of_few_shapes))
_FUNCTIONS = frozenset(
    (
        *_named(_VALUE_BY_VALUE, "_"),
        *_named(_OF_TRAILING_DIMENSIONS),
        *_PLACE_OF_DIMENSION,
        *_PRODUCT_FUNCTIONS,
    )
)


class RowsAlone(TorchFunctionMode):
    """Gives each sequence in a step of several the bits of a step of its own.

    Rows lie along the first dimension. Functions of torch are called once per sequence. Native
    kernels compute rows independently and are called once.
    """

    def __init__(self, num_sequences: int) -> None:
        super().__init__()
        self._num_sequences = num_sequences

    def __torch_function__(
        self, func: Any, types: Any, args: Items[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _FUNCTIONS:
            return func(*args, **kwargs)
        size = self._rows_at_once(func, args, kwargs)
        if not size:
            return func(*args, **kwargs)
        rows: Tensor = args[0]
        columns = [self._divide(func, rows, value, size) for value in (*args, *kwargs.values())]
        parts = []
        for values in zip(*columns, strict=True):
            named = zip(kwargs, values[len(args) :], strict=True)
            parts.append(func(*values[: len(args)], **dict(named)))
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):  # in place
            return rows
        return torch.cat(parts)

    def _rows_at_once(self, func: Any, args: Items[Any], kwargs: dict[str, Any]) -> int:
        """Rows per call; 0 for a single call."""
        if not args or not isinstance(args[0], Tensor) or "out" in kwargs:
            return 0
        rows: Tensor = args[0]
        if rows.ndim < 2 or not rows.is_floating_point() or rows.shape[0] < 2:
            return 0
        if func in _PLACE_OF_DIMENSION:
            place = _PLACE_OF_DIMENSION[func]
            default = 1 if func is F.normalize else None
            dims = kwargs.get("dim", args[place] if len(args) > place else default)
            dims = (dims,) if isinstance(dims, int) else dims
            if not dims or any(dim % rows.ndim == 0 for dim in dims):
                return 0
        if func is F.linear and type(args[1]) not in (Tensor, torch.nn.Parameter):
            return 0  # our kernel multiplies this weight
        num_rows = rows.shape[0]
        if num_rows % self._num_sequences == 0:
            return num_rows // self._num_sequences
        return int(num_rows < self._num_sequences)

    def _divide(self, func: Any, rows: Tensor, value: Any, size: int) -> Items[Any]:
        num_calls = rows.shape[0] // size
        if value is not rows:
            if not isinstance(value, Tensor) or value.ndim != rows.ndim:
                return [value] * num_calls
            is_matrix = func in _PRODUCT_FUNCTIONS and value.ndim == 2
            if is_matrix or value.shape[0] != rows.shape[0]:
                return [value] * num_calls
        return value.split(size)


def most_exact_rows(layer: OffloadedExperts, sizes: Items[int], dtype: torch.dtype) -> int:
    """The largest of ``sizes`` up to which rows for the same two experts have the bits of single
    rows; else 1."""
    if layer.dim_in is None or layer.num_experts < 2 or not sizes:
        return max(sizes, default=1)
    num_rows, dim_in = sizes[-1], layer.dim_in
    step = max(1, num_rows * dim_in // VALUES_TRIED)
    tried = sorted({0, 1, num_rows - 1, *range(0, num_rows, step)})
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.tensor([[0, 1], [1, 0]]).repeat(num_rows, 1)[:num_rows]
    most = num_rows
    for _ in range(0, VALUES_TRIED, num_rows * dim_in):
        x_TD = torch.randn(num_rows, dim_in, generator=generator).to(dtype)
        weights_TK = torch.rand(num_rows, 2, generator=generator)
        inputs = (x_TD, ids_TK, weights_TK)
        alone = {row: layer(*(each[row : row + 1] for each in inputs)) for row in tried}
        found = 1
        for size in (size for size in sizes if size <= most):
            with RowsAlone(size):
                together = layer(*(each[:size] for each in inputs))
            rows = [row for row in tried if row < size]
            if not torch.equal(together[rows], torch.cat([alone[row] for row in rows])):
                break
            found = size
        most = found
    return most


def can_join(model: Any) -> bool:
    """Whether sequences with caches of their own may share a pass of the model."""
    return (
        attention_names(model) in ({ATTENTION}, {EAGER_ATTENTION})
        and "position_ids" in inspect.signature(model.forward).parameters
        and can_share_a_pass(model.config)
    )


def rows_with_own_bits(model: Any) -> int:
    """Most rows for which every product uses the native kernels, as for a single row.

    Their rows are independent. Beyond this number torch's kernels take over on some processors.
    """
    library = native_library()
    if library is None or model.device.type != "cpu":
        return 1
    most = min(native_row_limit(library, p.dtype) for p in model.parameters())
    return min(most, quantized_row_limit(library))  # experts may be quantised
