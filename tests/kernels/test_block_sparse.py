"""Block-sparse products: the Triton kernels and the CPU path against dense products in fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_precision import assert_as_good_as_eager, assert_rounded_only
from torch import Tensor

from moe_runtime.kernels.block_sparse import (
    BlockTopology,
    ExpertColumns,
    dds,
    dsd,
    expert_topology,
    sdd,
)
from moe_runtime.kernels.block_sparse.op import BlockSparseImpl
from moe_runtime.kernels.token_sort import token_sort

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A topology of experts by token count and width."""

    counts: tuple[int, ...] = (5, 0, 33, 1)
    widths: tuple[int, ...] = (40, 16, 70, 128)
    num_rows: int = 45
    block_rows: int = 16
    block_columns: int = 32

    def topology(self, device: str = "cpu") -> BlockTopology:
        offsets = torch.tensor([0, *self.counts], device=device).cumsum(0)
        columns = ExpertColumns.of(self.widths, block_columns=self.block_columns, device=device)
        return expert_topology(offsets, columns, num_rows=self.num_rows, block_rows=self.block_rows)

    def dense_mask(self) -> Tensor:
        """`[R, N]` bool, element by element, without the topology."""
        full = torch.zeros(self.num_rows, sum(self.widths), dtype=torch.bool)
        row = column = 0
        for count, width in zip(self.counts, self.widths, strict=True):
            full[row : row + count, column : column + width] = True
            row, column = row + count, column + width
        return full


PATTERNS = [
    Pattern(),
    Pattern(counts=(1,), widths=(1,), num_rows=1),
    Pattern(counts=(0, 0, 0, 0), num_rows=3),
    Pattern(counts=(0, 150, 0), widths=(64, 32, 32), num_rows=150, block_rows=64),
    Pattern(counts=(40, 40), widths=(64, 128), num_rows=80, block_rows=32, block_columns=64),
]


def sampled(dense: Tensor, topology: BlockTopology) -> Tensor:
    """The blocks of a dense matrix, cut out one by one."""
    values = dense.new_zeros(topology.values_shape)
    rows = topology.rows
    for block, strip in enumerate(topology.row_of_block_B.tolist()):
        if strip >= 0:
            part = dense[
                int(rows.first[strip]) : int(rows.end[strip]),
                int(rows.first_across[block]) : int(rows.end_across[block]),
            ]
            values[block, : part.shape[0], : part.shape[1]] = part
    return values


@dataclass(frozen=True)
class Run:
    """One product, and what its inputs are made of."""

    name: str
    product: Callable[..., Tensor]
    dense: Callable[[Tensor, Tensor], Tensor]
    is_transposed: bool = False


RUNS = [
    Run("sdd", sdd, lambda a, b: a @ b),
    Run("dsd", dsd, lambda s, b: s @ b),
    Run("dsd.T", dsd, lambda s, b: s.T @ b, is_transposed=True),
    Run("dds", dds, lambda s, a: a @ s),
    Run("dds.T", dds, lambda s, a: a @ s.T, is_transposed=True),
]


