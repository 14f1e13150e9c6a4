"""Every implementation of `expert_mlp` against the specification in fp64: output and gradients."""

from dataclasses import replace

import pytest
import torch
from stacked_experts import DIM_MODEL, LAYOUTS, make_experts, make_routing
from torch import Tensor

from moe_runtime.kernels.expert_mlp import (
    ActivationSpec,
    StackedExperts,
    expert_mlp,
    grouped_expert_mlp,
    products,
)
from moe_runtime.kernels.native import native_library

needs_native = pytest.mark.skipif(native_library() is None, reason="the library was not built")
NATIVE = pytest.param("native", marks=needs_native)
IMPLS = ["torch", NATIVE]
SPECS = [
    ActivationSpec("silu"),
    ActivationSpec("gelu"),
    ActivationSpec("gelu_tanh"),
    ActivationSpec("relu"),
    ActivationSpec("relu2"),
    ActivationSpec("silu", alpha=1.702, limit=0.7, up_offset=1.0),
    ActivationSpec("silu", limit=0.7),
    ActivationSpec("gelu", limit=0.5, clamps_after=True),
    ActivationSpec("silu", gate_softcap=1.5, up_softcap=0.8),
]
NAMES = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")


def with_gradients(
    experts: StackedExperts, x: Tensor, weights: Tensor, *, dtype: torch.dtype
) -> tuple[StackedExperts, Tensor, Tensor]:
    """Leaf copies in a dtype that all want a gradient."""
    leaves = {
        name: getattr(experts, name).detach().to(dtype).requires_grad_()
        for name in NAMES[2:]
        if getattr(experts, name) is not None
    }
    return (
        replace(experts, **leaves),
        x.detach().to(dtype).requires_grad_(),
        weights.detach().to(dtype).requires_grad_(),
    )


def run(
    experts: StackedExperts, x: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype, **options
) -> dict[str, Tensor]:
    """Output and every gradient of one call, in fp64."""
    leaves, x, weights = with_gradients(experts, x, weights, dtype=dtype)
    out = expert_mlp(x, ids, weights, leaves, **options)
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(dtype)
    out.backward(probe)
    found = {"out": out, "x": x.grad, "weights": weights.grad}
    found |= {n: t.grad for n in NAMES[2:] if (t := getattr(leaves, n)) is not None}
    return {name: t.detach().double() for name, t in found.items() if t is not None}


