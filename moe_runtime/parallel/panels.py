"""Experts whose second product is computed in panels of columns.

Rows of the first product are independent, so it can begin with the rows that are there; columns of
the second are, so the first panel of all experts can be on its way back while the next one is
computed, instead of the first expert's rows. From Comet, here between whole exchanges, not tiles.

Shape suffixes: R rows, D model, F hidden, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn.functional import pad

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.expert_mlp.op import resolve_activation
from moe_runtime.kernels.expert_mlp.reference import apply_activation
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.operands.activation import Activation


@runtime_checkable
class PanelExperts(Protocol):
    """A rank's experts, whose outputs come panel by panel."""

    def panels(self, rows_RD: Tensor, counts_S: Tensor, num_panels: int) -> Iterator[Tensor]:
        """`[R, columns of the panel]`, the leftmost first, each computed when it is asked for."""
        ...


class StackedPanels:
    """Experts in stacked parameters, panel by panel.

    Args:
        experts: The parameters of this rank's slots.
        activation: What lies between the products.
    """

    def __init__(self, experts: StackedExperts, activation: Activation) -> None:
        self._experts = experts
        self._activation = resolve_activation(activation)

    def panels(self, rows_RD: Tensor, counts_S: Tensor, num_panels: int) -> Iterator[Tensor]:
        """See `PanelExperts`.

        Raises:
            ValueError: There are more panels than columns.
        """
        experts = self._experts
        if not 1 <= num_panels <= experts.dim_model:
            raise ValueError(f"panels must be in 1..{experts.dim_model}, got {num_panels}")
        offsets = pad(counts_S.cumsum(0), (1, 0))
        transposed = experts.is_transposed
        z_RZ = grouped_gemm(
            rows_RD,
            experts.gate_up,
            offsets,
            bias_SN=experts.gate_up_bias,
            is_transposed=transposed,
        )
        hidden_RF = apply_activation(z_RZ, experts.layout, self._activation)
        # Cut once, so that the gradients of all panels are put together once.
        downs = experts.down.tensor_split(num_panels, dim=2 if transposed else 1)
        biases: tuple[Tensor | None, ...] = (None,) * num_panels
        if experts.down_bias is not None:
            biases = experts.down_bias.tensor_split(num_panels, dim=1)
        for down, bias in zip(downs, biases, strict=True):
            yield grouped_gemm(hidden_RF, down, offsets, bias_SN=bias, is_transposed=transposed)
