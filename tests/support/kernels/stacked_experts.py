"""Random experts in every layout, a brute-force answer, and runs with all gradients.

Shape suffixes: E experts, D model, F hidden.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.block_sparse import ExpertColumns
from moe_runtime.kernels.expert_mlp import PackedExperts, StackedExperts, expert_mlp

Experts = TypeVar("Experts", StackedExperts, PackedExperts)

LAYOUTS = [
    {"has_gate": has_gate, "is_transposed": is_transposed, "is_concatenated": is_concatenated}
    for has_gate, is_transposed, is_concatenated in itertools.product((True, False), repeat=3)
    if has_gate or is_concatenated
]
DIM_MODEL, DIM_HIDDEN = 37, 21


def make_experts(
    num_experts: int,
    *,
    dim_model: int = DIM_MODEL,
    dim_hidden: int = DIM_HIDDEN,
    dtype: torch.dtype = torch.float64,
    has_bias: bool = True,
    has_gate: bool = True,
    is_transposed: bool = False,
    is_concatenated: bool = True,
    slot_of_expert: Tensor | None = None,
    num_slots: int | None = None,
) -> StackedExperts:
    """Parameters drawn so that activations keep their size."""
    slots = num_slots or num_experts
    width = 2 * dim_hidden if has_gate else dim_hidden
    gate_up = torch.randn(slots, width, dim_model, dtype=torch.float64) * dim_model**-0.5
    down = torch.randn(slots, dim_model, dim_hidden, dtype=torch.float64) * dim_hidden**-0.5
    if is_transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    biases: list[Tensor | None] = [None, None]
    if has_bias:
        biases = [0.5 * torch.randn(slots, n, dtype=torch.float64) for n in (width, dim_model)]
    return StackedExperts(
        gate_up=gate_up.to(dtype),
        down=down.to(dtype),
        gate_up_bias=None if biases[0] is None else biases[0].to(dtype),
        down_bias=None if biases[1] is None else biases[1].to(dtype),
        has_gate=has_gate,
        is_transposed=is_transposed,
        is_concatenated=is_concatenated,
        slot_of_expert=slot_of_expert,
    )


def expert_by_hand(x_D: Tensor, experts: StackedExperts, slot: int) -> Tensor:
    """One row through one expert with SiLU, written out for each layout."""
    gate_up, down = experts.gate_up[slot], experts.down[slot]
    if experts.is_transposed:
        z = torch.einsum("d,dz->z", x_D, gate_up)
    else:
        z = torch.einsum("d,zd->z", x_D, gate_up)
    if experts.gate_up_bias is not None:
        z = z + experts.gate_up_bias[slot]
    if not experts.has_gate:
        hidden = F.silu(z)
    elif experts.is_concatenated:
        half = len(z) // 2
        hidden = F.silu(z[:half]) * z[half:]
    else:
        hidden = F.silu(z[0::2]) * z[1::2]
    y = torch.einsum("f,fd->d" if experts.is_transposed else "f,df->d", hidden, down)
    return y if experts.down_bias is None else y + experts.down_bias[slot]


def mlp_by_hand(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: StackedExperts
) -> Tensor:
    """Token by token and slot by slot."""
    table = experts.slots()
    rows = []
    for x_D, ids, weights in zip(x_TD, ids_TK.tolist(), weights_TK, strict=True):
        out = torch.zeros_like(x_D)
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < experts.num_experts:
                out = out + weight * expert_by_hand(x_D, experts, table[expert])
        rows.append(out)
    return torch.stack(rows)


def make_routing(
    num_tokens: int, top_k: int, num_experts: int, *, kind: str = "random", dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Ids and gate weights: `random`, `skewed` (few experts), `one` (a single expert), `gaps`
    (a third of the slots not dispatched, by both kinds of sentinel)."""
    scores = torch.randn(num_tokens, num_experts, dtype=torch.float64)
    if kind == "skewed":
        scores += torch.linspace(6, 0, num_experts, dtype=torch.float64)
    ids = scores.topk(top_k).indices
    if kind == "one":
        ids = torch.full_like(ids, num_experts // 2)
    weights = torch.rand(num_tokens, top_k, dtype=torch.float64) + 0.1
    if kind == "gaps":
        holes = torch.rand(num_tokens, top_k) < 0.33
        sentinels = torch.where(torch.rand(num_tokens, top_k) < 0.5, -1, num_experts)
        ids = torch.where(holes, sentinels, ids)
        weights = weights.masked_fill(holes, 0)
    return ids, weights.to(dtype)


def leaves(experts: Experts, dtype: torch.dtype, device: str = "cpu") -> Experts:
    """The experts as leaves of another dtype and device."""
    pairs = zip(experts.names, experts.tensors(), strict=True)
    changes: dict[str, Any] = {
        name: None if tensor is None else tensor.detach().to(device, dtype).requires_grad_()
        for name, tensor in pairs
    }
    if isinstance(experts, PackedExperts):
        own = experts.columns
        changes["columns"] = ExpertColumns.of(
            own.widths, block_columns=own.block_columns, device=device
        )
    elif experts.slot_of_expert is not None:
        changes["slot_of_expert"] = experts.slot_of_expert.to(device)
    return replace(experts, **changes)


def run_layer(
    impl: Any,
    dtype: torch.dtype,
    experts: Any,
    x: Tensor,
    routing: tuple[Tensor, Tensor],
    **options: Any,
) -> dict[str, Tensor]:
    """Output and every gradient of `expert_mlp`, on the CPU; Triton runs on a GPU if there is one.

    The output's gradient is exact in every dtype.
    """
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    experts, (ids, weights) = leaves(experts, dtype, device), routing
    x = x.detach().to(device, dtype).requires_grad_()
    weights = weights.detach().to(device).requires_grad_()
    options = {"activation": "silu"} | options
    out = expert_mlp(x, ids.to(device), weights, experts, impl=impl, **options)
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float32)
    out.backward(dout.bfloat16().to(out))
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    pairs = zip(experts.names, experts.tensors(), strict=True)
    found |= {name: tensor.grad for name, tensor in pairs if tensor is not None}
    return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}


def assert_all_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    """Relative to the largest element: single elements cancel, their error does not shrink."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name].double() - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