def assert_all_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    """Relative to the largest element: single elements cancel, their error does not shrink."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


# fp64 differs by the order of sums of at most some hundred terms.
FP64 = 1e-12
# fp32 rounds every product and sum: the square root of the length times 2^-24, with a margin.
FP32 = 2e-5


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["random", "gaps", "one"])
def test_layouts(impl, layout, kind):
    experts = make_experts(6, **layout)
    ids, weights = make_routing(31, 3, 6, kind=kind, dtype=torch.float64)
    x = torch.randn(31, DIM_MODEL, dtype=torch.float64)
    dtype = torch.float64 if impl == "torch" else torch.float32
    expected = run(experts, x, ids, weights, torch.float64, activation="silu", impl="reference")
    found = run(experts, x, ids, weights, dtype, activation="silu", impl=impl)
    assert_all_close(found, expected, FP64 if impl == "torch" else FP32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("has_gate", [True, False])
def test_activations(impl, spec, has_gate):
    experts = make_experts(4, has_gate=has_gate)
    ids, weights = make_routing(40, 2, 4, dtype=torch.float64)
    x = 2 * torch.randn(40, DIM_MODEL, dtype=torch.float64)
    dtype = torch.float64 if impl == "torch" else torch.float32
    expected = run(experts, x, ids, weights, torch.float64, activation=spec, impl="reference")
    found = run(experts, x, ids, weights, dtype, activation=spec, impl=impl)
    assert_all_close(found, expected, FP64 if impl == "torch" else FP32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("num_tokens", "top_k"), [(1, 1), (1, 8), (63, 8), (1000, 2), (0, 2)], ids=str
)
@pytest.mark.parametrize("recompute", [False, True])
def test_sizes_slots_and_recompute(impl, num_tokens, top_k, recompute):
    table = torch.randperm(11)[:8]
    experts = make_experts(8, num_slots=11, slot_of_expert=table)
    ids, weights = make_routing(num_tokens, top_k, 8, kind="skewed", dtype=torch.float64)
    x = torch.randn(num_tokens, DIM_MODEL, dtype=torch.float64)
    dtype = torch.float64 if impl == "torch" else torch.float32
    options = {"activation": "silu", "recompute": recompute}
    if num_tokens == 0:
        for name in (impl, "reference"):
            found = run(experts, x, ids, weights, dtype, **options | {"impl": name})
            assert found["out"].shape == (0, DIM_MODEL)
            assert not any(gradient.any() for gradient in found.values())
        return
    expected = run(experts, x, ids, weights, torch.float64, activation="silu", impl="reference")
    found = run(experts, x, ids, weights, dtype, impl=impl, **options)
    assert_all_close(found, expected, FP64 if impl == "torch" else FP32)


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
@pytest.mark.parametrize("widens", [True, False])
def test_half_precision(layout, dtype, unit, widens, monkeypatch):
    """Products as they are, and widened a few rows of a matrix at a time."""
    monkeypatch.setattr(products, "is_faster_widened", lambda *_: widens)
    monkeypatch.setattr(products, "_BLOCK_BYTES", 0)
    monkeypatch.setattr(products, "_MIN_BLOCK_ROWS", 7)
    experts = make_experts(6, dtype=dtype, **layout)
    ids, weights = make_routing(60, 2, 6, kind="gaps", dtype=torch.float64)
    x, weights = torch.randn(60, DIM_MODEL).to(dtype).double(), weights.to(dtype).double()
    expected = run(experts, x, ids, weights, torch.float64, activation="silu", impl="reference")
    for limit in (0, 1000):
        monkeypatch.setattr(products, "native_row_limit", lambda *_, limit=limit, **__: limit)
        found = run(experts, x, ids, weights, dtype, activation="silu", impl="native")
        # Rounded once or twice each: the probe, z, hidden, their gradients, rows, the result.
        assert_all_close(found, expected, 10 * unit)
        again = run(
            experts, x, ids, weights, dtype, activation="silu", impl="native", recompute=True
        )
        assert all(torch.equal(found[name], again[name]) for name in found)


def test_two_experts_in_one_slot():
    """Replicas: both add to the gradient of the slot they share."""
    experts = make_experts(4, num_slots=3, slot_of_expert=torch.tensor([0, 2, 2, 1]))
    ids, weights = make_routing(17, 2, 4, dtype=torch.float64)
    x = torch.randn(17, DIM_MODEL, dtype=torch.float64)
    options = {"activation": "silu"}
    expected = run(experts, x, ids, weights, torch.float64, impl="reference", **options)
    found = run(experts, x, ids, weights, torch.float64, impl="torch", **options)
    assert_all_close(found, expected, FP64)


@pytest.mark.parametrize("impl", IMPLS)
def test_grouped(impl):
    dtype = torch.float64 if impl == "torch" else torch.float32
    experts = make_experts(4, dtype=dtype)
    counts = torch.tensor([3, 0, 7, 2])
    x = torch.randn(15, DIM_MODEL, dtype=dtype)
    x[12:] = torch.nan
    results = []
    for name in (impl, "reference"):
        leaves, x_leaf, _ = with_gradients(experts, x, torch.ones(1), dtype=dtype)
        out = grouped_expert_mlp(x_leaf, counts, leaves, activation="silu", impl=name)
        assert (out[12:] == 0).all()
        out.square().sum().backward()
        found = {"out": out, "x": x_leaf.grad}
        found |= {n: getattr(leaves, n).grad for n in NAMES[2:]}
        results.append({n: t.detach().double() for n, t in found.items() if t is not None})
    assert (results[0]["x"][12:] == 0).all()
    assert_all_close(*results, tolerance=FP64 if impl == "torch" else FP32)


@pytest.mark.parametrize("impl", IMPLS)
def test_frozen_parameters_get_no_gradient_tensor(impl):
    """LoRA beside frozen experts: the backward pass allocates nothing of the experts' size."""
    experts = make_experts(8, dtype=torch.float32, dim_model=64, dim_hidden=128)
    ids, weights = make_routing(20, 2, 8, dtype=torch.float32)
    x = torch.randn(20, 64).requires_grad_()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, Tensor) and tensor._base is None:
                    largest = max(largest, tensor.numel())
            return result

    out = expert_mlp(x, ids, weights.requires_grad_(), experts, activation="silu", impl=impl)
    with Watch():
        out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert 0 < largest < experts.down.numel()


