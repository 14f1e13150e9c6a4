"""The experts' parameters, as modules that adapters such as LoRA can wrap.

Shape suffixes: T tokens, D model width, F intermediate width, E experts, K choices of a token, N
intermediate widths of all experts together, Z zero-computation experts, C constant ones.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from moe_runtime.kernels.block_sparse import ExpertColumns
from moe_runtime.kernels.expert_mlp import PackedExperts, StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
from moe_runtime.layer.activations import Activation, activation_named
from moe_runtime.routing import ZeroExpertCounts, ZeroRouting


class ExpertOptions(TypedDict, total=False):
    """Keyword arguments of routed experts, however their parameters lie; see `Experts`."""

    activation: str | Activation
    bias: bool
    impl: ExpertMlpImpl
    recompute: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class ExpertNetworks(nn.Module):
    """The common part of routed experts with either layout of parameters."""

    down_proj: nn.Parameter

    def __init__(self, **options: Unpack[ExpertOptions]) -> None:
        super().__init__()
        self.activation: Activation = activation_named(options.get("activation", "swiglu"))
        self.impl: ExpertMlpImpl = options.get("impl", "auto")
        self.recompute = options.get("recompute", False)

    def _register(self, shapes: Mapping[str, tuple[int, ...]], options: ExpertOptions) -> None:
        place = {"device": options.get("device"), "dtype": options.get("dtype")}
        for name, shape in shapes.items():
            if options.get("bias") or not name.endswith("_bias"):
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **place)))

    @abstractmethod
    def operands(self, dtype: torch.dtype, *, is_autocast: bool) -> StackedExperts | PackedExperts:
        """The parameters as kernels take them for products in `dtype`."""

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`.

        Choices with an id of `num_experts` are passed over.
        """
        dtype = compute_dtype(x_TD)
        is_autocast = torch.is_autocast_enabled(x_TD.device.type)
        return expert_mlp(
            x_TD.to(dtype),
            ids_TK,
            weights_TK,
            self.operands(dtype, is_autocast=is_autocast),
            activation=self.activation.spec,
            impl=self.impl,
            recompute=self.recompute,
        )


class Experts(ExpertNetworks):
    """`E` feed-forward networks in stacked parameters, laid out as in transformers 5.

    Args:
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
        **options: Unpack[ExpertOptions],
    ) -> None:
        super().__init__(**options)
        has_gate = self.activation.has_gate
        first = "gate_up_proj" if has_gate else "up_proj"
        width = intermediate_size * (2 if has_gate else 1)
        self._register(
            {
                first: (num_experts, width, hidden_size),
                "down_proj": (num_experts, hidden_size, intermediate_size),
                f"{first}_bias": (num_experts, width),
                "down_proj_bias": (num_experts, hidden_size),
            },
            options,
        )
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.first_name = first
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation `1 / sqrt(fan in)`; biases zero."""
        _reset(self)

    def operands(self, dtype: torch.dtype, *, is_autocast: bool) -> StackedExperts:
        # autocast is left to the kernels, which need no rounded copy of all experts
        return self.stacked(None if is_autocast else dtype)

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


_PACKED = [f"{name}_proj{bias}" for name in ("gate", "up", "down") for bias in ("", "_bias")]


