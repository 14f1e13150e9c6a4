"""A layer whose experts come into slots a few at a time: the bits of one call with all of them.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, D model, F hidden.
"""

from __future__ import annotations

from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS, DecodeProducts
from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.op import resolve_activation, validate_routing
from moe_runtime.kernels.expert_mlp.quantized.quantized_experts import QuantizedExperts
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.packed import Weights
from moe_runtime.kernels.operands.activation import ActivationName, ActivationSpec
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.kernels.triton_support import check_triton_dtype, require_triton


class SlottedProducts:
    """The routed feed-forward by Triton kernels, without a backward pass or a wait for the device.

    The number of tokens alone chooses the kernels, never what is in which slot or since when, and
    each expert's rows are computed apart from those of the others. Rows are summed once, at the
    end, in the order of a token's choices.

    Attributes:
        arrived_E: None, as slots may lie anywhere.
    """

    arrived_E: Tensor | None = None

    def __init__(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        activation: ActivationName | ActivationSpec,
    ) -> None:
        """Sorts the rows, where there are many.

        Args:
            x_TD: `[T, D]` fp32, bf16 or fp16.
            ids_TK: `[T, K]` int32 or int64; an id that names no expert adds nothing.
            weights_TK: `[T, K]` gate weights.
            num_experts: That ids may name.
            activation: A name or a formula.

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
        """Computes the rows of the experts that have a slot; each comes once.

        Quantised ones must have no `quantized_triton.problem`.
        """
        x_TD, slots, layout, spec = self._x_TD, experts.slot_of_expert, experts.layout, self._spec
        matrix, bias, up, down = _products(experts)
        if self._few is not None:
            self._few.add(
                matrix, down, spec, layout,
                gate_up_bias_SZ=bias, down_bias_SD=experts.down_bias, up=up, slot_of_expert=slots,
            )  # fmt: skip
            return
        order = self._order
        assert order is not None
        num_rows, num_choices = len(order.order_R), self._weights_TK.shape[1]
        if self._hidden_RF is None:
            self._hidden_RF = x_TD.new_empty(num_rows, experts.dim_hidden)
            self._y_RD = x_TD.new_empty(num_rows, experts.dim_model)
        groups = Groups(order.offsets_E1, num_rows, slots, order.order_R, num_choices)
        hidden_RF = activated_product(
            x_TD, matrix, groups, spec, layout,
            out=self._hidden_RF, pre=None, bias_SZ=bias, up=up, gathers=True,
        )  # fmt: skip
        plain_product(hidden_RF, down, groups, out=self._y_RD, bias_SN=experts.down_bias)

    @property
    def takes_rows(self) -> bool:
        """Whether there are so few tokens that rows may come from elsewhere (`give`)."""
        return self._few is not None

    def give(self, rows_N: Tensor, y_ND: Tensor) -> None:
        """Takes rows that somebody else computed, of experts that are never added.

        Args:
            rows_N: integers, places in the flattened ids.
            y_ND: what their experts make of them; summed in the same order as all others.
        """
        assert self._few is not None, "rows are taken of few tokens only"
        self._few.give(rows_N, y_ND)

    def sums(self) -> Tensor:
        """`[T, D]` in the dtype of `x`, once every expert was added that an id names."""
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


def _products(
    experts: StackedExperts | QuantizedExperts,
) -> tuple[Weights, Tensor | None, tuple[Weights, Tensor | None] | None, Weights]:
    """Weights and bias of the first product, those of up where they are apart, and down."""
    if isinstance(experts, StackedExperts):
        gate_up, down = experts.gate_up, experts.down
        if experts.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return gate_up, experts.gate_up_bias, None, down
    if experts.gate is None:
        return experts.up, experts.up_bias, None, experts.down
    return experts.gate, experts.gate_bias, (experts.up, experts.up_bias), experts.down
