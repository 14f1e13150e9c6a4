"""`sdd`, `dsd` and `dds`: validation and choice of the implementation.

The letters say, as in MegaBlocks (Gale et al., 2022), what result, left and right operand are:
sparse (S) or dense (D). Shape suffixes: T tokens, R rows and N columns of the sparse matrix, K and
D other dimensions, B stored blocks.
"""

from __future__ import annotations

from typing import Literal, cast

from torch import Tensor

from moe_runtime.kernels.block_sparse.autograd import BlockSparseProducts, Dsd, Sdd
from moe_runtime.kernels.block_sparse.reference import dsd_reference, sdd_reference
from moe_runtime.kernels.block_sparse.topology import BlockTopology, Gather
from moe_runtime.kernels.operands import check_like, check_shape
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.triton_support import check_triton_dtype, resolve_impl

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
    """Sampled dense-dense: the blocks of `a @ b` that the topology has, and no others.

    Differentiable in both operands, without atomics: the same bits in every run.

    Args:
        a: `[R, K]`; with `gathers_choices` `[T, K]` in token order, gathered while it is read.
        b_KN: `[K, N]`, any strides.
        topology: The blocks of the `[R, N]` result.
        sorted_tokens: The order of the rows, needed to gather.
        gathers_choices: Choices of a token, if rows are gathered.
        impl: `triton` needs a GPU; `torch` is the CPU path, one product a rectangle of blocks, in
            the dtype of `a`; `reference` is the specification, in fp32 (fp64 for fp64). `auto` is
            `triton` on a GPU and `torch` elsewhere.

    Returns:
        Values `[B, block_rows, block_columns]`, zero past the ends of strips.

    Raises:
        ValueError: Shapes, dtypes or devices do not belong together, or `impl` cannot run here.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
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
    products = _products(chosen, a)
    return cast(Tensor, Sdd.apply(a, b_KN, topology, gather, products))


def dsd(
    values: Tensor,
    b: Tensor,
    topology: BlockTopology,
    *,
    is_transposed: bool = False,
    impl: BlockSparseImpl = "auto",
) -> Tensor:
    """Dense from sparse times dense: `s @ b`, or `s.T @ b`. Differentiable as `sdd` is.

    Args:
        values: `[B, block_rows, block_columns]`: the blocks of `s`. What lies past the ends of
            strips and in unused blocks has no effect.
        b: `[N, D]`, or `[R, D]` if `is_transposed`; any strides.
        topology: The blocks of `s`.
        is_transposed: Whether the transposed matrix is multiplied; no value is moved for it.
        impl: As in `sdd`.

    Returns:
        `[R, D]`, or `[N, D]` if `is_transposed`; zero in rows that have no block.

    Raises:
        ValueError: As in `sdd`.
        TritonUnavailableError: As in `sdd`.
    """
    chosen = resolve_impl(impl, values.device, IMPLS)
    summed = topology.num_rows if is_transposed else topology.num_columns
    check_shape("values", values, topology.values_shape, "for this topology")
    _validate("b", b, [summed, b.shape[-1]], values, topology)
    if chosen == "reference":
        return dsd_reference(values, b, topology, is_transposed=is_transposed)
    products = _products(chosen, values)
    return cast(Tensor, Dsd.apply(values, b, topology, is_transposed, products))


def dds(
    a: Tensor,
    values: Tensor,
    topology: BlockTopology,
    *,
    is_transposed: bool = False,
    impl: BlockSparseImpl = "auto",
) -> Tensor:
    """Dense from dense times sparse: `a @ s`, or `a @ s.T`, as the transpose of a `dsd`.

    Args:
        a: `[D, R]`, or `[D, N]` if `is_transposed`; any strides.
        values: As in `dsd`, and so `topology` and `impl`.
        topology: See there.
        is_transposed: Whether `a` is multiplied by the transposed matrix.
        impl: See there.

    Returns:
        `[D, N]`, or `[D, R]` if `is_transposed`; a transposed view.

    Raises:
        ValueError: As in `sdd`.
        TritonUnavailableError: As in `sdd`.
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


def _products(chosen: str, x: Tensor) -> BlockSparseProducts:
    if chosen == "torch":
        return BlockSparseProducts("torch")
    check_triton_dtype(x)
    return BlockSparseProducts("triton")
