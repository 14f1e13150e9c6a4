"""One token's experts: the kernels without matrix units, against fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from launched_kernels import launched
from low_precision import assert_as_good_as_eager
from stacked_experts import make_experts

from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.decode import DecodeProducts, decode_expert_mlp
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits
from moe_runtime.kernels.operands import ActivationSpec
from moe_runtime.kernels.triton_support import PreparedLaunch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, SILU = 6, ActivationSpec("silu")
LAYOUTS: dict[str, dict[str, bool]] = {
    "concatenated": {},
    "alternating": {"is_concatenated": False},
    "without a gate": {"has_gate": False},
}
# the first names an expert twice, and one that is not there; no expert at all; one choice
CHOICES = ([4, 1, 4, 6, 0], [-1, 6], [5])


SIZES = (((70, 33), True), ((2056, 24), False), ((24, 2056), True))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("sizes", "has_bias", "layout", "dtype"),
    [
        pytest.param(
            *(*sizes, layout, dtype),
            marks=[pytest.mark.long] * ((one + other + third) % 3 > 0),
            id=f"{sizes[0]}-{layout}-{dtype}",
        )
        for one, sizes in enumerate(SIZES)
        for other, layout in enumerate(LAYOUTS)
        for third, dtype in enumerate(DTYPES)
    ],
)  # every pair
def test_against_fp64(sizes, has_bias, layout, dtype):
    torch.manual_seed(sum(sizes))
    dim_model, dim_hidden = sizes
    experts = make_experts(
        E, dim_model=dim_model, dim_hidden=dim_hidden, has_bias=has_bias, dtype=dtype,
        **LAYOUTS[layout],
    )  # fmt: skip
    table = torch.tensor([2, 0, 5, -1, 1, 4], dtype=torch.int32)
    experts = replace(experts, slot_of_expert=table)
    x = torch.randn(1, dim_model).to(dtype)
    for chosen in CHOICES:
        ids, weights = torch.tensor([chosen]), torch.rand(1, len(chosen))
        with launched() as kernels:
            found = expert_mlp(
                x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), moved(experts),
                activation="silu", impl="triton",
            ).cpu()  # fmt: skip
        assert kernels == ["decode_up_row", "decode_down_row", "decode_combine"]
        eager, exact = (
            expert_mlp(
                x.to(kind), ids, weights.to(kind), moved(experts, "cpu", kind),
                activation="silu", impl=impl,
            )
            for kind, impl in ((dtype, "torch"), (torch.float64, "reference"))
        )  # fmt: skip
        assert_as_good_as_eager(found, eager, exact, str(chosen))


def moved(experts: Any, device: str = DEVICE, dtype: torch.dtype | None = None) -> Any:
    pairs = zip(experts.names, experts.tensors(), strict=True)
    tensors = {name: None if t is None else t.to(device, dtype or t.dtype) for name, t in pairs}
    return replace(experts, **tensors, slot_of_expert=experts.slot_of_expert.to(device))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_weights_whose_columns_are_whole_go_by_the_kernels_of_more_tokens(is_transposed):
    experts = make_experts(E, dtype=torch.float32, is_transposed=is_transposed)
    experts = moved(replace(experts, slot_of_expert=torch.arange(E)))
    x, ids, weights = torch.randn(1, experts.dim_model), torch.tensor([[1, 2]]), torch.rand(1, 2)
    with launched() as kernels:
        expert_mlp(
            x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), experts,
            activation="silu", impl="triton",
        )  # fmt: skip
    assert kernels[0] == ("decode_up" if is_transposed else "decode_up_row")


@pytest.mark.parametrize("rows_come_first", [False, True])
def test_parts_that_lie_in_other_ways_are_added_to_the_same_sums(rows_come_first, monkeypatch):
    """Such products are summed in several parts on a GPU that has so many multiprocessors."""
    experts = make_experts(E, dim_model=24, dim_hidden=2056, has_bias=False, dtype=torch.float32)
    experts = replace(experts, slot_of_expert=torch.arange(E))
    x, ids, weights = torch.randn(1, 24), torch.tensor([[1, 4, 5]]), torch.rand(1, 3)
    half = (torch.arange(E) < 3).int()
    tables = [torch.arange(E) * half - (1 - half), torch.arange(E) * (1 - half) - half]
    by_columns = experts.down.transpose(1, 2).contiguous().transpose(1, 2)
    parts = [(experts.down, tables[0]), (by_columns, tables[1])]
    products = DecodeProducts(
        x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), E, GpuLimits(num_multiprocessors=132)
    )
    room: list[bool] = []
    start = PreparedLaunch.__call__

    def start_with_room(prepared: PreparedLaunch, **tensors: torch.Tensor) -> None:
        if (partial := tensors.get("partial_ptr")) is not None and len(prepared._grid) == 3:
            room.append(prepared._grid[2] <= len(partial))
            assert room[-1], "sums would lie behind their memory"
        start(prepared, **tensors)

    monkeypatch.setattr(PreparedLaunch, "__call__", start_with_room)
    for down, table in parts if rows_come_first else parts[::-1]:
        products.add(moved(replace(experts, down=down, slot_of_expert=table)), SILU)
    exact = expert_mlp(
        x.double(), ids, weights.double(), moved(experts, "cpu", torch.float64),
        activation="silu", impl="reference",
    )  # fmt: skip
    torch.testing.assert_close(products.sums().cpu().double(), exact, rtol=1e-5, atol=1e-5)
    assert room


def test_without_hidden_columns_the_biases_are_left():
    ids, weights = torch.tensor([[1, 0]], device=DEVICE), torch.rand(1, 2, device=DEVICE)
    x, bias = torch.ones(1, 8, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    experts = StackedExperts(
        gate_up=x.new_empty(2, 0, 8), down=x.new_empty(2, 8, 0), down_bias=bias
    )
    found = decode_expert_mlp(x, ids, weights, experts, SILU)
    torch.testing.assert_close(found, weights @ bias[[1, 0]])
