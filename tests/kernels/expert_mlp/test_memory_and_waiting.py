"""What is kept for a backward pass, and that no call waits for the GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_marks import NATIVE
from saved_tensors import saved_bytes
from stacked_experts import make_experts, make_routing
from torch import Tensor

from moe_runtime.kernels.block_sparse import ExpertColumns
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import ActivationSpec, PackedExperts, StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.decode import DecodeProducts
from moe_runtime.kernels.expert_mlp.rows import RoutedBatch, SortedRows
from moe_runtime.kernels.expert_mlp.triton_path import TritonPath
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits
from moe_runtime.kernels.token_sort import token_sort

HAS_GPU = torch.cuda.is_available()
SILU = ActivationSpec("silu")
IMPLS = ["triton", "torch", NATIVE]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("recompute", [False, True])
def test_kept_for_the_backward_pass(impl, recompute):
    """2 T D + 4 T K F bytes of bf16, gate weights and routing; with `recompute` 2 T D."""
    T, K, E, D, F = 8, 3, 4, 16, 16
    device = "cuda" if HAS_GPU and impl == "triton" else "cpu"
    experts = make_experts(E, dim_model=D, dim_hidden=F)
    leaves = {
        name: getattr(experts, name).to(device, torch.bfloat16).requires_grad_()
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
    }
    experts = replace(experts, **leaves)
    x = torch.randn(T, D, device=device).bfloat16().requires_grad_()
    ids, weights = make_routing(T, K, E, dtype=torch.float32)
    kept = saved_bytes(
        lambda: expert_mlp(
            x,
            ids.to(device),
            weights.to(device).requires_grad_(),
            experts,
            activation="silu",
            impl=impl,  # type: ignore[arg-type]
            recompute=recompute,
        ),
        but=experts.tensors(),
    )
    gate_weights, order, offsets = 4 * T * K, 8 * T * K, 8 * (E + 1)
    preactivations = 0 if recompute else 4 * T * K * F
    assert kept == 2 * T * D + preactivations + gate_weights + order + offsets


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fails whatever asks the device for a number; gives the names of the kernels started.

    On a GPU torch finds it. Elsewhere tensors are of the device `meta`, which has no numbers to
    give, and kernels are not run.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import KernelInterface

    started: list[str] = []
    original, at_once = KernelInterface.__getitem__, CompiledKernel.__getitem__

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        started.append(kernel.fn.__name__)
        assert all(type(size) is int and size > 0 for size in grid)
        return original(kernel, grid) if HAS_GPU else lambda **arguments: None

    def getitem_of_compiled(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        started.append(kernel.metadata.name)
        return at_once(kernel, grid)

    with monkeypatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", getitem)
        patch.setattr(CompiledKernel, "__getitem__", getitem_of_compiled)
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield started
        finally:
            if HAS_GPU:
                torch.cuda.set_sync_debug_mode("default")


DEVICE = "cuda" if HAS_GPU else "meta"
T, K, E, D, F = 40, 2, 4, 32, 16


def operands() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.zeros(T, D, device=DEVICE).requires_grad_()
    ids = torch.zeros(T, K, device=DEVICE, dtype=torch.int64)
    return x, ids, torch.zeros(T, K, device=DEVICE).requires_grad_()


def stacked() -> StackedExperts:
    experts = make_experts(E, dim_model=D, dim_hidden=F, dtype=torch.float32)
    tensors = {
        name: getattr(experts, name).to(DEVICE)
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
    }
    slots = torch.arange(E, dtype=torch.int64).to(DEVICE)
    return replace(experts, **tensors, slot_of_expert=slots)


def whole_layer() -> Callable[[], None]:
    """The three functions that the operator calls on a GPU; on `meta` it would call none."""
    x, ids, weights = (t.detach() for t in operands())
    experts, path = stacked(), TritonPath()

    def call() -> None:
        path.infer(RoutedBatch(x, ids, weights, experts, SILU))
        path.infer(RoutedBatch(x[:3], ids[:3], weights[:3], experts, SILU))
        order = token_sort(ids, E, impl="triton")
        rows = SortedRows(order.order_R, order.offsets_E1)
        batch = RoutedBatch(x, ids, weights, experts, SILU, rows)
        for keeps in (True, False):
            out, z = path.forward(batch, keeps=keeps)
            path.backward(out, batch, z, [True] * 6)

    return call


def products() -> Callable[[], None]:
    x, ids, weights = operands()
    weight = torch.zeros(E, F, D, device=DEVICE).requires_grad_()

    def call() -> None:
        order = token_sort(ids, E, impl="triton")
        y = grouped_gemm(
            x, weight, order.offsets_E1, sorted_tokens=order, gathers_choices=K, impl="triton"
        )
        combine(y, weights, order, impl="triton").sum().backward()

    return call


def experts_of_different_widths() -> Callable[[], None]:
    x, ids, weights = (t.detach() for t in operands())
    widths = (8, 16, 40, 8)
    columns = ExpertColumns.of(widths, block_columns=16, device="cpu")
    moved = {
        name: getattr(columns, name).to(DEVICE)
        for name in ("starts_E1", "strips_E", "first", "end")
    }
    gate, up, down = (torch.zeros(72, D, device=DEVICE) for _ in range(3))
    experts = PackedExperts(gate=gate, up=up, down=down, columns=replace(columns, **moved))

    def call() -> None:
        order = token_sort(ids, E, impl="triton")
        rows, path = SortedRows(order.order_R, order.offsets_E1), TritonPath()
        batch = RoutedBatch(x, ids, weights, experts, SILU, rows)
        for keeps in (True, False):
            out, kept = path.forward(batch, keeps=keeps)
            path.backward(out, batch, kept, [True] * 5 + [False] * 3)

    return call


def rows_of_others() -> Callable[[], None]:
    """A step of few tokens of which somebody else computes a part."""
    x, ids, weights = (t.detach()[:3] for t in operands())
    experts = stacked()
    rows = torch.zeros(2, dtype=torch.int32, device=DEVICE)

    def call() -> None:
        products = DecodeProducts(x, ids, weights, E, GpuLimits())
        products.add(experts, SILU)
        products.give(rows, x[:2])
        products.sums()

    return call


@pytest.mark.parametrize(
    ("prepare", "kernels"),
    [
        (rows_of_others, {"decode_up", "decode_down", "decode_combine"}),
        (whole_layer, {"decode_up", "grouped_gemm_dw", "gate_weight_grad", "_token_sort_small"}),
        (products, {"grouped_gemm_fwd", "_combine_bwd"}),
        (experts_of_different_widths, {"tile_map", "grouped_gemm_down_act", "gate_weight_grad"}),
    ],
)
def test_the_host_never_waits(prepare, kernels, monkeypatch):
    """Of what a layer does; its operands are there already."""
    call = prepare()
    if HAS_GPU:
        call()  # what is compiled and allocated at the first call may wait
    with no_waiting(monkeypatch) as started:
        call()
    assert kernels <= set(started)


@pytest.mark.skipif(HAS_GPU, reason="is about the stand-in for a GPU")
@pytest.mark.parametrize(
    "ask", [Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, Tensor.unique, Tensor.numpy]
)
def test_a_question_to_the_device_would_be_noticed(ask):
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        ask(torch.zeros(1, device=DEVICE))
