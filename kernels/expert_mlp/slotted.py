"""A layer whose experts arrive in device slots a few at a time, for inference and training.

Every expert's rows are computed separately, in tiles that depend on the numbers of rows and experts
only. A token's rows are summed once, at the end, in the order of its choices. So the bits do not
depend on slots or arrival order.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, D model, F hidden, Z = 2F with
a gate and F without, I inputs of a matrix, N its outputs, L rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor, nn

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS, DecodeProducts
from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.op import resolve_activation, validate_routing
from moe_runtime.kernels.expert_mlp.quantized import QuantizedExperts
from moe_runtime.kernels.grouped_gemm.backward import activation_backward, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.operands import ActivationName, ActivationSpec
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.kernels.triton_support import check_triton_dtype, require_triton


class SlottedProducts:
    """The routed feed-forward by Triton kernels, without a backward pass or host synchronisation.

    Only the number of tokens chooses the kernels.
    """

    arrived_E: Tensor | None = None  # slots may lie anywhere

    def __init__(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        activation: ActivationName | ActivationSpec,
    ) -> None:
        """Takes fp32, bf16 or fp16 tokens; sorts them if there are many.

        Raises:
            ValueError: Shapes, dtypes or devices do not fit.
        """
        require_triton(x_TD.device)
        check_triton_dtype(x_TD)
        validate_routing(x_TD, ids_TK, weights_TK)
        spec = resolve_activation(activation)
        assert isinstance(spec, ActivationSpec), "names are formulas"
        self._x_TD, self._weights_TK, self._spec = x_TD, weights_TK, spec
        self._few = self._order = self._hidden_RF = None
        self._y_RD = x_TD.new_empty(0)
        if len(x_TD) <= MAX_TOKENS:
            self._few = DecodeProducts(x_TD, ids_TK, weights_TK, num_experts)
        else:
            self._order = token_sort(ids_TK, num_experts, impl="triton")

    def add(self, experts: StackedExperts | QuantizedExperts) -> None:
        """Computes the rows of the experts that have a slot; each expert comes once."""
        x_TD, spec = self._x_TD, self._spec
        if self._few is not None:
            self._few.add(experts, spec)
            return
        order = self._order
        assert order is not None
        matrix, bias, up, down = experts.products()
        num_rows, num_choices = len(order.order_R), self._weights_TK.shape[1]
        if self._hidden_RF is None:
            self._hidden_RF = x_TD.new_empty(num_rows, experts.dim_hidden)
            self._y_RD = x_TD.new_empty(num_rows, experts.dim_model)
        slots_E = experts.slot_of_expert
        groups = Groups(order.offsets_E1, num_rows, slots_E, order.order_R, num_choices)
        hidden_RF = activated_product(
            x_TD, matrix, groups, spec, experts.layout,
            out=self._hidden_RF, pre=None, bias_SZ=bias, up=up, gathers=True,
        )  # fmt: skip
        plain_product(hidden_RF, down, groups, out=self._y_RD, bias_SN=experts.down_bias)

    @property
    def takes_rows(self) -> bool:
        """Whether tokens are few enough for rows computed elsewhere (`give`)."""
        return self._few is not None

    def give(self, rows_N: Tensor, y_ND: Tensor) -> None:
        """Takes rows that were computed elsewhere, of experts that are never added.

        `rows_N` are indices in the flattened ids. `y_ND` is summed in the same order as all others.
        """
        assert self._few is not None, "rows are taken of few tokens only"
        self._few.give(rows_N, y_ND)

    def sums(self) -> Tensor:
        """`[T, D]` in the dtype of `x`, after all named experts were added."""
        if self._few is not None:
            return self._few.sums()
        order = self._order
        assert order is not None
        if self._hidden_RF is None:  # no id names an expert
            return self._x_TD.new_zeros(self._x_TD.shape)
        num_choices = self._weights_TK.shape[1]
        return launch_combine_fwd(
            self._y_RD, self._weights_TK, order.inverse_R, order.offsets_E1[-1:], num_choices
        )


class LowRank:
    """LoRA adapters of one matrix of every expert, `scale * B @ A`, by Triton kernels.

    `x @ (W + scale * B @ A).T = x @ W.T + (x @ (scale * A).T) @ B.T`. The second term needs no
    expert weights, so it is computed for all rows at once, whatever is in memory.

    Args:
        first_ELI: `A`; `learn` adds to its `grad`, and to that of `second_ENL`, `B`.
        x: Its dtype is that of the products.
    """

    def __init__(
        self, first_ELI: nn.Parameter, second_ENL: nn.Parameter, scale: float, x: Tensor
    ) -> None:
        self._parameters = first_ELI, second_ENL
        self._scale = scale
        self._first_ELI = (first_ELI.detach() * scale).to(x.dtype)
        self._second_ENL = second_ENL.detach().to(x.dtype)

    def forward(self, x: Tensor, groups: Groups, *, gathers: bool) -> Tensor:
        """The adapters' part `[R, N]` of the product; `x` is `[R, I]`, or `[T, I]` if it
        gathers.
        """
        inner_RL = self._inner(x, groups, gathers=gathers)
        return _product(inner_RL, self._second_ENL, groups)

    def backward(self, grad: Tensor, groups: Groups, *, gathers: bool) -> tuple[Tensor, Tensor]:
        """The adapters' part `[R, I]` of the input's gradient, and `grad @ B` for `learn`."""
        inner_RL = _product(grad, self._second_ENL.transpose(1, 2), groups, gathers=gathers)
        return _product(inner_RL, self._first_ELI.transpose(1, 2), groups), inner_RL

    def learn(
        self,
        x: Tensor,
        grad: Tensor,
        grad_inner_RL: Tensor,
        groups: Groups,
        *,
        x_divisor: int = 0,
        grad_divisor: int = 0,
    ) -> None:
        """Adds to the gradients of `A` and `B`; rows are summed in their order.

        `x` is the product's input, times the gate weights if `grad`, of the product's output, lacks
        them. `grad_inner` comes from `backward`. Divisors are 0 for sorted rows, else row r reads
        `order[r] // divisor`.
        """
        first, second = self._parameters
        inner_RL = self._inner(x, groups, gathers=x_divisor > 0)
        grad_ELI, grad_ENL = (_gradient(parameter) for parameter in (first, second))
        # the rank is the narrow side of both tiles
        grad_EIL, grad_inner_RL = grad_ELI.transpose(1, 2), grad_inner_RL * self._scale
        sums: dict[str, Any] = {"accumulates": True}
        weight_grad(x, grad_inner_RL, groups, out_SNK=grad_EIL, left_divisor=x_divisor, **sums)
        weight_grad(grad, inner_RL, groups, out_SNK=grad_ENL, left_divisor=grad_divisor, **sums)

    def _inner(self, x: Tensor, groups: Groups, *, gathers: bool) -> Tensor:
        return _product(x, self._first_ELI, groups, gathers=gathers)


def _product(x: Tensor, weight_ENI: Tensor, groups: Groups, *, gathers: bool = False) -> Tensor:
    _, dim_n, dim_i = weight_ENI.shape
    tile = groups.choose_tile("plain", x, dim_n, dim_i, weight_ENI)
    # no deeper than the rank, where that is summed over
    depth = max(16, triton.next_power_of_2(dim_i))
    tile = replace(tile, block_k=min(tile.block_k, depth))
    out_RN = x.new_empty(groups.num_rows, dim_n)
    return plain_product(x, weight_ENI, groups, out=out_RN, gathers=gathers, tile=tile)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class SlottedTraining:
    """One call of a layer by Triton kernels, with the interface of `StreamedExperts` for slots.

    Forward: `begin_forward`, `forward` with stacks in which every expert with rows comes once,
    `output`. Backward likewise. Ids of no expert are skipped.

    Attributes:
        offsets_E1: First sorted row of each expert, on the device.
        experts: The experts that have rows, ascending; set by `set_bounds`.
    """

    def __init__(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        activation: ActivationSpec,
    ) -> None:
        order = token_sort(ids_TK, num_experts, impl="triton")
        self.x_TD, self.weights_TK = x_TD.contiguous(), weights_TK
        self.offsets_E1, self._order_R = order.offsets_E1, order.order_R
        self._inverse_R = order.inverse_R
        self._spec = activation
        self.experts: list[int] = []
        self.z_RZ = self._hidden_RF = self._rows_RD = self._grad_TD = x_TD.new_empty(0)
        self._dz_RZ = self._grad_weights = self._grad_inner = x_TD.new_empty(0)
        self._low: tuple[LowRank | None, LowRank | None] = (None, None)
        self._keeps = False

    def set_bounds(self, bounds: Sequence[int]) -> None:
        """Takes `offsets_E1` as a list."""
        self.experts = [e for e in range(len(bounds) - 1) if bounds[e] < bounds[e + 1]]

    def give_up_tensors(self) -> tuple[Tensor, ...]:
        """Hands the tensors for the backward pass to autograd and drops them here."""
        tensors = (
            self.x_TD, self.weights_TK, self.z_RZ, self._order_R, self._inverse_R, self.offsets_E1,
        )  # fmt: skip
        self.take_tensors(*[torch.empty(0)] * len(tensors))
        return tensors

    def take_tensors(self, *tensors: Tensor) -> None:
        self.x_TD, self.weights_TK, self.z_RZ = tensors[:3]
        self._order_R, self._inverse_R, self.offsets_E1 = tensors[3:]

    def begin_forward(
        self, dim_preactivation: int, low: tuple[LowRank | None, LowRank | None], *, keeps: bool
    ) -> None:
        """Allocates Z pre-activations per row and computes the adapters of the first product.

        `low` has the adapters of the first and the second product, or None.
        """
        self._low, self._keeps = low, keeps
        if low[0] is not None:
            self.z_RZ = low[0].forward(self.x_TD, self._groups(), gathers=True)
        elif keeps:
            self.z_RZ = self.x_TD.new_empty(len(self._order_R), dim_preactivation)
        self._rows_RD = self._new_rows(self.x_TD.shape[1])

    def forward(self, experts: StackedExperts) -> None:
        """Computes the rows of the experts that have a slot."""
        groups = self._groups(experts.slot_of_expert)
        gate_up, _, _, down = experts.products()
        if not self._hidden_RF.numel():
            self._hidden_RF = self._new_rows(experts.dim_hidden)
        has_low = self._low[0] is not None
        activated_product(
            self.x_TD, gate_up, groups, self._spec, experts.layout,
            out=self._hidden_RF, pre=self.z_RZ if has_low or self._keeps else None,
            bias_SZ=experts.gate_up_bias, gathers=True, adds_pre=has_low,
        )  # fmt: skip
        plain_product(self._hidden_RF, down, groups, out=self._rows_RD, bias_SN=experts.down_bias)

    def output(self) -> Tensor:
        """`[T, D]` in the dtype of `x`, after every expert."""
        groups, down = self._groups(), self._low[1]
        if down is not None and self._hidden_RF.numel():
            self._rows_RD += down.forward(self._hidden_RF, groups, gathers=False)
        sums_TD = self._combined(self.weights_TK)
        if not self._keeps:
            self.z_RZ = self.x_TD.new_empty(0)
        self._free()
        return sums_TD

    def begin_backward(self, grad_TD: Tensor, low: tuple[LowRank | None, LowRank | None]) -> None:
        """Takes the output's gradient, and `low` as in `begin_forward`."""
        self._low = low
        self._grad_TD = grad_TD.to(self.x_TD.dtype).contiguous()
        self._dz_RZ = torch.empty_like(self.z_RZ)
        self._rows_RD = self._new_rows(self.x_TD.shape[1])
        self._grad_weights = torch.zeros(
            len(self._order_R), dtype=torch.float32, device=self.x_TD.device
        )
        if low[1] is not None:
            groups = self._groups()
            self._hidden_RF, self._grad_inner = low[1].backward(self._grad_TD, groups, gathers=True)

    def backward(self, experts: StackedExperts) -> None:
        """Computes the gradients of the rows of the experts that have a slot."""
        groups = self._groups(experts.slot_of_expert)
        gate_up, _, _, down = experts.products()
        has_low = self._low[1] is not None
        found = activation_backward(
            self._grad_TD, down, self.z_RZ, self.weights_TK.reshape(-1).contiguous(), groups,
            self._spec, experts.layout, down_bias_SD=experts.down_bias, needs_hidden=has_low,
            dpre=self._dz_RZ, more_RF=self._hidden_RF if has_low else None,
        )  # fmt: skip
        assert found.gate_weight_grad is not None, "it is needed"
        self._grad_weights += found.gate_weight_grad
        plain_product(self._dz_RZ, gate_up.transpose(1, 2), groups, out=self._rows_RD)

    def input_gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of `x` and the gate weights, after every expert; adapters learn."""
        groups, (first, down) = self._groups(), self._low
        num_choices = groups.num_choices
        if down is not None:
            # hidden values include the gate weights; the gradients do not
            down.learn(
                self._hidden_RF, self._grad_TD, self._grad_inner, groups, grad_divisor=num_choices
            )
        if first is not None:
            more_RD, grad_inner = first.backward(self._dz_RZ, groups, gathers=False)
            first.learn(self.x_TD, self._dz_RZ, grad_inner, groups, x_divisor=num_choices)
            self._rows_RD += more_RD
        grad_TD = self._combined(None)
        grad_weights_TK = self._grad_weights.view(self.weights_TK.shape).to(self.weights_TK.dtype)
        self._free()
        return grad_TD, grad_weights_TK

    def _groups(self, slots_E: Tensor | None = None) -> Groups:
        num_rows, num_choices = len(self._order_R), self.weights_TK.shape[1]
        return Groups(self.offsets_E1, num_rows, slots_E, self._order_R, num_choices)

    def _combined(self, weights_TK: Tensor | None) -> Tensor:
        return launch_combine_fwd(
            self._rows_RD, weights_TK, self._inverse_R, self.offsets_E1[-1:],
            self.weights_TK.shape[1],
        )  # fmt: skip

    def _new_rows(self, width: int) -> Tensor:
        return self.x_TD.new_empty(len(self._order_R), width)

    def _free(self) -> None:
        """Frees the memory of one pass."""
        nothing = self.x_TD.new_empty(0)
        self._hidden_RF = self._rows_RD = self._grad_TD = self._dz_RZ = nothing
        self._grad_weights = self._grad_inner = nothing
        self._low = (None, None)
