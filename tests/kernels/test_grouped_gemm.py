"""`grouped_gemm`: the Triton kernels against the specification in fp64, forward and gradients."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from low_precision import assert_as_good_as_eager
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.grouped_gemm.op import GroupedGemmImpl
from moe_runtime.kernels.token_sort import SortedTokens, token_sort

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape and layout. Ids are drawn so that some slots are unused and some expert empty."""

    num_tokens: int = 21
    num_choices: int = 2
    num_experts: int = 5
    dim_k: int = 37
    dim_n: int = 70
    dtype: torch.dtype = torch.float32
    is_transposed: bool = False
    has_bias: bool = True
    has_slots: bool = False
    gathers: bool = False
    scatters: bool = False
    routing: str = "random"
    tensors: dict[str, Tensor | None] = field(default_factory=dict)

    def drawn(self) -> "Case":
        """The case with its tensors."""
        ids = torch.randint(0, self.num_experts + 1, (self.num_tokens, self.num_choices))
        if self.routing == "one":
            ids = torch.full_like(ids, self.num_experts - 1)
        if self.routing == "skewed":
            ids = (ids.float() ** 2 / (self.num_experts + 1)).long()
        slots = None
        num_slots = self.num_experts
        if self.has_slots:
            num_slots += 3
            slots = torch.randperm(num_slots)[: self.num_experts]
            slots[0] = -1
        rows = self.num_tokens if self.gathers else self.num_tokens * self.num_choices
        shape = (self.dim_k, self.dim_n) if self.is_transposed else (self.dim_n, self.dim_k)
        bias = torch.randn(num_slots, self.dim_n).to(self.dtype) if self.has_bias else None
        tensors = {
            "ids": ids,
            "slots": slots,
            "x": torch.randn(rows, self.dim_k).to(self.dtype),
            "weight": (torch.randn(num_slots, *shape) * self.dim_k**-0.5).to(self.dtype),
            "bias": bias,
            "dout": torch.randn(self.num_tokens * self.num_choices, self.dim_n).to(self.dtype),
        }
        return replace(self, tensors=tensors)

    def run(self, impl: GroupedGemmImpl, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """The result and every gradient."""
        inputs = {
            name: None if value is None else value.to(device, dtype).detach().requires_grad_()
            for name in ("x", "weight", "bias")
            for value in (self.tensors[name],)
        }
        ids, dout, slots = (self.tensors[name] for name in ("ids", "dout", "slots"))
        assert ids is not None
        assert dout is not None
        assert inputs["x"] is not None
        assert inputs["weight"] is not None
        order = token_sort(ids.to(device), self.num_experts, impl="reference")
        out = grouped_gemm(
            inputs["x"],
            inputs["weight"],
            order.offsets_E1,
            bias_SN=inputs["bias"],
            slot_of_expert=None if slots is None else slots.to(device),
            is_transposed=self.is_transposed,
            sorted_tokens=order,
            gathers_choices=self.num_choices if self.gathers else 0,
            scatters=self.scatters,
            impl=impl,
        )
        out.backward(dout.to(device, dtype))
        grads = {f"d{name}": value.grad for name, value in inputs.items() if value is not None}
        assert all(grad is not None for grad in grads.values())
        results = {"out": out.detach(), **grads}
        return {name: value.cpu() for name, value in results.items() if value is not None}


CASES = [
    Case(),
    Case(num_tokens=1, num_choices=1, num_experts=1),
    Case(num_tokens=1, num_choices=4, num_experts=4, has_slots=True, gathers=True),
    Case(num_tokens=63, num_choices=3, dtype=torch.bfloat16, gathers=True),
    Case(dtype=torch.float16, is_transposed=True, has_slots=True, gathers=True, scatters=True),
    Case(num_tokens=150, num_choices=1, routing="one", scatters=True, has_bias=False),
    Case(num_tokens=130, routing="skewed", dim_k=64, dim_n=128, dtype=torch.bfloat16),
    Case(num_tokens=1000, num_choices=1, dim_k=16, dim_n=17, num_experts=3),
]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case)[5:70])
def test_against_fp64(case):
    case = case.drawn()
    exact = case.run("reference", torch.float64, "cpu")
    eager = case.run("torch", case.dtype, "cpu")
    found = case.run("triton", case.dtype, DEVICE)
    for name, value in exact.items():
        assert_as_good_as_eager(found[name], eager[name], value, name)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_the_same_bits_twice(impl):
    case = Case(dtype=torch.bfloat16, num_tokens=40, gathers=True).drawn()
    device = DEVICE if impl == "triton" else "cpu"
    first, second = (case.run(impl, case.dtype, device) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("impl", ["triton", "reference", "torch"])
def test_experts_in_two_calls(impl):
    """Half of the experts now, the others later: the bits of one call, and no row twice."""
    device = DEVICE if impl == "triton" else "cpu"
    ids = torch.randint(0, 6, (30, 2))
    order = SortedTokens(*[t.to(device) for t in token_sort(ids, 6, impl="reference")])
    x, weight = torch.randn(60, 32, device=device), torch.randn(6, 48, 32, device=device)
    whole = grouped_gemm(x, weight, order.offsets_E1, impl=impl)
    out = torch.full_like(whole, torch.nan)
    slots = torch.arange(6, device=device)
    for part in (slots % 2 == 0, slots % 2 == 1):
        table = torch.where(part, slots, -1)
        grouped_gemm(x, weight, order.offsets_E1, slot_of_expert=table, out=out, impl=impl)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_rows_without_an_expert_are_zero(impl):
    device = DEVICE if impl == "triton" else "cpu"
    offsets = torch.tensor([0, 2, 2, 5], device=device)
    x = torch.full((9, 16), torch.nan, device=device)
    x[:5] = 1
    out = grouped_gemm(x, torch.ones(3, 24, 16, device=device), offsets, impl=impl)
    assert out[:5].eq(16).all()
    assert out[5:].eq(0).all()


def test_gradients_of_the_specification():
    case = Case(num_tokens=4, dim_k=3, dim_n=2, num_experts=3, gathers=True).drawn()
    x, weight, bias, ids = (case.tensors[name] for name in ("x", "weight", "bias", "ids"))
    assert ids is not None
    order = token_sort(ids, 3)

    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return grouped_gemm(
            x,
            weight,
            order.offsets_E1,
            bias_SN=bias,
            sorted_tokens=order,
            gathers_choices=2,
            impl="reference",
        )

    inputs = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    assert torch.autograd.gradcheck(product, inputs)


class ResultShapes(TorchDispatchMode):
    """Shapes of all that operations make; those that change an operand make nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.data_ptr() not in {
            one.data_ptr() for one in args if isinstance(one, Tensor)
        }:
            self.made.append(tuple(out.shape))
        return out


def test_a_backward_pass_on_the_cpu_makes_each_whole_gradient_once():
    """And not once for each expert, each beside zeros for all the others."""
    num_experts, (dim_n, dim_k) = 9, (3, 5)
    ids = torch.arange(2 * 18).view(18, 2) % num_experts
    order = token_sort(ids, num_experts)
    x, weight = torch.randn(18, dim_k), torch.randn(num_experts, dim_n, dim_k)
    bias = torch.randn(num_experts, dim_n)
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    gathered = {"sorted_tokens": order, "gathers_choices": 2, "bias_SN": bias}
    out = grouped_gemm(x, weight, order.offsets_E1, impl="torch", **gathered)
    with ResultShapes() as shapes:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    # Gradients of experts are stacked; rows of a token are added up in zeros, and so is the empty
    # product that keeps the result connected.
    x_times, *others = (shapes.made.count(tuple(one.shape)) for one in leaves)
    assert others == [1, 1]
    assert x_times <= 4


def test_bad_arguments():
    x, weight, offsets = torch.zeros(4, 8), torch.zeros(2, 6, 8), torch.tensor([0, 1, 4])
    wrong = [
        ((torch.zeros(4, 9), weight, offsets), {}, r"x must be \[\*, 8\] .* got \[4, 9\]"),
        ((x, weight[0], offsets), {}, r"three dimensions, got \[6, 8\]"),
        ((x, weight, offsets.int()), {}, r"of int64, got \[3\] of torch\.int32"),
        ((x, weight, offsets[:2]), {}, "1 experts and 2 slots need a slot_of_expert"),
        ((x, weight.double(), offsets), {}, r"weight must be torch\.float32 .* got torch\.float64"),
        ((x, weight, offsets), {"scatters": True}, "need sorted_tokens"),
        ((x, weight, offsets), {"bias_SN": torch.zeros(6)}, r"bias must be \[2, 6\], got \[6\]"),
        ((x, weight, offsets), {"out": torch.zeros(4, 8)}, r"out must be \[4, 6\]"),
        ((x, weight, offsets), {"impl": "best"}, "one of auto, triton, torch, reference"),
    ]
    for operands, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            grouped_gemm(*operands, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out cannot be given where a gradient is wanted"):
        grouped_gemm(x.requires_grad_(), weight, offsets, out=torch.zeros(4, 6))
