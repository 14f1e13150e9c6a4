"""`expert_mlp` with Triton kernels against the specification in fp64, forward and all gradients."""

from dataclasses import replace

import pytest
import torch
from low_precision import assert_as_good_as_eager
from stacked_experts import LAYOUTS, leaves, make_experts, make_routing, run_layer
from torch import Tensor

from moe_runtime.kernels.expert_mlp import (
    ActivationSpec,
    StackedExperts,
    decode,
    expert_mlp,
    grouped_expert_mlp,
)
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
from moe_runtime.kernels.operands import ACTIVATION_NAMES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMULAS = [
    ActivationSpec("silu", alpha=1.702, limit=0.7, up_offset=1.0),
    ActivationSpec("silu", limit=0.5, clamps_after=True),
    ActivationSpec("silu", gate_softcap=0.8, up_softcap=0.6),
    *map(ActivationSpec, ACTIVATION_NAMES),
]


def compare(
    experts: StackedExperts,
    num_tokens: int,
    dtype: torch.dtype,
    *,
    kind: str = "gaps",
    top_k: int = 2,
    **options: object,
) -> None:
    """Triton held to twice the error of torch's own operations, with rounded inputs for all."""
    experts = leaves(experts, dtype)
    x = torch.randn(num_tokens, experts.dim_model).to(dtype)
    routing = make_routing(num_tokens, top_k, experts.num_experts, kind=kind, dtype=torch.float32)
    exact = run_layer("reference", torch.float64, experts, x, routing, **options)
    eager = run_layer("torch", dtype, experts, x, routing, **options)
    found = run_layer("triton", dtype, experts, x, routing, **options)
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert_as_good_as_eager(found[name], eager[name], value.double(), name, dtype=dtype)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        # the types in turn over the layouts
        pytest.param(layout, dtype, marks=[pytest.mark.long] * ((place + turn) % 2))
        for place, layout in enumerate(LAYOUTS)
        for turn, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_layouts(layout, dtype):
    compare(make_experts(4, **layout), 9, dtype)


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
@pytest.mark.parametrize("has_gate", [True, False])
def test_formulas(formula, has_gate):
    if has_gate or formula == ActivationSpec(formula.function):
        compare(make_experts(3, has_gate=has_gate), 5, torch.float32, activation=formula)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "kind"),
    [(1, 1, "random"), (63, 4, "random"), (70, 1, "one"), (40, 3, "skewed")],
)
def test_shapes(num_tokens, top_k, kind):
    compare(make_experts(4), num_tokens, torch.bfloat16, top_k=top_k, kind=kind)


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [520, 1000])
def test_many_tokens(num_tokens):
    """More than the one-block sort takes, and several row tiles an expert, the last ones cut off;
    narrow, as the interpreter is slow."""
    experts = make_experts(3, dim_model=9, dim_hidden=7)
    compare(experts, num_tokens, torch.float32, top_k=1, kind="random")


def test_recompute_and_slots():
    experts = make_experts(3, num_slots=7, slot_of_expert=torch.tensor([5, 0, 3]))
    compare(experts, 12, torch.float32, recompute=True)


def test_wide_tiles():
    """Wider and deeper than one tile of any shipped configuration, many rows an expert."""
    experts = make_experts(1, dim_model=72, dim_hidden=136)
    compare(experts, 200, torch.bfloat16, top_k=1, kind="random")


def test_inputs_whose_elements_lie_apart():
    """Every operand a view with other strides: the bits of contiguous copies.

    For a GPU, kernels of other strides are other code, whose threads share a sum otherwise.
    """
    experts, (ids, weights) = make_experts(3), make_routing(9, 2, 3, dtype=torch.float32)
    x, grad = (torch.randn(9, experts.dim_model) for _ in range(2))

    def run_with(impl: ExpertMlpImpl, dtype: torch.dtype, *, apart: bool) -> list[Tensor]:
        device = DEVICE if impl == "triton" else "cpu"

        def laid_out(tensor: Tensor) -> Tensor:
            tensor = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
            if apart:
                tensor = tensor.repeat_interleave(2, dim=-1)[..., ::2]
            return tensor.requires_grad_(tensor.is_floating_point())

        parameters = [laid_out(t) for t in experts.tensors() if t is not None]
        inputs = [laid_out(x), laid_out(weights)]
        layer = replace(experts, **dict(zip(experts.names, parameters, strict=True)))
        out = expert_mlp(inputs[0], laid_out(ids), inputs[1], layer, activation="silu", impl=impl)
        dout = laid_out(grad).detach()
        found = [out, *torch.autograd.grad(out, [*inputs, *parameters], dout)]
        return [tensor.detach().cpu() for tensor in found]

    near = run_with("triton", torch.float32, apart=False)
    far = run_with("triton", torch.float32, apart=True)
    if DEVICE == "cpu":
        assert all(map(torch.equal, near, far))
    exact = run_with("reference", torch.float64, apart=False)
    for one, other, value in zip(near, far, exact, strict=True):
        assert_as_good_as_eager(other, one, value)