class HeterogeneousExperts(ExpertNetworks):
    """Feed-forward networks of one model width and different intermediate widths.

    `MoELayer` makes them of `intermediate_size=[512, 1024, 2048]`; the parameters lie as in
    MegaBlocks, one expert's rows under the other's. Widths are any numbers; multiples of 128 run
    fastest on GPUs. Other arguments as of `Experts`.

    Attributes:
        gate_proj: `[N, D]`, absent without a gate.
        up_proj: `[N, D]`.
        down_proj: `[N, D]`: row n is what hidden column n adds to the output.
        gate_proj_bias: `[N]`.
        up_proj_bias: `[N]`.
        down_proj_bias: `[E, D]`.
    """

    up_proj: nn.Parameter

    def __init__(
        self, hidden_size: int, intermediate_sizes: Sequence[int], **options: Unpack[ExpertOptions]
    ) -> None:
        super().__init__(**options)
        columns = ExpertColumns.of(intermediate_sizes, block_columns=128)
        num_experts, num_columns = len(columns.widths), sum(columns.widths)
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("gate", "up", "down")[0 if self.activation.has_gate else 1 :]:
            shapes[f"{name}_proj"] = (num_columns, hidden_size)
            bias = (num_experts, hidden_size) if name == "down" else (num_columns,)
            shapes[f"{name}_proj_bias"] = bias
        self._register(shapes, options)
        self.hidden_size = hidden_size
        self._columns = columns
        self.reset_parameters()

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
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

    def operands(self, dtype: torch.dtype, *, is_autocast: bool) -> PackedExperts:
        if self._columns.first.device != self.up_proj.device:
            # The module was moved; from the next call on nothing is copied.
            self._columns = ExpertColumns.of(
                self.intermediate_sizes, block_columns=128, device=self.up_proj.device
            )
        # by attribute: adapters may stand in a parameter's place
        named = {name: getattr(self, name, None) for name in _PACKED}
        tensors: dict[str, Any] = {
            name.replace("_proj", ""): tensor if tensor is None else tensor.to(dtype)
            for name, tensor in named.items()
        }
        return PackedExperts(**tensors, columns=self._columns)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_sizes={self.intermediate_sizes}, "
            f"activation={self.activation}"
        )


class SharedExperts(nn.Module):
    """Experts that every token visits: one feed-forward network as wide as all of them.

    Args:
        intermediate_size: Width of all shared experts together.
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
        _reset(self)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden = self.activation(self.get_submodule(self.first_name)(x_TD))
        out_TD = self.down_proj(hidden)
        if self.output_gate is not None:
            out_TD = out_TD * self.output_gate(x_TD).sigmoid()
        return out_TD


class ZeroExperts(nn.Module):
    """Constant experts `a1 x + a2 v` with `[a1, a2] = softmax(W x)`, copies `x`, and zeros.

    The zero-computation experts of MoE++ (Jin et al. 2024): no product, nothing to fetch.

    Attributes:
        vectors: `[C, D]`, `v` of each constant expert.
        mix_weight: `[C, 2, D]`, its `W`.
    """

    def __init__(
        self,
        counts: ZeroExpertCounts,
        hidden_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.counts = counts
        self.vectors = nn.Parameter(
            torch.empty(counts.constant, hidden_size, device=device, dtype=dtype)
        )
        self.mix_weight = nn.Parameter(
            torch.empty(counts.constant, 2, hidden_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Vectors standard normal, mixing weights with standard deviation `1 / sqrt(D)`."""
        nn.init.normal_(self.vectors)
        nn.init.normal_(self.mix_weight, std=self.vectors.shape[1] ** -0.5)

    def forward(self, x_TD: Tensor, routing: ZeroRouting) -> Tensor:
        """`[T, D]`: what these experts add for their tokens."""
        precise = routing.weights_TK.dtype
        weights_TZ = routing.weights_TK.new_zeros(len(x_TD), routing.num_experts + 1)
        weights_TZ = weights_TZ.scatter_add(1, routing.ids_TK, routing.weights_TK)
        constant_TC = weights_TZ[:, : self.counts.constant]
        copy_TZ = weights_TZ[:, self.counts.constant : self.counts.constant + self.counts.copy]
        mix_TC2 = torch.einsum("td,cmd->tcm", x_TD.to(precise), self.mix_weight.to(precise))
        mix_TC2 = mix_TC2.softmax(dim=-1)
        share_of_x_T1 = copy_TZ.sum(1, keepdim=True)
        share_of_x_T1 = share_of_x_T1 + (constant_TC * mix_TC2[..., 0]).sum(1, keepdim=True)
        share_of_v_TC = constant_TC * mix_TC2[..., 1]
        out_TD = share_of_x_T1 * x_TD.to(precise) + share_of_v_TC @ self.vectors.to(precise)
        return out_TD.to(x_TD.dtype)

    def extra_repr(self) -> str:
        return str(self.counts)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products of `x` are computed in: autocast's where it is on."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def _reset(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))
