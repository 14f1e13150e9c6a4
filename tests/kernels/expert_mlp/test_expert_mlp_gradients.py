"""Every implementation of `expert_mlp` against the specification in fp64: output and gradients."""

from dataclasses import replace

import pytest
import torch
from native_marks import NATIVE, needs_native
from stacked_experts import (
    DIM_MODEL,
    LAYOUTS,
    assert_all_close,
    leaves,
    make_experts,
    make_routing,
    run_layer,
)
from torch import Tensor

from moe_runtime.kernels.expert_mlp import (
    ActivationSpec,
    StackedExperts,
    expert_mlp,
    grouped_expert_mlp,
    products,
)

IMPLS = ["torch", NATIVE]
SPECS = [
    *map(ActivationSpec, ("silu", "gelu", "gelu_tanh", "relu", "relu2")),
    ActivationSpec("silu", alpha=1.702, limit=0.7, up_offset=1.0),
    ActivationSpec("silu", limit=0.7),
    ActivationSpec("gelu", limit=0.5, clamps_after=True),
    ActivationSpec("silu", gate_softcap=1.5, up_softcap=0.8),
]
# fp64 differs by the order of sums of at most some hundred terms.
FP64 = 1e-12
# fp32 rounds every product and sum: the square root of the length times 2^-24, with a margin.
FP32 = 2e-5


def compare(impl: str, experts: StackedExperts, num_tokens: int, top_k: int, **options) -> None:
    """With the specification in fp64; `torch` in fp64 too."""
    scale, kind = options.pop("scale", 1), options.pop("kind", "random")
    dtype = torch.float64 if impl == "torch" else torch.float32
    routing = make_routing(num_tokens, top_k, experts.num_experts, kind=kind, dtype=torch.float64)
    x = scale * torch.randn(num_tokens, DIM_MODEL, dtype=torch.float64)
    exact = run_layer("reference", torch.float64, experts, x, routing, **options)
    found = run_layer(impl, dtype, experts, x, routing, **options)
    assert_all_close(found, exact, FP64 if impl == "torch" else FP32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["random", "gaps", "one"])
def test_layouts(impl, layout, kind):
    compare(impl, make_experts(6, **layout), 31, 3, kind=kind)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("has_gate", [True, False])
def test_activations(impl, spec, has_gate):
    compare(impl, make_experts(4, has_gate=has_gate), 40, 2, scale=2, activation=spec)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 8), (63, 8), (1000, 2)], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_sizes_slots_and_recompute(impl, num_tokens, top_k, recompute):
    experts = make_experts(8, num_slots=11, slot_of_expert=torch.randperm(11)[:8])
    compare(impl, experts, num_tokens, top_k, kind="skewed", recompute=recompute)


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_no_tokens(impl):
    routing = make_routing(0, 2, 4, dtype=torch.float32)
    found = run_layer(impl, torch.float32, make_experts(4), torch.zeros(0, DIM_MODEL), routing)
    assert found["out"].shape == (0, DIM_MODEL)
    assert not any(gradient.any() for gradient in found.values())


def test_two_experts_in_one_slot():
    """Replicas: both add to the gradient of the slot they share."""
    experts = make_experts(4, num_slots=3, slot_of_expert=torch.tensor([0, 2, 2, 1]))
    compare("torch", experts, 17, 2)


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
    ids, weights = make_routing(60, 2, 6, kind="gaps", dtype=dtype)
    x = torch.randn(60, DIM_MODEL).to(dtype)
    exact = run_layer("reference", torch.float64, experts, x, (ids, weights.double()))
    for limit in (0, 1000):
        monkeypatch.setattr(products, "native_row_limit", lambda *_, limit=limit, **__: limit)
        found = run_layer("native", dtype, experts, x, (ids, weights))
        # Rounded once or twice each: z, hidden, their gradients, rows, the result.
        assert_all_close(found, exact, 10 * unit)
        again = run_layer("native", dtype, experts, x, (ids, weights), recompute=True)
        assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("impl", IMPLS)
def test_grouped(impl):
    dtype = torch.float64 if impl == "torch" else torch.float32
    experts = make_experts(4, dtype=dtype)
    counts = torch.tensor([3, 0, 7, 2])
    x = torch.randn(15, DIM_MODEL, dtype=dtype)
    x[12:] = torch.nan
    results = []
    for name in (impl, "reference"):
        own, rows = leaves(experts, dtype), x.clone().requires_grad_()
        out = grouped_expert_mlp(rows, counts, own, activation="silu", impl=name)
        assert (out[12:] == 0).all()
        out.square().sum().backward()
        grads = {name: tensor.grad for name, tensor in zip(own.names, own.tensors(), strict=True)}
        results.append({"out": out.detach(), "x": rows.grad, **grads})
    assert (results[0]["x"][12:] == 0).all()
    assert_all_close(*results, tolerance=FP64 if impl == "torch" else FP32)