def inputs(run: Run, pattern: Pattern, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Left and right operand as dense matrices; the sparse one first, with zeros left out."""
    height, width = pattern.num_rows, sum(pattern.widths)
    if run.name == "sdd":
        return torch.randn(height, dim).to(dtype), torch.randn(dim, width).to(dtype)
    sparse = torch.randn(height, width) * pattern.dense_mask()
    shapes = {
        "dsd": (width, dim),
        "dsd.T": (height, dim),
        "dds": (dim, height),
        "dds.T": (dim, width),
    }
    return sparse.to(dtype), torch.randn(shapes[run.name]).to(dtype)


def output_gradient(*shape: int) -> Tensor:
    """The same for every run, in numbers that bf16 can hold."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).bfloat16().double()


def computed(
    run: Run, pattern: Pattern, first: Tensor, second: Tensor, impl: BlockSparseImpl, device: str
) -> list[Tensor]:
    """The result and both gradients, sparse ones as blocks, on the CPU."""
    topology = pattern.topology(device)
    first, second = first.to(device), second.to(device)
    if run.name == "sdd":
        leaves = [first.detach().requires_grad_(), second.detach().requires_grad_()]
        out = run.product(*leaves, topology, impl=impl)
        grad = output_gradient(pattern.num_rows, sum(pattern.widths))
        dout = sampled(grad.to(device, out.dtype), topology)
    else:
        values = sampled(first, topology)
        # Rubbish where no value is: it must not be read.
        rubbish = torch.full_like(values, torch.nan)
        is_value = sampled(torch.ones_like(first), topology).bool()
        values = torch.where(is_value, values, rubbish)
        leaves = [values.requires_grad_(), second.detach().requires_grad_()]
        operands = leaves if run.name.startswith("dsd") else leaves[::-1]
        out = run.product(*operands, topology, is_transposed=run.is_transposed, impl=impl)
        dout = output_gradient(*out.shape).to(device, out.dtype)
    out.backward(dout)
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    assert all(value is not None for value in found)
    return [value.cpu() for value in found if value is not None]


def expected(run: Run, pattern: Pattern, first: Tensor, second: Tensor) -> list[Tensor]:
    """The same from dense products in fp64."""
    topology = pattern.topology()
    leaves = [first.double().requires_grad_(), second.double().requires_grad_()]
    out = run.dense(*leaves)
    grad = output_gradient(*out.shape)
    mask = pattern.dense_mask()
    if run.name == "sdd":
        grad = grad * mask
    out.backward(grad)
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    if run.name == "sdd":
        return [sampled(out.detach() * mask, topology), leaves[0].grad, leaves[1].grad]
    return [out.detach(), sampled(leaves[0].grad * mask, topology), leaves[1].grad]


CASES = [
    *[(pattern, run, torch.float32) for pattern in PATTERNS[:1] for run in RUNS],
    *[(pattern, run, torch.bfloat16) for pattern in PATTERNS[1:] for run in RUNS[:3]],
    (PATTERNS[0], RUNS[2], torch.float16),
]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("pattern", "run", "dtype"),
    CASES,
    ids=lambda value: getattr(value, "name", None) or str(value).removeprefix("Pattern")[:50],
)
def test_against_fp64(pattern, run, dtype):
    first, second = inputs(run, pattern, 37, dtype)
    exact = expected(run, pattern, first, second)
    eager = computed(run, pattern, first, second, "torch", "cpu")
    found = computed(run, pattern, first, second, "triton", DEVICE)
    precise = computed(run, pattern, first.double(), second.double(), "reference", "cpu")
    for what, value, low, result, spec in zip(
        ("out", "dfirst", "dsecond"), exact, eager, found, precise, strict=True
    ):
        torch.testing.assert_close(spec, value, rtol=1e-12, atol=1e-12)
        assert_as_good_as_eager(result, low, value, what)
        assert_rounded_only(low, value, what)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_rows_gathered_while_they_are_read(impl):
    """Tokens in their own order: the product of the sorted copy, and its gradients."""
    device = DEVICE if impl == "triton" else "cpu"
    ids = torch.randint(0, 4, (19, 2))
    order = token_sort(ids.to(device), 3)
    columns = ExpertColumns.of((20, 48, 33), block_columns=16, device=device)
    topology = expert_topology(order.offsets_E1, columns, num_rows=38, block_rows=16)
    x = torch.randn(19, 24, device=device, requires_grad=True)
    weight = torch.randn(24, 101, device=device, requires_grad=True)
    values = sdd(x, weight, topology, sorted_tokens=order, gathers_choices=2, impl=impl)
    dout = torch.randn_like(values)
    found = [values, *torch.autograd.grad(values, (x, weight), dout)]
    values = sdd(x[order.order_R // 2], weight, topology, impl="reference")
    exact = [values, *torch.autograd.grad(values, (x, weight), dout)]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_gradients_of_the_specification(run):
    pattern = Pattern(counts=(3, 0, 2), widths=(2, 3, 17), num_rows=6, block_columns=16)
    topology = pattern.topology()
    first, second = inputs(run, pattern, 2, torch.float64)
    if run.name == "sdd":
        assert torch.autograd.gradcheck(
            lambda a, b: sdd(a, b, topology, impl="reference"),
            (first.requires_grad_(), second.requires_grad_()),
        )
        return

    def product(sparse: Tensor, dense: Tensor) -> Tensor:
        operands = (sparse, dense) if run.name.startswith("dsd") else (dense, sparse)
        return run.product(*operands, topology, is_transposed=run.is_transposed, impl="reference")

    values = sampled(first, topology)[:2]
    rest = sampled(first, topology)[2:]
    assert torch.autograd.gradcheck(
        lambda some, dense: product(torch.cat([some, rest]), dense),
        (values.requires_grad_(), second.requires_grad_()),
    )


def check(topology: BlockTopology) -> None:
    """What must hold of every topology: both lists name the same blocks, each block once."""
    num_blocks = int(topology.rows.offsets[-1])
    used = topology.row_of_block_B >= 0
    assert used.tolist() == [i < num_blocks for i in range(topology.num_blocks)]
    assert sorted(topology.launch_order_B.tolist()) == list(range(topology.num_blocks))
    assert int(topology.columns.offsets[-1]) == num_blocks
    assert topology.columns.block is not None
    by_row, by_column = {}, {}
    rows, columns = topology.rows, topology.columns
    for strip, (begin, end) in enumerate(pairwise(rows.offsets.tolist())):
        for place in range(begin, end):
            assert int(topology.row_of_block_B[place]) == strip
            by_row[place] = [
                *(int(x[strip]) for x in (rows.first, rows.end)),
                *(int(x[place]) for x in (rows.first_across, rows.end_across)),
            ]
    for strip, (begin, end) in enumerate(pairwise(columns.offsets.tolist())):
        for place in range(begin, end):
            by_column[int(columns.block[place])] = [
                *(int(x[place]) for x in (columns.first_across, columns.end_across)),
                *(int(x[strip]) for x in (columns.first, columns.end)),
            ]
    assert by_row == by_column
    assert len(by_row) == num_blocks


@settings(max_examples=30)
@given(
    experts=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 90)), min_size=1, max_size=6),
    tail=st.integers(0, 40),
    block_rows=st.sampled_from((16, 32)),
    block_columns=st.sampled_from((16, 64)),
)
def test_topology_of_any_experts(experts, tail, block_rows, block_columns):
    """Its lists cover what they should, with as much room as was promised."""
    counts, widths = zip(*experts, strict=True)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    columns = ExpertColumns.of(widths, block_columns=block_columns)
    topology = expert_topology(offsets, columns, num_rows=sum(counts) + tail, block_rows=block_rows)
    check(topology)
    check(topology.trimmed())
    covered = sum(-(-n // block_rows) * -(-w // block_columns) for n, w in experts)
    assert topology.trimmed().num_blocks == covered <= topology.num_blocks
    assert columns.most_blocks(topology.num_rows, block_rows) == topology.num_blocks


def test_room_for_the_worst_case_is_enough():
    """Every row on the widest expert, and every expert with a strip that is nearly empty."""
    columns = ExpertColumns.of((16, 160, 16), block_columns=16)
    for counts in ((0, 64, 0), (1, 62, 1), (17, 30, 17)):
        offsets = torch.tensor([0, *counts]).cumsum(0)
        check(expert_topology(offsets, columns, num_rows=64, block_rows=16))


def test_bad_arguments():
    topology = Pattern().topology()
    values = torch.zeros(topology.values_shape)
    a, b = torch.zeros(45, 8), torch.zeros(8, 254)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: sdd(a[1:], b, topology), r"a must be \[45, K\] .* got \[44, 8\]"),
        (lambda: sdd(a, b[:7], topology), r"b must be \[8, 254\] .* got \[7, 254\]"),
        (lambda: sdd(a, b.double(), topology), r"b must be torch\.float32 .* got torch\.float64"),
        (lambda: sdd(a, b, topology, gathers_choices=2), "gathering needs sorted_tokens"),
        (lambda: sdd(a, b, topology, impl="fast"), "auto, triton, torch, reference, got 'fast'"),  # type: ignore[arg-type]
        (lambda: dsd(values[1:], b.T, topology), r"values must be \[\d+, 16, 32\]"),
        (lambda: dsd(values, a, topology), r"b must be \[254, 8\] .* got \[45, 8\]"),
        (lambda: dds(a, values, topology), r"b must be \[45, 45\]|b must be \[45, 8\]|\[45"),
        (lambda: ExpertColumns.of((), block_columns=16), "one number from 1 on for each expert"),
        (lambda: ExpertColumns.of((4, 0), block_columns=16), r"got \(4, 0\)"),
        (lambda: ExpertColumns.of((4,), block_columns=24), "16, 32, 64, 128, got 24"),
        (lambda: Pattern(counts=(1, 2)).topology(), r"offsets must be \[5\] of int64"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"takes fp32, bf16 or fp16, got torch\.float64"):
        sdd(a.double().to(DEVICE), b.double().to(DEVICE), Pattern().topology(DEVICE), impl="triton")
