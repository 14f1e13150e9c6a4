"""`expert_ffn`: experts whose matrices lie anywhere, without gradients of their parameters.

Shape suffixes: T tokens, D model in, F hidden, O model out, R routed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from moe_runtime.kernels import linear as products
from moe_runtime.kernels.decode_step.prepared import (
    RowIds,
    call_kernel,
    is_coded,
    kernel_activation,
    row_limit,
)
from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights, Matrix
from moe_runtime.kernels.expert_mlp.low_rank import (
    AdaptersOfRows,
    added_after,
    added_before,
    changes_outputs,
)
from moe_runtime.kernels.linear import ROWS_PER_CALL, UNLIMITED, linear, native_row_limit
from moe_runtime.kernels.native import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    NEEDS_TORCH,
    NativeLibrary,
    native_library,
    needs_torch,
    require_native,
)
from moe_runtime.kernels.operands import ActivationName, ActivationSpec, check_choice, precise_dtype

if TYPE_CHECKING:
    from moe_runtime.kernels.quantized import QuantizedMatrix

ExpertImpl = Literal["auto", "native", "reference", "torch"]
IMPLS: tuple[ExpertImpl, ...] = ("auto", "native", "reference", "torch")
ActivationFn = Callable[[Tensor | None, Tensor], Tensor]
ExpertActivation = ActivationName | ActivationSpec | ActivationFn
LinearFn = Callable[[Tensor, Matrix, Tensor | None], Tensor]


class ExpertRuns(NamedTuple):
    """Some experts with their numbers of rows, where these rows are read and written, and
    adapters.
    """

    experts: Sequence[ExpertWeights]
    counts: Sequence[int]
    token_ids_R: RowIds
    destinations_R: RowIds
    adapters_R: AdaptersOfRows | None = None

    def cut(self, pieces: Iterable[Iterable[Sequence[Any]]]) -> Iterator[ExpertRuns]:
        """Each piece (experts and counts, in order) with its rows."""
        first = 0
        for experts, counts in pieces:
            last = first + sum(counts)
            rows = slice(first, last)
            adapters = None if self.adapters_R is None else self.adapters_R[rows]
            places = self.token_ids_R[rows], self.destinations_R[rows]
            yield ExpertRuns(experts, counts, *places, adapters)
            first = last


def expert_ffn(
    x_TD: Tensor,
    experts: Sequence[ExpertWeights],
    counts: Sequence[int],
    token_ids_R: RowIds,
    destinations_R: RowIds,
    out_RO: Tensor,
    *,
    activation: ExpertActivation,
    impl: ExpertImpl = "auto",
    adapters_R: AdaptersOfRows | None = None,
) -> None:
    """Runs every routed row through its expert and writes the result to its destination.

    Row `r` belongs to the expert whose run of `counts` includes it (rows of `experts[0]` first):
    `out[destinations[r]] = down(act(gate(x[token_ids[r]])) * up(x[token_ids[r]]))`, or
    `down(act(up(x)))` without a gate. Other rows of `out` stay as they are.

    An expert's results depend on its weights and rows alone: other experts, their order and the
    number of threads change no bit. So residents can run while others are read.

    Args:
        x_TD: Unit stride along D.
        experts: Of one shape and dtype: that of `x`, or bf16 or fp16 under fp32 `x`. Quantised ones
            of one format take any `x`.
        counts: Rows of each expert; 0 is allowed.
        token_ids_R: Row of `x` that each routed row reads: int64 on the CPU, or a list.
        destinations_R: Row of `out` that each routed row writes; all different.
        out_RO: Dtype of `x`, unit stride along its last dimension.
        activation: A name, a formula, or a function `(gate_RF | None, up_RF) -> hidden_RF`, called
            once per expert between calls of `linear` with the same `impl`.
        impl: As in `linear`; `auto` decides for each expert by its number of rows.
        adapters_R: Adapters of each row's expert, or None.

    Raises:
        ValueError: Shapes do not fit, a row number is out of range, a name is unknown, or the named
            kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    if len(experts) != len(counts):
        raise ValueError(f"expected one count per expert, got {len(experts)} and {len(counts)}")
    if not experts:
        return
    check_choice(impl, IMPLS)
    library = native_library() if impl == "auto" else None
    if impl == "native":
        library = require_native()
    problem = _problem(x_TD, experts, out_RO)
    if problem:
        raise ValueError(problem)
    num_rows = sum(counts)
    sizes = {len(each) for each in (token_ids_R, destinations_R, adapters_R or range(num_rows))}
    if sizes != {num_rows}:
        raise ValueError(
            f"counts add up to {num_rows} rows, got {len(token_ids_R)} token ids, "
            f"{len(destinations_R)} destinations and {max(sizes)} rows at most"
        )
    runs = ExpertRuns(experts, counts, token_ids_R, destinations_R, adapters_R)
    limit = decoded_limit = -1
    if library is not None and isinstance(activation, (str, ActivationSpec)):
        reason = _native_problem(x_TD, experts, out_RO, activation)
        if impl == "native" and reason:
            raise ValueError(f"impl='native' cannot compute this: {reason}")
        if not reason:
            limit = UNLIMITED if impl == "native" else row_limit(library, experts[0].shape)
            if max(counts) <= limit:
                _run_native(library, x_TD, runs, out_RO, activation)
                return
            if is_coded(experts[0].shape):
                decoded_limit = native_row_limit(library, x_TD.dtype)
    # an expert's own number of rows decides: its result must not depend on the others
    pairs = zip(experts, counts, strict=True)
    alike = groupby(pairs, lambda pair: (pair[1] <= limit, pair[1] <= decoded_limit))
    pieces = [zip(*piece, strict=True) for _, piece in alike]
    for some in runs.cut(pieces):
        most = max(some.counts)
        if library is not None and most <= max(limit, decoded_limit):
            name = cast(ActivationName, activation)
            _run_native(library, x_TD, some, out_RO, name, decodes=most > limit)
        else:
            run_by_expert(x_TD, some, out_RO, activation=activation, impl=impl)


