"""The CPU path: the C kernels where an expert has few rows, torch's products where it has many.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, n rows of one expert, D model.
"""

from __future__ import annotations

from torch import Tensor

from moe_runtime.kernels.expert_mlp import torch_path
from moe_runtime.kernels.expert_mlp.activation import ActivationSpec
from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.rows import Gradients, Needs, SortedRows, sort_rows
from moe_runtime.kernels.native import require_native


class NativeSteps(torch_path.TorchSteps):
    """The steps between the products in C."""


STEPS = NativeSteps()


def infer(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts,
    activation: ActivationSpec,
) -> Tensor:
    """The output ``[T, D]`` with nothing kept."""
    rows = sort_rows(ids_TK, experts.num_experts)
    return forward(x_TD, weights_TK, rows, experts, activation, keeps=False)[0]


def forward(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec,
    *,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """As `torch_path.forward`.

    Raises:
        NativeUnavailableError: The library was not built.
    """
    require_native()
    return torch_path.forward(x_TD, weights_TK, rows, experts, activation, keeps=keeps, steps=STEPS)


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor | None,
    z_RZ: Tensor,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec,
    *,
    needs: Needs,
) -> Gradients:
    """As `torch_path.backward`."""
    return torch_path.backward(
        grad_TD, x_TD, weights_TK, z_RZ, rows, experts, activation, needs=needs, steps=STEPS
    )
