"""Experts of different widths: every path against one expert after another in fp64."""

from dataclasses import replace

import pytest
import torch
from low_precision import assert_as_good_as_eager, assert_rounded_only
from native_marks import NATIVE
from saved_tensors import saved_bytes
from stacked_experts import leaves, make_routing, run_layer
from torch import Tensor

from moe_runtime.kernels.block_sparse import ExpertColumns
from moe_runtime.kernels.expert_mlp import ActivationSpec, PackedExperts, expert_mlp
from moe_runtime.kernels.native import native_library

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (21, 64, 1, 40)
SWIGLU = ActivationSpec("silu")
# A gate of zero and an up of zero give something else than zero.
OFFSET = ActivationSpec("silu", alpha=1.702, limit=0.7, up_offset=1.0)


NAMES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def packed(
    widths: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    *,
    has_gate: bool = True,
    has_bias: bool = False,
) -> PackedExperts:
    num_columns, scale = sum(widths), dim**-0.5
    tensors = {
        "gate": torch.randn(num_columns, dim) * scale,
        "up": torch.randn(num_columns, dim) * scale,
        "down": torch.randn(num_columns, dim) * 0.2,
        "gate_bias": torch.randn(num_columns),
        "up_bias": torch.randn(num_columns),
        "down_bias": torch.randn(len(widths), dim),
    }
    for name in tensors:
        if (name.startswith("gate") and not has_gate) or (name.endswith("bias") and not has_bias):
            tensors[name] = None
    columns = ExpertColumns.of(widths, block_columns=16)
    return leaves(PackedExperts(columns=columns, **tensors), dtype)


CASES = [
    (13, 2, "gaps", torch.float32, SWIGLU, {}),
    (1, 1, "random", torch.bfloat16, OFFSET, {"has_bias": True}),
    (19, 4, "random", torch.bfloat16, SWIGLU, {}),
    (40, 1, "one", torch.float32, ActivationSpec("relu2"), {"has_gate": False}),
    (21, 3, "gaps", torch.float16, OFFSET, {"has_bias": True}),
    (9, 2, "gaps", torch.float32, ActivationSpec("gelu"), {"has_gate": False, "has_bias": True}),
]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("num_tokens", "top_k", "kind", "dtype", "activation", "layout"), CASES)
def test_against_fp64(num_tokens, top_k, kind, dtype, activation, layout):
    experts = packed(WIDTHS, 24, dtype, **layout)
    x = torch.randn(num_tokens, 24).to(dtype)
    routing = make_routing(num_tokens, top_k, len(WIDTHS), kind=kind, dtype=torch.float32)
    exact = run_layer("reference", torch.float64, experts, x, routing, activation=activation)
    eager = run_layer("torch", dtype, experts, x, routing, activation=activation)
    others = [run_layer("triton", dtype, experts, x, routing, activation=activation)]
    if native_library() is not None:
        others.append(run_layer("native", dtype, experts, x, routing, activation=activation))
    for name, value in exact.items():
        for found in others:
            assert found.keys() == exact.keys()
            assert_as_good_as_eager(found[name], eager[name], value.double(), name, dtype=dtype)
        if name != "weights":
            assert_rounded_only(eager[name], value, name)