def _problem(x_TD: Tensor, experts: Sequence[ExpertWeights], out_RO: Tensor) -> str | None:
    """What is wrong with the arguments, or None."""
    shape = experts[0].shape
    for weights in experts:
        if weights.shape is not shape and weights.shape != shape:
            return f"the experts of one call must have one shape, got {shape} and {weights.shape}"
    if x_TD.ndim != 2 or x_TD.shape[1] != shape.dim_in:
        return f"x must be [T, {shape.dim_in}], got {list(x_TD.shape)}"
    if out_RO.ndim != 2 or out_RO.shape[1] != shape.dim_out:
        return f"out must be [*, {shape.dim_out}], got {list(out_RO.shape)}"
    if out_RO.dtype != x_TD.dtype:
        return f"out must have the dtype of x ({x_TD.dtype}), got {out_RO.dtype}"
    return None


def _native_problem(
    x_TD: Tensor, experts: Sequence[ExpertWeights], out_RO: Tensor, activation: str | ActivationSpec
) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    if kernel_activation(activation) is None:
        return f"activation must be one of {', '.join(ACTIVATION_CODES)}, got {activation!r}"
    dtypes = experts[0].shape.row_dtypes
    if x_TD.dtype not in DTYPE_CODES or x_TD.dtype not in dtypes:
        return f"x must be {' or '.join(map(str, dtypes))}, got {x_TD.dtype}"
    if not (x_TD.is_cpu and out_RO.is_cpu):
        return f"it needs CPU tensors, got {x_TD.device} and {out_RO.device}"
    if x_TD.stride(1) != 1 or out_RO.stride(1) != 1:
        return f"x and out need unit stride, got {x_TD.stride()} and {out_RO.stride()}"
    for weights in experts:
        if weights.c_struct is None:
            return "weights must be fp32, bf16, fp16 or quantised CPU tensors with unit stride"
    if needs_torch(x_TD):
        return NEEDS_TORCH
    return None


def _run_native(
    library: NativeLibrary,
    x_TD: Tensor,
    runs: ExpertRuns,
    out_RO: Tensor,
    activation: str | ActivationSpec,
    *,
    decodes: bool = False,
) -> None:
    pieces = [(runs.experts, runs.counts)]
    if sum(runs.counts) > ROWS_PER_CALL:
        pieces = portions(runs.experts, runs.counts)
    for some in runs.cut(pieces):
        structs = b"".join([weights.c_struct for weights in some.experts])  # type: ignore[misc]
        shape = some.experts[0].shape
        options: dict[str, Any] = {"shape": shape, "activation": activation, "decodes": decodes}
        if some.adapters_R is None:
            call_kernel(library, x_TD, structs, *some[1:4], out_RO, **options)
            continue
        tokens, places = _indices(some.token_ids_R, x_TD), _indices(some.destinations_R, x_TD)
        has_gate, hidden = some.experts[0].gate is not None, None
        x_ND = x_TD.index_select(0, tokens)
        added = added_before(x_ND, some.adapters_R, shape.dim_hidden, has_gate=has_gate)
        if changes_outputs(some.adapters_R):
            hidden = x_ND.new_empty(len(x_ND), shape.dim_hidden, dtype=torch.float32)
        options |= {"added": added, "hidden": hidden}
        call_kernel(library, x_TD, structs, *some[1:4], out_RO, **options)
        if hidden is not None:
            more_RO = added_after(hidden, some.adapters_R, shape.dim_out)
            out_RO[places] = more_RO.add_(out_RO[places]).to(out_RO.dtype)


