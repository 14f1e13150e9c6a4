"""The Triton products from packed weights put together to a layer: nothing waits for the device.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, S slots, D model, F hidden.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS, decode_expert_mlp
from moe_runtime.kernels.expert_mlp.quantized.quantized_experts import QuantizedExperts
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.packed import takes_format
from moe_runtime.kernels.operands.activation import ActivationSpec
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.kernels.triton_support import check_triton_dtype, require_triton


def problem(x_TD: Tensor, experts: QuantizedExperts) -> str | None:
    """Why the kernels cannot read these experts, or None.

    Raises:
        ValueError: They cannot run on this device, or not with this dtype.
        TritonUnavailableError: Triton is not installed.
    """
    require_triton(x_TD.device)
    check_triton_dtype(x_TD)
    gate, up, down = experts.gate, experts.up, experts.down
    for stack in (up, down):
        if not takes_format(stack.format):
            kind = stack.format
            what = "lies in such blocks" if kind.block_codes else f"has groups of {kind.group_cols}"
            return f"{kind} {what}"
    if gate is None:
        return None
    if gate.format != up.format:
        return f"gate and up have two formats, {gate.format} and {up.format}"
    for one, other in zip(_parts(gate), _parts(up), strict=True):
        if one is not None and other is not None and one.stride() != other.stride():
            return "gate and up lie at different strides"
    return None


def _parts(stack: Any) -> tuple[Tensor | None, ...]:
    return stack.codes, stack.scales, stack.zero_points, stack.global_scale


def infer(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
) -> Tensor:
    """The output ``[T, D]``, in the dtype of `x`, of experts without a `problem`."""
    matrix, bias, up = experts.up, experts.up_bias, None
    if experts.gate is not None:
        up, matrix, bias = (matrix, bias), experts.gate, experts.gate_bias
    slots_E, layout = experts.slot_of_expert, experts.layout
    if len(x_TD) <= MAX_TOKENS:
        return decode_expert_mlp(
            x_TD, ids_TK, weights_TK, matrix, experts.down, activation, layout,
            gate_up_bias_SZ=bias, down_bias_SD=experts.down_bias, up=up, slot_of_expert=slots_E,
        )  # fmt: skip
    # experts that take no part have no rows
    ids_TK = experts.named(ids_TK)
    order = token_sort(ids_TK, experts.num_experts, impl="triton")
    num_rows, num_choices = ids_TK.numel(), ids_TK.shape[1]
    groups = Groups(order.offsets_E1, num_rows, slots_E, order.order_R, num_choices)
    hidden_RF = activated_product(
        x_TD, matrix, groups, activation, layout,
        out=x_TD.new_empty(num_rows, experts.dim_hidden), pre=None,
        bias_SZ=bias, up=up, gathers=True,
    )  # fmt: skip
    y_RD = x_TD.new_empty(num_rows, experts.dim_model)
    plain_product(hidden_RF, experts.down, groups, out=y_RD, bias_SN=experts.down_bias)
    return launch_combine_fwd(y_RD, weights_TK, order.inverse_R, order.offsets_E1[-1:], num_choices)
