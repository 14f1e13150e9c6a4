"""`grouped_gemm`: each expert's rows times its weights.

Shape suffixes: T tokens, R sorted rows, S slots, E experts, N columns of the product, K the summed
dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from moe_runtime.kernels.operands import check_like, check_shape, precise_dtype
from moe_runtime.kernels.quantized import QuantizedStack
from moe_runtime.kernels.token_sort import SortedTokens
from moe_runtime.kernels.triton_support import resolve_impl

GroupedGemmImpl = Literal["auto", "triton", "torch", "reference"]
IMPLS: tuple[GroupedGemmImpl, ...] = ("auto", "triton", "torch", "reference")


def grouped_gemm(
    x: Tensor,
    weight: Tensor | QuantizedStack,
    offsets_E1: Tensor,
    *,
    bias_SN: Tensor | None = None,
    slot_of_expert: Tensor | None = None,
    is_transposed: bool = False,
    sorted_tokens: SortedTokens | None = None,
    gathers_choices: int = 0,
    scatters: bool = False,
    out: Tensor | None = None,
    impl: GroupedGemmImpl = "auto",
) -> Tensor:
    """Multiplies each expert's rows by its weights: `out[r] = x[r] @ weight[slot of expert].T`.

    Rows of expert `e` are `offsets[e]` to `offsets[e + 1]`. Nothing is padded or dropped. On a GPU
    the host never waits. Differentiable in `x`, `weight` and `bias_SN`, without atomics: the same
    bits in every run. Weights of experts without rows get zero gradients.

    Args:
        x: `[R, K]`, sorted by expert; with `gathers_choices` `[T, K]` in token order.
        weight: `[S, N, K]`, or `[S, K, N]` if `is_transposed`; any strides. Quantised `[S, N, K]`
            has no gradient, and under Triton gives none to `x`.
        offsets_E1: int64. Rows from the last offset on belong to no expert.
        bias_SN: In the dtype of the weights, or None; any dtype for quantised weights.
        slot_of_expert: `[E]` int32 or int64, all different; negative for experts that are left out,
            so that residents can run now and others later, into the same `out`. None: expert e is
            in slot e.
        sorted_tokens: Needed for gathering and scattering.
        gathers_choices: Choices per token, or 0. If set, row r reads token
            `order_R[r] // gathers_choices` of `x`, without a sorted copy.
        scatters: Writes row r to row `order_R[r]`, in slot order.
        out: `[R, N]` to write to; rows without an expert stay as they are. Without gradients only.
            None: a new tensor, zero in such rows.
        impl: `triton` needs a GPU; `torch` is the CPU path, one product per expert in the dtype of
            `x`; `reference` is the specification, in fp32 (fp64 for fp64). `auto` chooses by
            device.

    Returns:
        `[R, N]` in the dtype of `x`, summed in fp32 and rounded once.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or `impl` cannot run here.
        TritonUnavailableError: Triton is needed and not installed.
    """
    chosen = resolve_impl(impl, x.device, IMPLS)
    weight_SNK = weight
    if isinstance(weight, QuantizedStack):
        if is_transposed:
            raise ValueError("quantised weights are [S, N, K]: is_transposed is for tensors")
    elif weight.ndim != 3:
        raise ValueError(f"weight must have three dimensions, got {list(weight.shape)}")
    elif is_transposed:
        weight_SNK = weight.transpose(1, 2)
    if (gathers_choices or scatters) and sorted_tokens is None:
        raise ValueError("gathering and scattering need sorted_tokens")
    order_R = None if sorted_tokens is None else sorted_tokens.order_R
    num_rows = len(x) if order_R is None else len(order_R)
    _validate(x, weight_SNK, offsets_E1, bias_SN, slot_of_expert)
    expected_rows = num_rows
    if gathers_choices:
        if gathers_choices < 0 or num_rows % gathers_choices:
            raise ValueError(f"{num_rows} slots do not make tokens of {gathers_choices} choices")
        expected_rows = num_rows // gathers_choices
    if len(x) != expected_rows:
        raise ValueError(f"x must have {expected_rows} rows for {num_rows} slots, got {len(x)}")
    if out is not None:
        _validate_out(out, x, weight_SNK, bias_SN, num_rows)

    if chosen == "triton":
        from moe_runtime.kernels.grouped_gemm.backward import grouped_gemm_triton
        from moe_runtime.kernels.grouped_gemm.groups import Groups

        groups = Groups(offsets_E1, num_rows, slot_of_expert, order_R, max(1, gathers_choices))
        inverse_R = None if sorted_tokens is None else sorted_tokens.inverse_R
        moves = {"gathers": gathers_choices > 0, "scatters": scatters}
        return grouped_gemm_triton(x, weight_SNK, bias_SN, groups, inverse_R, moves, out)
    reads_R = None
    if order_R is not None and gathers_choices:
        reads_R = order_R // gathers_choices
    offsets = offsets_E1.tolist()
    return grouped_gemm_by_expert(
        x,
        weight_SNK,
        offsets,
        [*range(len(offsets) - 1)] if slot_of_expert is None else slot_of_expert.tolist(),
        bias_SN=bias_SN,
        reads_R=reads_R,
        writes_R=order_R if scatters else None,
        out=out,
        num_rows=num_rows,
        precise=x.dtype if chosen == "torch" else precise_dtype(x),
    )


def _validate(
    x: Tensor,
    weight_SNK: Tensor | QuantizedStack,
    offsets_E1: Tensor,
    bias_SN: Tensor | None,
    slot_of_expert: Tensor | None,
) -> None:
    num_slots, dim_n, dim_k = weight_SNK.shape
    if x.ndim != 2 or x.shape[1] != dim_k:
        raise ValueError(f"x must be [*, {dim_k}] for these weights, got {list(x.shape)}")
    if offsets_E1.ndim != 1 or len(offsets_E1) < 2 or offsets_E1.dtype != torch.int64:
        raise ValueError(
            f"offsets must be [E + 1] of int64, got {list(offsets_E1.shape)} of {offsets_E1.dtype}"
        )
    if bias_SN is not None:
        check_shape("bias", bias_SN, (num_slots, dim_n))
    num_experts = len(offsets_E1) - 1
    if slot_of_expert is None:
        if num_experts != num_slots:
            raise ValueError(
                f"{num_experts} experts and {num_slots} slots need a slot_of_expert to tell which "
                "lies where"
            )
    elif tuple(slot_of_expert.shape) != (num_experts,) or slot_of_expert.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise ValueError(
            f"slot_of_expert must be [{num_experts}] of int32 or int64, got "
            f"{list(slot_of_expert.shape)} of {slot_of_expert.dtype}"
        )
    on_device = [("offsets", offsets_E1), ("slot_of_expert", slot_of_expert)]
    if isinstance(weight_SNK, QuantizedStack):
        on_device += [("weight", weight_SNK.codes), ("bias", bias_SN)]
    else:
        check_like("weight", weight_SNK, x, "x")
        if bias_SN is not None:
            check_like("bias", bias_SN, x, "x")
    for name, tensor in on_device:
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} like x, got {tensor.device}")


def _validate_out(
    out: Tensor,
    x: Tensor,
    weight_SNK: Tensor | QuantizedStack,
    bias_SN: Tensor | None,
    num_rows: int,
) -> None:
    check_shape("out", out, (num_rows, weight_SNK.shape[1]))
    check_like("out", out, x, "x")
    operands = [tensor for tensor in (x, weight_SNK, bias_SN) if isinstance(tensor, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        raise ValueError("out cannot be given where a gradient is wanted; use torch.no_grad()")


def grouped_gemm_by_expert(
    x: Tensor,
    weight_SNK: Tensor | QuantizedStack,
    offsets: list[int],
    slots: list[int],
    *,
    bias_SN: Tensor | None,
    reads_R: Tensor | None,
    writes_R: Tensor | None,
    out: Tensor | None,
    num_rows: int,
    precise: torch.dtype,
) -> Tensor:
    """The specification: one expert after another in plain torch, differentiable.

    `out[writes[r]] = x[reads[r]] @ weight[slot].T + bias[slot]`, computed in `precise`: fp32 or
    fp64 in the specification, the dtype of `x` in the CPU implementation. None reads or writes the
    same row. A new tensor is zero in other rows.
    """
    pieces: list[Tensor] = []
    destinations: list[Tensor] = []
    rows_R = torch.arange(num_rows, device=x.device)
    # split once: the gradient of each `tensor[expert]` would be as large as the whole tensor
    matrix_of = _reader(weight_SNK)
    biases = None if bias_SN is None else bias_SN.unbind()
    sizes = [last - first for first, last in itertools.pairwise([0, *offsets, num_rows])]
    x_of_experts = (x if reads_R is None else x[reads_R]).split(sizes)[1:-1]
    for expert, slot in enumerate(slots):
        first, last = offsets[expert], offsets[expert + 1]
        if slot < 0 or first == last:
            continue
        rows = rows_R[first:last]
        product = x_of_experts[expert].to(precise) @ matrix_of(slot, precise).T
        if biases is not None:
            product = product + biases[slot].to(precise)
        pieces.append(product.to(x.dtype))
        destinations.append(rows if writes_R is None else writes_R[first:last])
    if out is None:
        # a product without rows keeps the result connected to both operands
        start = x[:0] @ matrix_of(0, x.dtype).T
        result = start.new_zeros(num_rows, weight_SNK.shape[1])
        values = torch.cat([start, *pieces])
        return result.index_copy(0, torch.cat([rows_R[:0], *destinations]), values)
    for piece, rows in zip(pieces, destinations, strict=True):
        out[rows] = piece
    return out


def _reader(weight: Tensor | QuantizedStack) -> Callable[[int, torch.dtype], Tensor]:
    if isinstance(weight, QuantizedStack):
        return lambda slot, dtype: weight.matrix(slot).dequantize(dtype)
    matrices = weight.unbind()
    return lambda slot, dtype: matrices[slot].to(dtype)
