"""Forward and backward pass of frozen experts that come into slots of a device a few at a time.

Every expert's rows are computed apart from those of the others, in tiles that the numbers of rows
and experts alone decide, and a token's rows are summed once, at the end, in the order of its
choices: the same bits whoever is in a slot, and since when.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, D model, F hidden, Z = 2F with
a gate and F without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.low_rank import LowRank
from moe_runtime.kernels.grouped_gemm.backward import activation_backward
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.operands.activation import ActivationSpec
from moe_runtime.kernels.token_sort import token_sort


class SlottedTraining:
    """One call of a layer by Triton kernels; as `StreamedExperts`, for stacks of slots.

    Forward: `begin_forward`, `forward` with stacks in which every expert with rows comes once,
    `output`. Backward likewise.

    Args:
        x_TD: `[T, D]` fp32, bf16 or fp16.
        ids_TK: `[T, K]` integers; ids of no expert are passed over.
        weights_TK: `[T, K]` gate weights.
        num_experts: `E`.
        activation: A formula.

    Attributes:
        offsets_E1: First sorted row of each expert, on the device.
        experts: Numbers of the experts that have rows, ascending, once `set_bounds` was called.
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
        """Takes `offsets_E1` as the host has them."""
        self.experts = [e for e in range(len(bounds) - 1) if bounds[e] < bounds[e + 1]]

    def give_up_tensors(self) -> tuple[Tensor, ...]:
        """What the backward pass needs, for autograd to keep; the call has it no more."""
        tensors = (
            self.x_TD, self.weights_TK, self.z_RZ, self._order_R, self._inverse_R, self.offsets_E1,
        )  # fmt: skip
        self.take_tensors(*[torch.empty(0)] * len(tensors))
        return tensors

    def take_tensors(self, *tensors: Tensor) -> None:
        """Takes back what `give_up_tensors` gave."""
        self.x_TD, self.weights_TK, self.z_RZ = tensors[:3]
        self._order_R, self._inverse_R, self.offsets_E1 = tensors[3:]

    def begin_forward(
        self, dim_preactivation: int, low: tuple[LowRank | None, LowRank | None], *, keeps: bool
    ) -> None:
        """Makes room, and computes what adapters of the first product give.

        Args:
            dim_preactivation: Z.
            low: Adapters of the first product and of the second, or None.
            keeps: Whether there will be a backward pass.
        """
        self._low, self._keeps = low, keeps
        if low[0] is not None:
            self.z_RZ = low[0].forward(self.x_TD, self._groups(), gathers=True)
        elif keeps:
            self.z_RZ = self.x_TD.new_empty(len(self._order_R), dim_preactivation)
        self._rows_RD = self._new_rows(self.x_TD.shape[1])

    def forward(self, experts: StackedExperts) -> None:
        """Computes the rows of the experts that have a slot."""
        groups, (gate_up, down) = self._groups(experts.slot_of_expert), _matrices(experts)
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
        """`[T, D]` in the dtype of `x`, once every expert had its turn."""
        groups, down = self._groups(), self._low[1]
        if down is not None and self._hidden_RF.numel():
            self._rows_RD += down.forward(self._hidden_RF, groups, gathers=False)
        sums_TD = self._combined(self.weights_TK)
        if not self._keeps:
            self.z_RZ = self.x_TD.new_empty(0)
        self._let_go()
        return sums_TD

    def begin_backward(self, grad_TD: Tensor, low: tuple[LowRank | None, LowRank | None]) -> None:
        """Takes the output's gradient, and what `begin_forward` took."""
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
        groups, (gate_up, down) = self._groups(experts.slot_of_expert), _matrices(experts)
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
        """Gradients of `x` and of the gate weights, after every expert's turn; adapters learn."""
        groups, (first, down) = self._groups(), self._low
        num_choices = groups.num_choices
        if down is not None:
            # hidden values times gate weights, which neither of the gradients was multiplied by
            down.learn(
                self._hidden_RF, self._grad_TD, self._grad_inner, groups, grad_divisor=num_choices
            )
        if first is not None:
            more_RD, grad_inner = first.backward(self._dz_RZ, groups, gathers=False)
            first.learn(self.x_TD, self._dz_RZ, grad_inner, groups, x_divisor=num_choices)
            self._rows_RD += more_RD
        grad_TD = self._combined(None)
        grad_weights_TK = self._grad_weights.view(self.weights_TK.shape).to(self.weights_TK.dtype)
        self._let_go()
        return grad_TD, grad_weights_TK

    def _groups(self, slots_E: Tensor | None = None) -> Groups:
        """The rows as the launchers take them; of all experts without a table of slots."""
        num_rows, num_choices = len(self._order_R), self.weights_TK.shape[1]
        return Groups(self.offsets_E1, num_rows, slots_E, self._order_R, num_choices)

    def _combined(self, weights_TK: Tensor | None) -> Tensor:
        return launch_combine_fwd(
            self._rows_RD, weights_TK, self._inverse_R, self.offsets_E1[-1:],
            self.weights_TK.shape[1],
        )  # fmt: skip

    def _new_rows(self, width: int) -> Tensor:
        return self.x_TD.new_empty(len(self._order_R), width)

    def _let_go(self) -> None:
        """Memory that only lasts from a beginning to its end."""
        nothing = self.x_TD.new_empty(0)
        self._hidden_RF = self._rows_RD = self._grad_TD = self._dz_RZ = nothing
        self._grad_weights = self._grad_inner = nothing
        self._low = (None, None)


def _matrices(experts: StackedExperts) -> tuple[Tensor, Tensor]:
    """Of the two products, logically `[S, outputs, inputs]`."""
    if not experts.is_transposed:
        return experts.gate_up, experts.down
    return experts.gate_up.transpose(1, 2), experts.down.transpose(1, 2)