@pytest.mark.parametrize("impl", IMPLS)
def test_two_runs_give_the_same_bits(impl):
    experts = make_experts(8, dtype=torch.float32)
    ids, weights = make_routing(200, 4, 8, dtype=torch.float32)
    x = torch.randn(200, DIM_MODEL)
    first = run(experts, x, ids, weights, torch.float32, activation="silu", impl=impl)
    second = run(experts, x, ids, weights, torch.float32, activation="silu", impl=impl)
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_by_the_c_kernels(layout, dtype, monkeypatch):
    """Experts with few rows go together, those with many one by one, into the same sums."""
    experts = make_experts(6, dtype=dtype, **layout)
    ids, weights = make_routing(40, 2, 6, kind="skewed", dtype=torch.float32)
    ids[3] = torch.tensor([6, -1])
    x = torch.randn(40, DIM_MODEL).to(dtype)
    exact = replace(
        experts, **{n: t.double() for n in NAMES[2:] if (t := getattr(experts, n)) is not None}
    )
    expected = expert_mlp(
        x.double(), ids, weights.double(), exact, activation="silu", impl="reference"
    )
    # bf16: a few roundings of 2^-9, of x's products, the hidden values, the rows and their sum.
    tolerance = FP32 if dtype == torch.float32 else 2e-2
    for limit in (0, 5, 1000):
        monkeypatch.setattr(products, "native_row_limit", lambda *_, limit=limit, **__: limit)
        with torch.no_grad():
            out = expert_mlp(x, ids, weights, experts, activation="silu", impl="native")
        assert (out[3] == 0).all()
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < tolerance


@needs_native
def test_native_refuses_what_it_cannot():
    experts = make_experts(2)
    ids, weights = make_routing(3, 1, 2, dtype=torch.float64)
    x = torch.randn(3, DIM_MODEL, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"impl='native' needs fp32, bf16 or fp16 .*float64"):
        expert_mlp(x, ids, weights, experts, activation="silu", impl="native")
    with pytest.raises(ValueError, match=r"a function as activation .*got impl='native'"):
        expert_mlp(x, ids, weights, experts, activation=torch.sin, impl="native")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(impl, dtype, default):
    """Buffers have the type that the kernels write, whatever new tensors have."""
    experts = make_experts(4)
    # many rows, which are widened where that is faster
    ids, weights = make_routing(70, 2, 4, dtype=torch.float64)
    x = torch.randn(70, DIM_MODEL, dtype=torch.float64)
    expected = run(experts, x, ids, weights, dtype, activation="silu", impl=impl)
    torch.set_default_dtype(default)
    try:
        found = run(experts, x, ids, weights, dtype, activation="silu", impl=impl)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_forward_mode_derivatives():
    """By the specification where nothing is named; refused by an implementation that has none."""
    experts = make_experts(4)
    ids, weights = make_routing(9, 2, 4, dtype=torch.float64)
    x, tangent = torch.randn(2, 9, DIM_MODEL, dtype=torch.float64)
    leaves, _, weights = with_gradients(experts, x, weights, dtype=torch.float64)

    def layer(x: Tensor, impl: str = "auto") -> Tensor:
        return expert_mlp(x, ids, weights, leaves, activation="silu", impl=impl)  # type: ignore[arg-type]

    _, found = torch.func.jvp(layer, (x,), (tangent,))
    difference = (layer(x + 1e-6 * tangent) - layer(x - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(found, difference, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: layer(x, "torch"), (x,), (tangent,))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("of", ["x", "weights", "down"])
def test_second_derivatives_are_refused_also_of_named_inputs(impl, of):
    """torch's own refusal is passed over there, and what is missing counts as zero."""
    dtype = torch.float64 if impl == "torch" else torch.float32
    ids, weights = make_routing(9, 2, 4, dtype=dtype)
    x = torch.randn(9, DIM_MODEL)
    experts, x, weights = with_gradients(make_experts(4), x, weights, dtype=dtype)
    again = {"x": x, "weights": weights, "down": experts.down}[of]
    out = expert_mlp(x, ids, weights, experts, activation="silu", impl=impl)  # type: ignore[arg-type]
    for loss in (out.sum(), out.square().sum()):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives: make the layer with impl="):
            torch.autograd.grad(grad.square().sum(), again, retain_graph=True)


@needs_native
def test_soft_caps_of_small_numbers_keep_their_digits():
    experts = replace(make_experts(4), gate_up_bias=None, down_bias=None)
    experts = replace(experts, gate_up=experts.gate_up * 1e-2)
    spec = ActivationSpec("silu", gate_softcap=30.0, up_softcap=30.0)
    ids, weights = make_routing(9, 2, 4, dtype=torch.float64)
    x = torch.randn(9, DIM_MODEL, dtype=torch.float64)
    found = run(experts, x, ids, weights, torch.float32, activation=spec, impl="native")
    exact = run(experts, x, ids, weights, torch.float64, activation=spec, impl="reference")
    for name, tensor in exact.items():
        # the products of three matrices in fp32, some hundred terms each
        assert (found[name] - tensor).norm() <= 1e-6 * tensor.norm(), name
