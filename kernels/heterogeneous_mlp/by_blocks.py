"""`heterogeneous_mlp` on a GPU: block-sparse products with the activation between them.

The hidden values of all experts are one `[R, N]` matrix of blocks. Kept for the backward pass are
its pre-activations, nothing else: hidden values are computed again from them, and the experts'
outputs are not needed, since the gradient of a gate weight is `<dout @ down.T, hidden>`.

Shape suffixes: T tokens, K choices a token, R sorted rows, D model, N hidden columns of all
experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_runtime.kernels.block_sparse.kernel import launch_dsd, launch_sdd
from moe_runtime.kernels.block_sparse.topology import BlockTopology
from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.heterogeneous_mlp.blocks_kernel import (
    launch_activation,
    launch_activation_bwd,
)
from moe_runtime.kernels.heterogeneous_mlp.experts import PackedExperts
from moe_runtime.kernels.heterogeneous_mlp.gradients import Gradients, Needs
from moe_runtime.kernels.token_sort import SortedTokens


class ByBlocks:
    """The implementation `triton`.

    Args:
        topology: The blocks of the hidden values.
    """

    def __init__(self, topology: BlockTopology) -> None:
        self._topology = topology

    def forward(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        order: SortedTokens,
        experts: PackedExperts,
        activation: ActivationSpec,
        *,
        keeps: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output `[T, D]`, and the blocks of gate (if there is one) and up."""
        gathering = {"order_R": order.order_R, "num_choices": weights_TK.shape[1]}
        gate, up = self._preactivations(x_TD, experts, gathering)
        hidden = launch_activation(gate, up, self._topology, activation)
        y_RD = self._rows(hidden, experts.down)
        out_TD = _combine(y_RD, weights_TK, order)
        kept = tuple(blocks for blocks in (gate, up) if keeps and blocks is not None)
        return out_TD, kept

    def backward(
        self,
        grad_TD: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor,
        kept: tuple[Tensor, ...],
        order: SortedTokens,
        experts: PackedExperts,
        activation: ActivationSpec,
        *,
        needs: Needs,
    ) -> Gradients:
        """The gradients that are needed; with nothing kept the pre-activations again."""
        gathering = {"order_R": order.order_R, "num_choices": weights_TK.shape[1]}
        if kept:
            gate, up = (None, *kept)[-2:]
        else:
            gate, up = self._preactivations(x_TD, experts, gathering)
        assert up is not None
        found = launch_activation_bwd(
            launch_sdd(grad_TD, experts.down.T, self._topology, **gathering),
            gate,
            up,
            weights_TK.reshape(-1).contiguous(),
            order.order_R,
            self._topology,
            activation,
        )
        x = None
        if needs.x:
            x = _combine(self._rows(found.up, experts.up), None, order, weights_TK.shape[1])
            if experts.gate is not None and found.gate is not None:
                x += _combine(
                    self._rows(found.gate, experts.gate), None, order, weights_TK.shape[1]
                )
        halves = {"gate": found.gate, "up": found.up}
        return Gradients(
            x=x,
            weights=found.scale.view(weights_TK.shape).to(weights_TK.dtype),
            down=self._columns(found.hidden, grad_TD, **gathering) if needs.down else None,
            **{
                name: self._columns(blocks, x_TD, **gathering)
                for name, blocks in halves.items()
                if blocks is not None and getattr(needs, name)
            },
            **{
                f"{name}_bias": self._columns(blocks, blocks.new_ones(order.order_R.shape)[:, None])
                .flatten()
                .to(blocks.dtype)
                for name, blocks in halves.items()
                if blocks is not None and getattr(needs, f"{name}_bias")
            },
        )

    def _preactivations(
        self, x_TD: Tensor, experts: PackedExperts, gathering: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor]:
        def project(weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
            return launch_sdd(x_TD, weight_ND.T, self._topology, bias_N=bias_N, **gathering)

        gate = None if experts.gate is None else project(experts.gate, experts.gate_bias)
        return gate, project(experts.up, experts.up_bias)

    def _rows(self, blocks: Tensor, weight_ND: Tensor) -> Tensor:
        """`[R, D]`: the blocks times a matrix."""
        out_RD = blocks.new_empty(self._topology.num_rows, weight_ND.shape[1])
        return launch_dsd(blocks, weight_ND, self._topology, out=out_RD, is_transposed=False)

    def _columns(self, blocks: Tensor, right: Tensor, **gathering: Any) -> Tensor:
        """`[N, D]`: the transposed blocks times rows, gathered or sorted."""
        out_ND = blocks.new_empty(self._topology.num_columns, right.shape[1])
        return launch_dsd(
            blocks, right, self._topology, out=out_ND, is_transposed=True, **gathering
        )


def _combine(
    y_RD: Tensor, weights_TK: Tensor | None, order: SortedTokens, num_choices: int = 0
) -> Tensor:
    num_choices = num_choices if weights_TK is None else weights_TK.shape[1]
    num_rows = order.offsets_E1[-1:]
    return launch_combine_fwd(y_RD, weights_TK, order.inverse_R, num_rows, num_choices)
