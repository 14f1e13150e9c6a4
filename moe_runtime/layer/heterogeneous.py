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
from moe_runtime.kernels.expert_mlp import PackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
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
        bias: With biases of both products.
        impl: Implementation of `kernels.expert_mlp`.
        recompute: The backward pass computes the pre-activations again instead of keeping them.

    Attributes:
        gate_proj: `[N, D]`, absent without a gate.
        up_proj: `[N, D]`.
        down_proj: `[N, D]`: row n is what hidden column n adds to the output.
        gate_proj_bias: `[N]`.
        up_proj_bias: `[N]`.
        down_proj_bias: `[E, D]`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_sizes: Sequence[int],
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        impl: ExpertMlpImpl = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.activation: Activation = activation_named(activation)
        self.impl: ExpertMlpImpl = impl
        self.recompute = recompute
        self._columns = ExpertColumns.of(intermediate_sizes, block_columns=128)
        num_columns = sum(self.intermediate_sizes)
        for name in ("gate", "up", "down") if self.activation.has_gate else ("up", "down"):
            shapes: dict[str, tuple[int, ...]] = {f"{name}_proj": (num_columns, hidden_size)}
            if bias:
                wide = (self.num_experts, hidden_size) if name == "down" else (num_columns,)
                shapes[f"{name}_proj_bias"] = wide
            for full_name, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                self.register_parameter(full_name, parameter)
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
        """Normal with standard deviation `1 / sqrt(fan in)`, an expert's own; biases zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            elif name != "down_proj":
                nn.init.normal_(parameter, std=1 / math.sqrt(self.hidden_size))
            else:
                for rows in parameter.split(list(self.intermediate_sizes)):
                    nn.init.normal_(rows, std=1 / math.sqrt(len(rows)))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`.

        Choices with an id of `num_experts` are passed over.
        """
        dtype = compute_dtype(x_TD)
        return expert_mlp(
            x_TD.to(dtype),
            ids_TK,
            weights_TK,
            self.packed(dtype),
            activation=self.activation.spec,
            impl=self.impl,
            recompute=self.recompute,
        )

    def packed(self, dtype: torch.dtype | None = None) -> PackedExperts:
        """The parameters as the kernels take them, converted to `dtype` where theirs is another."""
        if self._columns.first.device != self.up_proj.device:
            # The module was moved; from the next call on nothing is copied.
            self._columns = ExpertColumns.of(
                self.intermediate_sizes, block_columns=128, device=self.up_proj.device
            )
        tensors = {}
        for name in ("gate", "up", "down"):
            for full_name, part in ((f"{name}_proj", name), (f"{name}_proj_bias", f"{name}_bias")):
                tensor: Tensor | None = getattr(self, full_name, None)
                tensors[part] = tensor if tensor is None else tensor.to(dtype)
        return PackedExperts(**tensors, columns=self._columns)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_sizes={self.intermediate_sizes}, "
            f"activation={self.activation}"
        )