class LargestNew(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that an operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("impl", IMPLS)
def test_frozen_parameters_get_no_gradient_tensor(impl):
    """LoRA beside frozen experts: the backward pass allocates nothing of the experts' size."""
    experts = make_experts(8, dtype=torch.float32, dim_model=64, dim_hidden=128)
    ids, weights = make_routing(20, 2, 8, dtype=torch.float32)
    x = torch.randn(20, 64).requires_grad_()
    out = expert_mlp(x, ids, weights.requires_grad_(), experts, activation="silu", impl=impl)
    with LargestNew() as made:
        out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert 0 < made.largest < experts.down.numel()


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_by_the_c_kernels(layout, dtype, monkeypatch):
    """Experts with few rows go together, those with many one by one, into the same sums."""
    experts = make_experts(6, dtype=dtype, **layout)
    ids, weights = make_routing(40, 2, 6, kind="skewed", dtype=torch.float32)
    ids[3] = torch.tensor([6, -1])
    x = torch.randn(40, DIM_MODEL).to(dtype)
    exact = run_layer("reference", torch.float64, experts, x, (ids, weights.double()))["out"]
    # bf16: a few roundings of 2^-9, of x's products, the hidden values, the rows and their sum.
    tolerance = FP32 if dtype == torch.float32 else 2e-2
    for limit in (0, 5, 1000):
        monkeypatch.setattr(products, "native_row_limit", lambda *_, limit=limit, **__: limit)
        with torch.no_grad():
            out = expert_mlp(x, ids, weights, experts, activation="silu", impl="native")
        assert (out[3] == 0).all()
        assert_all_close({"out": out}, {"out": exact}, tolerance)


@needs_native
def test_native_refuses_what_it_cannot():
    experts = make_experts(2)
    ids, weights = make_routing(3, 1, 2, dtype=torch.float64)
    x = torch.randn(3, DIM_MODEL, dtype=torch.float64)
    for activation, message in (
        ("silu", r"impl='native' needs fp32, bf16 or fp16 .*float64"),
        (torch.sin, r"a function as activation .*got impl='native'"),
    ):
        with pytest.raises(ValueError, match=message):
            expert_mlp(x, ids, weights, experts, activation=activation, impl="native")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, None], ids=str)
def test_the_same_bits_again_whatever_the_default_dtype(impl, dtype, default):
    """Buffers have the type that the kernels write, whatever new tensors have."""
    experts = make_experts(4)
    # many rows, which are widened where that is faster
    routing = make_routing(70, 2, 4, dtype=torch.float64)
    x = torch.randn(70, DIM_MODEL, dtype=torch.float64)
    expected = run_layer(impl, dtype, experts, x, routing)
    torch.set_default_dtype(default or torch.float32)
    try:
        found = run_layer(impl, dtype, experts, x, routing)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_forward_mode_derivatives():
    """By the specification where nothing is named; refused by an implementation that has none."""
    experts = leaves(make_experts(4), torch.float64)
    ids, weights = make_routing(9, 2, 4, dtype=torch.float64)
    x, tangent = torch.randn(2, 9, DIM_MODEL, dtype=torch.float64)

    def layer(x: Tensor, impl: str = "auto") -> Tensor:
        return expert_mlp(x, ids, weights, experts, activation="silu", impl=impl)  # type: ignore[arg-type]

    _, found = torch.func.jvp(layer, (x,), (tangent,))
    difference = (layer(x + 1e-6 * tangent) - layer(x - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(found, difference, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: layer(x, "torch"), (x,), (tangent,))


@needs_native
def test_soft_caps_of_small_numbers_keep_their_digits():
    experts = replace(make_experts(4), gate_up_bias=None, down_bias=None)
    experts = replace(experts, gate_up=experts.gate_up * 1e-2)
    spec = ActivationSpec("silu", gate_softcap=30.0, up_softcap=30.0)
    routing = make_routing(9, 2, 4, dtype=torch.float64)
    x = torch.randn(9, DIM_MODEL, dtype=torch.float64)
    found = run_layer("native", torch.float32, experts, x, routing, activation=spec)
    exact = run_layer("reference", torch.float64, experts, x, routing, activation=spec)
    for name, tensor in exact.items():
        # the products of three matrices in fp32, some hundred terms each
        assert (found[name] - tensor).norm() <= 1e-6 * tensor.norm(), name
