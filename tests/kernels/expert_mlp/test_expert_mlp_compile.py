"""`expert_mlp` inside torch.compile, under autocast, and in torch's own check of operators."""

import pytest
import torch
from native_marks import NATIVE
from stacked_experts import DIM_MODEL, make_experts, make_routing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp, grouped_expert_mlp
from moe_runtime.kernels.expert_mlp.operators import FLOP_FORMULAS

IMPLS = ["torch", NATIVE]


class Layer(torch.nn.Module):
    """Something before and something after, so that the compiler has a graph to break."""

    def __init__(self, impl: str) -> None:
        super().__init__()
        experts = make_experts(5, dtype=torch.float32)
        self.gate_up = torch.nn.Parameter(experts.gate_up)
        self.down = torch.nn.Parameter(experts.down)
        self.router = torch.nn.Linear(DIM_MODEL, 5)
        self.impl = impl

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        experts = StackedExperts(gate_up=self.gate_up, down=self.down)
        impl = self.impl
        return x + expert_mlp(x, ids, weights, experts, activation="silu", impl=impl)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_without_a_break(impl):
    layer = Layer(impl)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (11, 3):
        x = torch.randn(num_tokens, DIM_MODEL)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
        layer(x).square().sum().backward()
        expected = [p.grad for p in layer.parameters()]
        layer.zero_grad(set_to_none=True)
        compiled(x).square().sum().backward()
        # The graph around the operator may sum in another order.
        for parameter, grad in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5)
        layer.zero_grad(set_to_none=True)


class Operators(TorchDispatchMode):
    """The names of those that were called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_looks_at_operators_sees_one_and_the_same_values():
    """Without a gradient and an observer no operator is called."""
    experts = make_experts(3, dtype=torch.float32)
    ids, weights = make_routing(6, 2, 3, dtype=torch.float32)
    x = torch.randn(6, DIM_MODEL)

    def run(x: torch.Tensor) -> torch.Tensor:
        return expert_mlp(x, ids, weights, experts, activation="silu", impl="torch")

    with torch.no_grad():
        unseen = run(x)
        with Operators() as seen:
            assert torch.equal(run(x), unseen)
        assert "moe_runtime.expert_mlp.default" in seen.names
        both = torch.func.vmap(run)(torch.stack([x, -x]))
        assert torch.equal(both, torch.stack([unseen, run(-x)]))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["formula", "function"])
@pytest.mark.parametrize("trained", ["x", "weights", "gate_up", "down", "all"])
def test_operations_are_counted(activation, recompute, trained):
    """As many as those of the reference's own products; recomputation adds the first product.

    Gate weights alone cost the second once more: the reference keeps what it gave.
    """
    is_formula = isinstance(activation, str)
    made = make_experts(3, dtype=torch.float32, has_gate=is_formula, has_bias=False)
    ids, weights = torch.tensor([[2, 0], [0, 2], [2, 0]]), torch.rand(3, 2)
    leaves = {"x": torch.randn(3, DIM_MODEL), "weights": weights}
    leaves |= {"gate_up": made.gate_up, "down": made.down}
    for name, leaf in leaves.items():
        leaf.requires_grad_(trained in (name, "all"))
    counted = []
    for impl in ("torch", "reference"):
        with FlopCounterMode(display=False, custom_mapping=dict(FLOP_FORMULAS)) as counter:
            expert_mlp(
                leaves["x"], ids, weights, made, activation=activation, impl=impl,  # type: ignore[arg-type]
                recompute=recompute,
            ).sum().backward()  # fmt: skip
        counted.append(counter.get_total_flops())
    again = recompute * made.gate_up[0].numel() + (trained == "weights") * made.down[0].numel()
    assert counted[0] - 2 * ids.numel() * again * is_formula == counted[1] > 0


@pytest.mark.parametrize("impl", IMPLS)
def test_operator_check(impl):
    """Schema, shapes under the compiler, and registration of the gradient, as torch checks them."""
    experts = make_experts(3, dtype=torch.float32)
    ids, weights = make_routing(6, 2, 3, dtype=torch.float32)
    x = torch.randn(6, DIM_MODEL)
    from moe_runtime.kernels.expert_mlp import ActivationSpec

    tensors = [t.requires_grad_() for t in (x, weights, *experts.tensors()) if t is not None]
    layout = (experts.has_gate, experts.is_transposed, experts.is_concatenated)
    static = (*layout, "silu", ActivationSpec("silu").numbers(), impl)
    arguments = (tensors[0], ids, tensors[1], None, *tensors[2:], None, *static, True, False)
    torch.library.opcheck(
        torch.ops.moe_runtime.expert_mlp.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast(impl):
    """Parameters stay fp32, products run in bf16, the output has the dtype of the input."""
    experts = make_experts(4, dtype=torch.float32, dim_model=64, dim_hidden=32)
    ids, weights = make_routing(10, 2, 4, dtype=torch.float32)
    x = torch.randn(10, 64)
    leaves = [t.requires_grad_() for t in experts.tensors() if t is not None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = expert_mlp(x, ids, weights, experts, activation="silu", impl=impl)
        rows = grouped_expert_mlp(
            x, torch.tensor([10, 0, 0, 0]), experts, activation="silu", impl=impl
        )
    assert out.dtype == rows.dtype == torch.float32
    exact = expert_mlp(x, ids, weights, experts, activation="silu", impl="reference")
    error = (out - exact).abs().max() / exact.abs().max()
    # A few roundings of bf16, and not none: otherwise autocast would have been ignored.
    assert 1e-4 < error < 3e-2
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves)