def portions(
    experts: Sequence[ExpertWeights], counts: Sequence[int]
) -> Iterator[tuple[Sequence[ExpertWeights], Sequence[int]]]:
    """Splits a call whose rows would need much memory to pack, inside an expert if necessary."""
    some: list[ExpertWeights] = []
    some_counts: list[int] = []
    room = ROWS_PER_CALL
    for weights, count in zip(experts, counts, strict=True):
        while count:
            taken = min(count, room)
            some.append(weights)
            some_counts.append(taken)
            count, room = count - taken, room - taken
            if not room:
                yield some, some_counts
                some, some_counts, room = [], [], ROWS_PER_CALL
    if some:
        yield some, some_counts


def frozen_expert(
    x_RD: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
    adapters_R: AdaptersOfRows | None = None,
) -> Tensor:
    """One expert's outputs `[R, O]`, with a gradient of `x` and of tensors in the activation.

    Between the products, values have the dtype of `x`. The weights have no gradient and must not
    change before the backward pass.
    """
    function = activation_function(activation)
    return one_expert(x_RD, weights, function, products.frozen_linear, adapters_R)


def run_by_expert(
    x_TD: Tensor,
    runs: ExpertRuns,
    out_RO: Tensor,
    *,
    activation: ExpertActivation | str,
    impl: ExpertImpl,
) -> None:
    """One expert after another, in torch operations and `linear`.

    `reference` is the specification: fp32 (fp64 for fp64) until the output is rounded.
    """
    function = activation_function(activation)
    are_quantized = any(weights.shape.formats for weights in runs.experts)
    is_reused = are_quantized and impl == "auto" and not needs_torch(x_TD)
    values = ReusedValues() if is_reused else None

    def product(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        if isinstance(matrix, Tensor):
            return linear(x, matrix, bias, impl=impl)
        return products.quantized_linear(x, matrix, bias, impl=impl, values=values)

    dtype = precise_dtype(x_TD) if impl == "reference" else x_TD.dtype
    token_ids, destinations = _indices(runs.token_ids_R, x_TD), _indices(runs.destinations_R, x_TD)
    first = 0
    for weights, count in zip(runs.experts, runs.counts, strict=True):
        if count:
            rows = slice(first, first + count)
            x_RD = x_TD.index_select(0, token_ids[rows]).to(dtype)
            adapters = None if runs.adapters_R is None else runs.adapters_R[rows]
            y_RO = one_expert(x_RD, weights, function, product, adapters)
            out_RO[destinations[rows]] = y_RO.to(out_RO.dtype)
        first += count


def _indices(rows: RowIds, x_TD: Tensor) -> Tensor:
    return torch.as_tensor(rows, dtype=torch.int64, device=x_TD.device)


class ReusedValues:
    """`values_of` in reused memory: a result is valid until the next call."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def __call__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
        from moe_runtime.kernels.linear.quantized import write_values

        num_rows, num_cols = matrix.shape
        size = num_rows * num_cols
        if self._memory is None or self._memory.dtype != dtype or self._memory.numel() < size:
            self._memory = matrix.codes.new_empty(size, dtype=dtype)
        return write_values(matrix, dtype, self._memory[:size].view(num_rows, num_cols))


def activation_function(activation: ExpertActivation | str) -> ActivationFn:
    """`(gate_RF | None, up_RF) -> hidden_RF` of a name: `act(gate) * up`, or `act(up)`."""
    if not isinstance(activation, str):
        return activation
    plain = ActivationSpec(cast(ActivationName, activation))
    return lambda gate, up: plain(None, up) if gate is None else plain(None, gate) * up


def one_expert(
    x_RD: Tensor,
    weights: ExpertWeights,
    activation: ActivationFn,
    linear: LinearFn,
    adapters_R: AdaptersOfRows | None = None,
) -> Tensor:
    """An expert's outputs `[R, O]` in the dtype that `linear(x, weight, bias)` gives."""
    gate = None
    if weights.gate is not None:
        gate = linear(x_RD, weights.gate, weights.gate_bias)
    up = linear(x_RD, weights.up, weights.up_bias)
    if adapters_R is None:
        return linear(activation(gate, up), weights.down, weights.down_bias)
    dim_hidden = weights.shape.dim_hidden
    added_RP = added_before(x_RD, adapters_R, dim_hidden, has_gate=gate is not None)
    if added_RP is not None:
        up = (up + added_RP[:, -dim_hidden:]).to(up.dtype)
        gate = None if gate is None else (gate + added_RP[:, :dim_hidden]).to(gate.dtype)
    hidden_RF = activation(gate, up)
    y_RO = linear(hidden_RF, weights.down, weights.down_bias)
    if not changes_outputs(adapters_R):
        return y_RO
    return (y_RO + added_after(hidden_RF, adapters_R, weights.shape.dim_out)).to(y_RO.dtype)