@pytest.mark.usefixtures("poisoned_memory")
def test_experts_that_end_before_the_tiles_of_the_widest():
    experts = packed((150, 8, 70), 24, torch.float32, has_bias=True)
    x = torch.randn(9, 24)
    routing = make_routing(9, 2, 3, kind="gaps", dtype=torch.float32)
    exact = run_layer("reference", torch.float64, experts, x, routing, activation=OFFSET)
    eager = run_layer("torch", torch.float32, experts, x, routing, activation=OFFSET)
    found = run_layer("triton", torch.float32, experts, x, routing, activation=OFFSET)
    for name, value in exact.items():
        assert_as_good_as_eager(found[name], eager[name], value.double(), name, dtype=torch.float32)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradients(impl):
    """In fp64, which the CPU path computes in as well."""
    experts = packed((2, 17, 1), 3, torch.float64, has_bias=True)
    ids, weights = make_routing(5, 2, 3, kind="gaps", dtype=torch.float64)

    def output(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        layer = replace(experts, **dict(zip(NAMES, parameters, strict=True)))
        return expert_mlp(x, ids, weights, layer, activation=OFFSET, impl=impl)

    tensors = [torch.randn(5, 3).double(), weights, *(getattr(experts, n) for n in NAMES)]
    assert torch.autograd.gradcheck(output, [t.requires_grad_() for t in tensors])


PATHS = ["triton", "torch", NATIVE]


@pytest.mark.parametrize("impl", PATHS)
def test_recompute_changes_no_bit(impl):
    experts = packed(WIDTHS, 24, torch.bfloat16, has_bias=True)
    x = torch.randn(6, 24).bfloat16()
    routing = make_routing(6, 2, 4, kind="gaps", dtype=torch.float32)
    kept, again = (
        run_layer(impl, torch.bfloat16, experts, x, routing, activation=OFFSET, recompute=recompute)
        for recompute in (False, True)
    )
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("impl", PATHS)
@pytest.mark.parametrize("recompute", [False, True])
def test_kept_for_the_backward_pass(impl, recompute):
    """The input, gate and up of every row's own width, and the order of the rows; or without."""
    device = DEVICE if impl == "triton" else "cpu"
    experts = leaves(packed((16, 48), 24, torch.bfloat16), torch.bfloat16, device)
    experts = replace(experts, waits=True)
    x = torch.randn(32, 24, device=device).bfloat16().requires_grad_()
    # Sixteen rows on each expert, whose widths need no rounding.
    ids = (torch.arange(32, device=device)[:, None] // 16).contiguous()
    weights = torch.rand(32, 1, device=device)
    kept = saved_bytes(
        lambda: expert_mlp(
            x, ids, weights, experts, activation=SWIGLU, impl=impl, recompute=recompute
        ),
        but=[getattr(experts, name) for name in NAMES[:3]],
    )
    order = 8 * (3 + 32)
    hidden = 0 if recompute else 2 * 2 * (16 * 16 + 16 * 48)
    assert kept == 2 * 32 * 24 + hidden + 4 * 32 + order


def test_waiting_changes_no_bit():
    experts = packed(WIDTHS, 24, torch.float32)
    routing = make_routing(30, 2, 4, dtype=torch.float32)
    x = torch.randn(30, 24)
    there_is_room, counted = (
        run_layer("triton", torch.float32, replace(experts, waits=waits), x, routing)
        for waits in (False, True)
    )
    assert all(torch.equal(there_is_room[name], counted[name]) for name in counted)


def test_bad_arguments():
    experts = packed(WIDTHS, 8, torch.float32)
    x, ids, weights = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    wrong = [
        ((x[:, 1:], ids, weights), r"x must be \[\*, 8\], got \[3, 7\]"),
        ((x.double(), ids, weights), r"x must be torch\.float32 .* got torch\.float64"),
        ((x, ids[1:], weights), r"ids must be \[3, K\], got \[2, 2\]"),
        ((x, ids, weights[:, 1:]), r"weights must be \[3, 2\] .* got \[3, 1\]"),
    ]
    for operands, message in wrong:
        with pytest.raises(ValueError, match=message):
            expert_mlp(*operands, experts, activation=SWIGLU)
    ids[0, 1] = 5
    with pytest.raises(ValueError, match=r"ids must be in \[0, 4\).* got 5 for token 0, slot 1"):
        expert_mlp(x, ids, weights, experts, activation=SWIGLU, checks_ids=True)
    with pytest.raises(ValueError, match=r"up must be \[126, D\] .* got \[125, 8\]"):
        replace(experts, up=experts.up[1:])
    with pytest.raises(ValueError, match=r"down must be \[126, 8\] .* got \[125, 8\]"):
        replace(experts, down=experts.down[1:])
    with pytest.raises(ValueError, match=r"down_bias must be \[4, 8\] .* got \[4\]"):
        replace(experts, down_bias=torch.zeros(4))
    with pytest.raises(ValueError, match="gate_bias is given, and gate is not"):
        replace(experts, gate=None, gate_bias=torch.zeros(126))
    with pytest.raises(ValueError, match="one of auto, triton, native, reference, torch"):
        expert_mlp(x, ids, weights, experts, activation=SWIGLU, impl="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither gradients= nor functions"):
        expert_mlp(x, ids, weights, experts, activation=torch.sin)
