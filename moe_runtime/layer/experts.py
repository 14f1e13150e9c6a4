"""The experts' parameters, as modules that adapters such as LoRA can wrap.

Shape suffixes: T tokens, D model width, F intermediate width, E experts, K choices of a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
from moe_runtime.layer.activations import Activation, activation_named


class Experts(nn.Module):
    """`E` feed-forward networks in stacked parameters, laid out as in transformers 5.

    Args:
        num_experts: `E`.
        hidden_size: `D`.
        intermediate_size: `F`.
        activation: A name of `ACTIVATIONS`.
        bias: With biases of both products.
        impl: Implementation of `kernels.expert_mlp`.
        recompute: The backward pass computes the pre-activations again instead of keeping them.

    Attributes:
        gate_up_proj: `[E, 2F, D]`, gate rows first; absent without a gate.
        up_proj: `[E, F, D]`, only without a gate.
        down_proj: `[E, D, F]`.
        gate_up_proj_bias: `[E, 2F]`.
        up_proj_bias: `[E, F]`.
        down_proj_bias: `[E, D]`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        impl: ExpertMlpImpl = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.impl: ExpertMlpImpl = impl
        self.recompute = recompute
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation: Activation = activation_named(activation)
        first = "gate_up_proj" if self.activation.has_gate else "up_proj"
        width = intermediate_size * (2 if self.activation.has_gate else 1)
        shapes: dict[str, tuple[int, ...]] = {
            first: (num_experts, width, hidden_size),
            "down_proj": (num_experts, hidden_size, intermediate_size),
        }
        if bias:
            shapes[f"{first}_bias"] = (num_experts, width)
            shapes["down_proj_bias"] = (num_experts, hidden_size)
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
        self.first_name = first
        self.down_proj: nn.Parameter
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation `1 / sqrt(fan in)`; biases zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`.

        Choices with an id of `num_experts` are passed over.
        """
        dtype = compute_dtype(x_TD)
        # autocast is left to the kernels, which need no rounded copy of all experts
        is_autocast = torch.is_autocast_enabled(x_TD.device.type)
        return expert_mlp(
            x_TD.to(dtype),
            ids_TK,
            weights_TK,
            self.stacked(None if is_autocast else dtype),
            activation=self.activation.spec,
            impl=self.impl,
            recompute=self.recompute,
        )

    def stacked(self, dtype: torch.dtype | None = None) -> StackedExperts:
        """The parameters as kernels take them, converted to `dtype` where theirs is another."""
        names = (self.first_name, "down_proj", f"{self.first_name}_bias", "down_proj_bias")
        tensors = [getattr(self, name, None) for name in names]
        first, down, first_bias, down_bias = (
            tensor if tensor is None or dtype is None else tensor.to(dtype) for tensor in tensors
        )
        assert first is not None, "the first product always exists"
        assert down is not None, "the second product always exists"
        return StackedExperts(
            gate_up=first,
            down=down,
            gate_up_bias=first_bias,
            down_bias=down_bias,
            has_gate=self.activation.has_gate,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation}"
        )


class SharedExperts(nn.Module):
    """Experts that every token visits: one feed-forward network as wide as all of them.

    Args:
        hidden_size: `D`.
        intermediate_size: Width of all shared experts together.
        activation: As in `Experts`.
        bias: As in `Experts`.
        gated: The output is multiplied by `sigmoid(w x)` (Qwen2-MoE).

    Attributes:
        gate_up_proj: `[2F, D]`, gate rows first (`up_proj [F, D]` without a gate).
        down_proj: `[D, F]`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation_named(activation)
        width = intermediate_size * (2 if self.activation.has_gate else 1)
        first = nn.Linear(hidden_size, width, bias=bias, device=device, dtype=dtype)
        self.first_name = "gate_up_proj" if self.activation.has_gate else "up_proj"
        self.add_module(self.first_name, first)
        self.down_proj = nn.Linear(
            intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype
        )
        self.output_gate: nn.Linear | None = None
        if gated:
            self.output_gate = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `Experts`."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D]` for `[T, D]`."""
        hidden = self.activation(self.get_submodule(self.first_name)(x_TD))
        out_TD = self.down_proj(hidden)
        if self.output_gate is not None:
            out_TD = out_TD * self.output_gate(x_TD).sigmoid()
        return out_TD


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products of `x` are computed in: autocast's where it is on."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype
