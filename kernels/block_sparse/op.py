"""`sdd`, `dsd` and `dds`: block-sparse products.

The letters, as in MegaBlocks (Gale et al., 2022), are the result, left and right operand: sparse
(S) or dense (D). Shape suffixes: T tokens, R rows and N columns of the sparse matrix, K and D other
dimensions, B stored blocks, M rows and J columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology import BlockTopology, Gather
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.operands import check_like, check_shape, precise_dtype
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.triton_support import check_triton_dtype, resolve_impl


def to_dense(values_BMJ: Tensor, topology: BlockTopology) -> Tensor:
    """The matrix `[R, N]` of these values, zero outside the blocks."""
    rows_BM, columns_BJ = _indices(topology)
    dense = values_BMJ.new_zeros(topology.num_rows + 1, topology.num_columns + 1)
    places = (rows_BM[:, :, None], columns_BJ[:, None, :])
    # only the row and the column of padding are written more than once
    return dense.index_put(places, values_BMJ)[:-1, :-1]


def from_dense(dense_RN: Tensor, topology: BlockTopology) -> Tensor:
    rows_BM, columns_BJ = _indices(topology)
    padded = torch.nn.functional.pad(dense_RN, (0, 1, 0, 1))
    return padded[rows_BM[:, :, None], columns_BJ[:, None, :]]


def sdd_reference(a_RK: Tensor, b_KN: Tensor, topology: BlockTopology) -> Tensor:
    """`a @ b` in fp32 (fp64 for fp64), sampled at the blocks and rounded once."""
    precise = precise_dtype(a_RK)
    return from_dense(a_RK.to(precise) @ b_KN.to(precise), topology).to(a_RK.dtype)


def dsd_reference(
    values: Tensor, b: Tensor, topology: BlockTopology, *, is_transposed: bool
) -> Tensor:
    """`s @ b` or `s.T @ b` in fp32 (fp64 for fp64), rounded once."""
    precise = precise_dtype(values)
    sparse = to_dense(values.to(precise), topology)
    return ((sparse.T if is_transposed else sparse) @ b.to(precise)).to(values.dtype)


def _indices(topology: BlockTopology) -> tuple[Tensor, Tensor]:
    """Rows `[B, M]` and columns `[B, J]` of each block; R and N outside."""
    is_block = topology.row_of_block_B >= 0
    strip_B = topology.row_of_block_B.clamp(min=0).long()
    rows = topology.rows

    def indices(first_B: Tensor, end_B: Tensor, size: int, outside: int) -> Tensor:
        index = first_B[:, None] + torch.arange(size, device=first_B.device)
        inside = (index < end_B[:, None]) & is_block[:, None]
        return torch.where(inside, index, outside)

    return (
        indices(rows.first[strip_B], rows.end[strip_B], topology.block_rows, topology.num_rows),
        indices(rows.first_across, rows.end_across, topology.block_columns, topology.num_columns),
    )


class Rectangle(NamedTuple):
    """Blocks that are side by side in the matrix and consecutive in memory.

    Their `rows` and `columns` in the matrix, `blocks` in the values, and number of strips.
    """

    rows: slice
    columns: slice
    blocks: slice
    row_strips: int

    def gathered(self, values: Tensor) -> Tensor:
        """The rectangle as a dense matrix."""
        tiles = values[self.blocks].unflatten(0, (self.row_strips, -1)).transpose(1, 2)
        dense = tiles.flatten(0, 1).flatten(1)
        return dense[: self.rows.stop - self.rows.start, : self.columns.stop - self.columns.start]

    def scattered(self, dense: Tensor, values: Tensor) -> None:
        """Writes a dense rectangle to its blocks, with zeros past the ends of strips."""
        _, block_rows, block_columns = values.shape
        tiles = values[self.blocks].unflatten(0, (self.row_strips, -1))
        height, width = self.row_strips * block_rows, tiles.shape[1] * block_columns
        missing = (0, width - dense.shape[1], 0, height - dense.shape[0])
        padded = torch.nn.functional.pad(dense, missing) if any(missing) else dense
        tiles.copy_(padded.view(self.row_strips, block_rows, -1, block_columns).transpose(1, 2))


def rectangles(topology: BlockTopology) -> list[Rectangle]:
    """The rectangles of a topology, from top to bottom; copies its lists to the host.

    Neighbouring strips with the same columns are merged, so that a layer takes one product per
    expert.
    """
    found: list[Rectangle] = []
    for new in _runs(topology):
        last = found[-1] if found else None
        if (
            last is not None
            and last.columns == new.columns
            and last.rows.stop == new.rows.start
            and (last.rows.stop - last.rows.start) % topology.block_rows == 0
            and last.blocks.stop == new.blocks.start
        ):
            found[-1] = Rectangle(
                slice(last.rows.start, new.rows.stop),
                new.columns,
                slice(last.blocks.start, new.blocks.stop),
                last.row_strips + 1,
            )
        else:
            found.append(new)
    return found


def _runs(topology: BlockTopology) -> Iterator[Rectangle]:
    """The blocks of each strip of rows, split where consecutive blocks are not adjacent."""
    strips = topology.rows
    lists = (strips.first, strips.end, strips.offsets[:-1], strips.offsets[1:])
    first_column, end_column = strips.first_across.tolist(), strips.end_across.tolist()
    for first, end, begin, stop in zip(*(x.tolist() for x in lists), strict=True):
        start = begin
        for place in range(begin, stop):
            # only a full strip of columns may have a neighbour in the same dense row
            continues = (
                place + 1 < stop
                and first_column[place] + topology.block_columns == end_column[place]
                and end_column[place] == first_column[place + 1]
            )
            if not continues:
                columns = slice(first_column[start], end_column[place])
                yield Rectangle(slice(first, end), columns, slice(start, place + 1), 1)
                start = place + 1


def sdd_torch(
    a: Tensor, b_KN: Tensor, topology: BlockTopology, gather: Gather | None = None
) -> Tensor:
    """The blocks of `a @ b` in the dtype of `a`, whose rows may be gathered."""
    values = a.new_zeros(topology.values_shape)
    tokens_R = None if gather is None else gather.tokens_R
    for part in rectangles(topology):
        rows = a[part.rows] if tokens_R is None else a[tokens_R[part.rows]]
        part.scattered(rows @ b_KN[:, part.columns], values)
    return values


def dsd_torch(
    values: Tensor,
    b: Tensor,
    topology: BlockTopology,
    *,
    is_transposed: bool,
    gather: Gather | None = None,
) -> Tensor:
    """`s @ b` or `s.T @ b` in the dtype of the values; parts of a sum are added in fp32."""
    num_rows = topology.num_columns if is_transposed else topology.num_rows
    out = values.new_zeros(num_rows, b.shape[1], dtype=precise_dtype(values))
    tokens_R = None if gather is None else gather.tokens_R
    for part in rectangles(topology):
        dense = part.gathered(values)
        if is_transposed:
            rows = b[part.rows] if tokens_R is None else b[tokens_R[part.rows]]
            out[part.columns] += dense.T @ rows
        else:
            out[part.rows] += dense @ b[part.columns]
    return out.to(values.dtype)


def _sdd(
    impl: str, a: Tensor, b_KN: Tensor, topology: BlockTopology, gather: Gather | None = None
) -> Tensor:
    if impl == "torch":
        return sdd_torch(a, b_KN, topology, gather)
    from moe_runtime.kernels.block_sparse.kernel import launch_sdd

    return launch_sdd(a, b_KN, topology, gather)


def _dsd(
    impl: str,
    values: Tensor,
    b: Tensor,
    topology: BlockTopology,
    *,
    is_transposed: bool = False,
    gather: Gather | None = None,
) -> Tensor:
    how: dict[str, Any] = {"is_transposed": is_transposed, "gather": gather}
    if impl == "torch":
        return dsd_torch(values, b, topology, **how)
    from moe_runtime.kernels.block_sparse.kernel import launch_dsd

    num_rows = topology.num_columns if is_transposed else topology.num_rows
    out = values.new_empty(num_rows, b.shape[1])
    return launch_dsd(values.contiguous(), b, topology, out=out, **how)


# Gradients are the same two products. With `s = sdd(a, b)`: `da = ds @ b.T`, `db = (ds.T @ a).T`.
# With `y = s @ b`: `ds = sdd(dy, b.T)`, `db = s.T @ dy`; with `y = s.T @ b`: `ds = sdd(b, dy.T)`,
# `db = s @ dy`.
class _Sdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b_KN: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(a, b_KN)
        ctx.topology, ctx.gather, ctx.impl = topology, gather, impl = rest
        return _sdd(impl, a, b_KN, topology, gather)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b_KN = ctx.saved_tensors
        topology, gather, impl = ctx.topology, ctx.gather, ctx.impl
        da = db = None
        if ctx.needs_input_grad[0]:
            da = _dsd(impl, grads[0], b_KN.T, topology)
            if gather is not None:
                order, num_choices = gather
                da = combine(da, None, order, num_choices=num_choices, impl=impl)
        if ctx.needs_input_grad[1]:
            db = _dsd(impl, grads[0], a, topology, is_transposed=True, gather=gather).T
        return da, db, None, None, None


class _Dsd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, b: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(values, b)
        ctx.topology, ctx.is_transposed, ctx.impl = topology, is_transposed, impl = rest
        return _dsd(impl, values, b, topology, is_transposed=is_transposed)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, b = ctx.saved_tensors
        topology, impl, dout = ctx.topology, ctx.impl, grads[0]
        dvalues = db = None
        if ctx.needs_input_grad[0]:
            left, right = (b, dout.T) if ctx.is_transposed else (dout, b.T)
            dvalues = _sdd(impl, left, right, topology)
        if ctx.needs_input_grad[1]:
            db = _dsd(impl, values, dout, topology, is_transposed=not ctx.is_transposed)
        return dvalues, db, None, None, None


BlockSparseImpl = Literal["auto", "triton", "torch", "reference"]
IMPLS: tuple[BlockSparseImpl, ...] = ("auto", "triton", "torch", "reference")


def sdd(
    a: Tensor,
    b_KN: Tensor,
    topology: BlockTopology,
    *,
    sorted_tokens: SortedTokens | None = None,
    gathers_choices: int = 0,
    impl: BlockSparseImpl = "auto",
) -> Tensor:
    """Sampled dense-dense: the topology's blocks of `a @ b`.

    Differentiable in both operands, without atomics: the same bits in every run.

    Args:
        a: `[R, K]`; with `gathers_choices` `[T, K]` in token order.
        b_KN: Any strides.
        topology: The blocks of the `[R, N]` result.
        sorted_tokens: The order of the rows, needed to gather.
        gathers_choices: Choices of a token if rows are gathered, else 0.
        impl: `triton` needs a GPU; `torch` is the CPU path, one product per rectangle of blocks, in
            the dtype of `a`; `reference` is the specification, in fp32 (fp64 for fp64). `auto`
            chooses by device.

    Returns:
        Values `[B, block_rows, block_columns]`, zero past the ends of strips.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or `impl` cannot run here.
        TritonUnavailableError: Triton is needed and not installed.
    """
    chosen = resolve_impl(impl, a.device, IMPLS)
    gather = _gather(a, topology, sorted_tokens, gathers_choices)
    num_rows = topology.num_rows if gather is None else topology.num_rows // gathers_choices
    if a.ndim != 2 or len(a) != num_rows:
        raise ValueError(f"a must be [{num_rows}, K] for this topology, got {list(a.shape)}")
    _validate("b", b_KN, [a.shape[1], topology.num_columns], a, topology)
    if chosen == "reference":
        rows = a if gather is None else a[gather.tokens_R]
        return sdd_reference(rows, b_KN, topology)
    if chosen == "triton":
        check_triton_dtype(a)
    return cast(Tensor, _Sdd.apply(a, b_KN, topology, gather, chosen))


def dsd(
    values: Tensor,
    b: Tensor,
    topology: BlockTopology,
    *,
    is_transposed: bool = False,
    impl: BlockSparseImpl = "auto",
) -> Tensor:
    """Dense from sparse times dense: `s @ b`, or `s.T @ b`. Differentiable like `sdd`.

    Args:
        values: `[B, block_rows, block_columns]`: the blocks of `s`; contents past the ends of
            strips and of unused blocks have no effect.
        b: `[N, D]`, or `[R, D]` if `is_transposed`; any strides.
        topology: The blocks of `s`.
        is_transposed: Multiplies the transposed matrix without moving values.
        impl: As in `sdd`, like the errors.

    Returns:
        `[R, D]`, or `[N, D]` if `is_transposed`; zero in rows without a block.
    """
    chosen = resolve_impl(impl, values.device, IMPLS)
    summed = topology.num_rows if is_transposed else topology.num_columns
    check_shape("values", values, topology.values_shape, "for this topology")
    _validate("b", b, [summed, b.shape[-1]], values, topology)
    if chosen == "reference":
        return dsd_reference(values, b, topology, is_transposed=is_transposed)
    if chosen == "triton":
        check_triton_dtype(values)
    return cast(Tensor, _Dsd.apply(values, b, topology, is_transposed, chosen))


def dds(
    a: Tensor,
    values: Tensor,
    topology: BlockTopology,
    *,
    is_transposed: bool = False,
    impl: BlockSparseImpl = "auto",
) -> Tensor:
    """Dense from dense times sparse: `a @ s`, or `a @ s.T`, as the transpose of a `dsd`.

    `a` is `[D, R]`, or `[D, N]` if `is_transposed`, at any strides; the result, `[D, N]` or `[D,
    R]`, is a transposed view.
    """
    if a.ndim != 2:
        raise ValueError(f"a must have two dimensions, got {list(a.shape)}")
    return dsd(values, a.T, topology, is_transposed=not is_transposed, impl=impl).T


def _gather(
    a: Tensor, topology: BlockTopology, sorted_tokens: SortedTokens | None, num_choices: int
) -> Gather | None:
    if not num_choices:
        return None
    if sorted_tokens is None:
        raise ValueError("gathering needs sorted_tokens")
    num_slots = len(sorted_tokens.order_R)
    if num_choices < 0 or num_slots != topology.num_rows or num_slots % num_choices:
        raise ValueError(
            f"{num_slots} slots of {num_choices} choices do not make the {topology.num_rows} rows "
            "of this topology"
        )
    return Gather(sorted_tokens, num_choices)


def _validate(
    name: str, tensor: Tensor, shape: list[int], like: Tensor, topology: BlockTopology
) -> None:
    check_shape(name, tensor, shape, "for this topology")
    check_like(name, tensor, like, "the other operand")
    if topology.device != like.device:
        raise ValueError(f"the topology is on {topology.device}, the operands on {like.device}")
