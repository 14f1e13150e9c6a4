"""Experts that differ in width, as a module.

Shape suffixes: T tokens, D model width, N intermediate widths of all experts together, K choices of
a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_runtime.kernels.block_sparse import ExpertColumns
from moe_runtime.kernels.heterogeneous_mlp import PackedExperts, heterogeneous_mlp
from moe_runtime.kernels.heterogeneous_mlp.op import HeterogeneousMlpImpl
from moe_runtime.layer.activations import Activation, activation_named
from moe_runtime.layer.experts import compute_dtype


class HeterogeneousExperts(nn.Module):
    """Feed-forward networks of one model width and different intermediate widths.

    What `MoELayer` makes of `intermediate_size=[512, 1024, 2048]`; the parameters lie as in
    MegaBlocks, one expert's rows under the other's.

    Args:
        hidden_size: `D`.
        intermediate_sizes: Width of each expert; any numbers, multiples of 128 run fastest on GPUs.
        activation: A name of `ACTIVATIONS`.
        impl: Implementation of `kernels.heterogeneous_mlp`.

    Attributes:
        gate_proj: `[N, D]`, absent without a gate.
        up_proj: `[N, D]`.
        down_proj: `[N, D]`: row n is what hidden column n adds to the output.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_sizes: Sequence[int],
        *,
        activation: str | Activation = "swiglu",
        impl: HeterogeneousMlpImpl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.activation: Activation = activation_named(activation)
        self.impl: HeterogeneousMlpImpl = impl
        self._columns = ExpertColumns.of(intermediate_sizes, block_columns=128)
        names = ["up_proj", "down_proj"]
        if self.activation.has_gate:
            names.insert(0, "gate_proj")
        shape = (sum(self.intermediate_sizes), hidden_size)
        for name in names:
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.up_proj: nn.Parameter
        self.down_proj: nn.Parameter
        self.reset_parameters()

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Width of each expert."""
        return self._columns.widths

    @property
    def num_experts(self) -> int:
        return len(self.intermediate_sizes)

    def reset_parameters(self) -> None:
        """Normal with standard deviation `1 / sqrt(fan in)`, each expert's own for `down_proj`."""
        for name, parameter in self.named_parameters():
            if name != "down_proj":
                nn.init.normal_(parameter, std=1 / math.sqrt(self.hidden_size))
                continue
            for rows in parameter.split(list(self.intermediate_sizes)):
                nn.init.normal_(rows, std=1 / math.sqrt(len(rows)))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`.

        Choices with an id of `num_experts` are passed over.
        """
        dtype = compute_dtype(x_TD)
        return heterogeneous_mlp(
            x_TD.to(dtype),
            ids_TK,
            weights_TK,
            self.packed(dtype),
            activation=self.activation.spec,
            impl=self.impl,
        )

    def packed(self, dtype: torch.dtype | None = None) -> PackedExperts:
        """The parameters as the kernels take them, converted to `dtype` where theirs is another."""
        if self._columns.first.device != self.up_proj.device:
            # The module was moved; from the next call on nothing is copied.
            self._columns = ExpertColumns.of(
                self.intermediate_sizes, block_columns=128, device=self.up_proj.device
            )
        gate: Tensor | None = getattr(self, "gate_proj", None)
        return PackedExperts(
            gate=gate if gate is None else gate.to(dtype),
            up=self.up_proj.to(dtype),
            down=self.down_proj.to(dtype),
            columns=self._columns,
        )

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_sizes={self.intermediate_sizes}, "
            f"activation={self.activation}"
        )