@pytest.mark.parametrize("impl", ["triton", "torch", "auto"])
@pytest.mark.parametrize("is_training", [True, False])
def test_ids_out_of_range_read_nothing(impl, is_training):
    """They add nothing, far out of range or near; an error only where they are looked for."""
    device = DEVICE if impl == "triton" else "cpu"
    experts = leaves(make_experts(3), torch.float32, device)
    x, weights = torch.randn(4, experts.dim_model, device=device), torch.rand(4, 2, device=device)
    ids = torch.tensor([[0, 10**9], [-(10**9), 1], [3, -1], [2, 4]], device=device)
    kept = torch.where((ids >= 0) & (ids < 3), ids, 3)
    with torch.set_grad_enabled(is_training):
        found, expected = (
            expert_mlp(x, some, weights, experts, activation="silu", impl=impl)
            for some in (ids, kept)
        )
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"must be in \[0, 3\), .* got 1000000000 for token 0"):
        expert_mlp(x, ids, weights, experts, activation="silu", impl=impl, checks_ids=True)


@torch.no_grad()
def inferred(
    impl: str, dtype: torch.dtype, experts: StackedExperts, x: Tensor, routing: tuple[Tensor, ...]
) -> Tensor:
    device = DEVICE if impl == "triton" else "cpu"
    inputs = (x.to(dtype), *routing)
    layer = leaves(experts, dtype, device)
    return expert_mlp(*(t.to(device) for t in inputs), layer, activation="silu", impl=impl).cpu()  # type: ignore[arg-type]


# Every layout at seven tokens; the fewest and the most in two layouts.
FEW_TOKENS = [
    *[(7, "gaps", layout) for layout in LAYOUTS],
    *[(n, kind, layout) for n, kind in ((1, "random"), (16, "one")) for layout in LAYOUTS[0:4:3]],
]


@pytest.mark.parametrize(("num_tokens", "kind", "layout"), FEW_TOKENS, ids=str)
def test_few_tokens(num_tokens, kind, layout):
    """The kernels of inference; `one` names the same expert twice for every token."""
    dtype = torch.bfloat16 if num_tokens == 7 else torch.float32
    experts = make_experts(5, dtype=dtype, **layout)
    x = torch.randn(num_tokens, experts.dim_model).to(dtype)
    given = experts, x, make_routing(num_tokens, 2, 5, kind=kind, dtype=torch.float32)
    ways = (("triton", dtype), ("torch", dtype), ("reference", torch.float64))
    assert_as_good_as_eager(*(inferred(impl, kind, *given) for impl, kind in ways))


def test_few_tokens_in_parts(monkeypatch):
    """The summed dimension in several parts, with a slot table and biases."""
    monkeypatch.setattr(decode, "_PROGRAMS_EACH", 8)
    experts = make_experts(
        3, num_slots=7, slot_of_expert=torch.tensor([6, 2, 4]), dim_hidden=700, dtype=torch.float32
    )
    given = experts, torch.randn(3, experts.dim_model)
    routing = make_routing(3, 2, 3, kind="gaps", dtype=torch.float32)
    found, exact = (inferred(n, torch.float32, *given, routing) for n in ("triton", "reference"))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_rows_that_are_sorted_already():
    experts = make_experts(3, dtype=torch.float32)
    x, counts, results = torch.randn(8, experts.dim_model), torch.tensor([2, 0, 4]), []
    for impl in ("triton", "reference"):
        device = DEVICE if impl == "triton" else "cpu"
        own, rows = leaves(experts, torch.float32, device), x.to(device).requires_grad_()
        out = grouped_expert_mlp(rows, counts.to(device), own, activation="gelu", impl=impl)  # type: ignore[arg-type]
        out.square().sum().backward()
        found = [out.detach(), rows.grad, *(tensor.grad for tensor in own.tensors())]
        results.append([tensor.cpu() for tensor in found])
        x = x.detach().clone()
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
