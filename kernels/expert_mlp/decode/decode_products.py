"""Launcher of the kernels for a handful of tokens: three launches for the whole layer.

What counts is how many bytes are on their way at once, so the work is cut along the columns until
there are programs for the whole GPU, and along the summed dimension if that is not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.decode.decode_launches import (
    DecodeRows,
    prepare_down,
    prepare_sums,
    prepare_up,
)
from moe_runtime.kernels.expert_mlp.decode.decode_row import (
    prepare_down_row,
    prepare_up_row,
    takes_row,
)
from moe_runtime.kernels.grouped_gemm.forward import precision_of
from moe_runtime.kernels.grouped_gemm.packed import (
    Weights,
    codes_of,
    distance,
    packed_arguments,
)
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits
from moe_runtime.kernels.grouped_gemm.tiles import describe_device

if TYPE_CHECKING:
    from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout

_Rows = tuple[DecodeRows, dict[str, Tensor]]


def decode_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_SZD: Weights,
    down_SDF: Weights,
    spec: ActivationSpec,
    layout: GateLayout,
    *,
    gate_up_bias_SZ: Tensor | None = None,
    down_bias_SD: Tensor | None = None,
    up: tuple[Weights, Tensor | None] | None = None,
    slot_of_expert: Tensor | None = None,
    device: GpuLimits | None = None,
) -> Tensor:
    """The whole routed feed-forward of at most `MAX_TOKENS` tokens, without a backward pass.

    Args:
        x_TD: `[T, D]`.
        ids_TK: `[T, K]` integers; an id that names no expert adds nothing. A token may name an
            expert twice.
        weights_TK: `[T, K]` gate weights.
        gate_up_SZD: As in `DecodeProducts.add`, and so the others.
        down_SDF: See there.
        spec: See there.
        layout: See there.
        gate_up_bias_SZ: See there.
        down_bias_SD: See there.
        up: See there.
        slot_of_expert: `[E]` or None.
        device: What the kernels must fit in, instead of the one that `x` lies on.

    Returns:
        `[T, D]` in the dtype of `x`.
    """
    num_experts = down_SDF.shape[0] if slot_of_expert is None else len(slot_of_expert)
    products = DecodeProducts(x_TD, ids_TK, weights_TK, num_experts, device)
    products.add(
        gate_up_SZD,
        down_SDF,
        spec,
        layout,
        gate_up_bias_SZ=gate_up_bias_SZ,
        down_bias_SD=down_bias_SD,
        up=up,
        slot_of_expert=slot_of_expert,
    )
    return products.sums(slot_of_expert)


class DecodeProducts:
    """The same for experts that come a few at a time, each once.

    Every expert's rows are computed by programs of its own and summed at the end, a token's choices
    in their order: the bits do not depend on who came when.
    """

    def __init__(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        device: GpuLimits | None = None,
    ) -> None:
        """Takes what `decode_expert_mlp` takes, and how many experts ids may name."""
        self._x_TD, self._weights_TK = x_TD, weights_TK
        self._ids_TK = ids_TK.contiguous()
        self._device = device or describe_device(x_TD.device)
        self._num_choices = ids_TK.shape[1]
        self._num_experts = num_experts
        self._hidden = self._partial = None
        self._given: list[tuple[Tensor, Tensor]] = []
        self._dim = x_TD.shape[1]

    def add(
        self,
        gate_up_SZD: Weights,
        down_SDF: Weights,
        spec: ActivationSpec,
        layout: GateLayout,
        *,
        gate_up_bias_SZ: Tensor | None = None,
        down_bias_SD: Tensor | None = None,
        up: tuple[Weights, Tensor | None] | None = None,
        slot_of_expert: Tensor | None = None,
    ) -> None:
        """Computes the rows of the experts that have a slot.

        Args:
            gate_up_SZD: `[S, Z, D]`, any strides; or packed, of the gate, or of up without one.
            down_SDF: `[S, D, F]`, any strides; or packed.
            spec: The activation.
            layout: Of the pre-activations.
            gate_up_bias_SZ: `[S, Z]` or None.
            down_bias_SD: `[S, D]` or None.
            up: Weights and bias of up, where weights are packed and there is a gate.
            slot_of_expert: `[E]` or None; below 0 for experts that are computed by another call.
        """
        x_TD, num_slots = self._x_TD, self._ids_TK.numel()
        self._dim, dim_f = down_SDF.shape[1:]
        if not num_slots or not self._dim:
            return
        if self._hidden is None:
            self._hidden = x_TD.new_empty(num_slots, dim_f)
        rows = self._rows(slot_of_expert)
        self._add_up(gate_up_SZD, up, gate_up_bias_SZ, spec, layout, rows)
        self._add_down(down_SDF, down_bias_SD, rows)

    def _rows(self, slot_of_expert: Tensor | None) -> _Rows:
        tensors = {
            "ids_ptr": self._ids_TK,
            "slots_ptr": self._ids_TK if slot_of_expert is None else slot_of_expert,
        }
        numbers = DecodeRows(
            len(self._x_TD), self._num_experts, self._num_choices, slot_of_expert is not None
        )
        return numbers, tensors

    def _add_up(
        self,
        gate_up_SZD: Weights,
        up: tuple[Weights, Tensor | None] | None,
        gate_up_bias_SZ: Tensor | None,
        spec: ActivationSpec,
        layout: GateLayout,
        rows: _Rows,
    ) -> None:
        x_TD, hidden = self._x_TD, self._hidden
        assert hidden is not None
        weight = codes_of(gate_up_SZD)
        bias = weight[:, :, 0] if gate_up_bias_SZ is None else gate_up_bias_SZ
        dims, has_bias = (hidden.shape[1], x_TD.shape[1]), gate_up_bias_SZ is not None
        if takes_row(x_TD, gate_up_SZD):
            row = prepare_up_row(
                rows[0], self._device, dims, weight.stride(), bias.stride(),
                has_bias=has_bias, spec=spec, layout=layout,
            )  # fmt: skip
            row_D = x_TD.contiguous()
            return row(x_ptr=row_D, weight_ptr=weight, bias_ptr=bias, hidden_ptr=hidden, **rows[1])
        # Of packed weights up is a tensor of its own, or there is no gate.
        distances = None
        if weight is not gate_up_SZD:
            distances = 0, 0
            if up is not None:
                to_bias = 0 if up[1] is None else distance(bias, up[1])
                distances = distance(weight, codes_of(up[0])), to_bias
        scales, packed = _split(packed_arguments(gate_up_SZD, up and up[0], x_TD))
        prepared = prepare_up(
            rows[0],
            self._device,
            precision_of(x_TD),
            x_TD.dtype,
            x_TD.stride(),
            dims,
            weight.stride(),
            distances,
            bias.stride(),
            has_bias=has_bias,
            spec=spec,
            layout=layout,
            packed=packed,
        )
        prepared(
            x_ptr=x_TD, weight_ptr=weight, bias_ptr=bias, hidden_ptr=hidden,
            **rows[1], **scales,
        )  # fmt: skip

    def _add_down(
        self,
        down_SDF: Weights,
        down_bias_SD: Tensor | None,
        rows: _Rows,
    ) -> None:
        x_TD, hidden = self._x_TD, self._hidden
        assert hidden is not None
        num_slots, dim_f = hidden.shape
        weight, dim_d = codes_of(down_SDF), self._dim
        bias = weight[:, :, 0] if down_bias_SD is None else down_bias_SD
        has_bias = down_bias_SD is not None
        if takes_row(x_TD, down_SDF) and (self._partial is None or len(self._partial) == 1):
            row = prepare_down_row(
                rows[0], self._device, (dim_f, dim_d), weight.stride(), bias.stride(),
                has_bias=has_bias,
            )  # fmt: skip
            if self._partial is None:
                self._partial = x_TD.new_empty(1, num_slots, dim_d, dtype=torch.float32)
            return row(
                hidden_ptr=hidden, weight_ptr=weight, bias_ptr=bias, partial_ptr=self._partial,
                **rows[1],
            )  # fmt: skip
        scales, packed = _split(packed_arguments(down_SDF, None, x_TD))
        prepared, num_parts = prepare_down(
            rows[0],
            self._device,
            precision_of(x_TD),
            x_TD.dtype,
            (dim_f, dim_d),
            weight.stride(),
            bias.stride(),
            has_bias=has_bias,
            packed=packed,
            given_parts=None if self._partial is None else len(self._partial),
        )
        if self._partial is None:
            self._partial = x_TD.new_empty(num_parts, num_slots, dim_d, dtype=torch.float32)
        prepared(
            hidden_ptr=hidden, weight_ptr=weight, bias_ptr=bias, partial_ptr=self._partial,
            **rows[1], **scales,
        )  # fmt: skip

    def give(self, rows_N: Tensor, y_ND: Tensor) -> None:
        """Takes rows that somebody else computed, of experts that are never added here.

        Args:
            rows_N: integers, places in the flattened ids.
            y_ND: what their experts make of them, not yet weighted.
        """
        self._dim = y_ND.shape[1]
        if self._partial is None:
            self._given.append((rows_N, y_ND))
        else:  # at once: what is left when this is cut short would be of the next replay
            self._put(self._partial, rows_N, y_ND)

    def _put(self, partial: Tensor, rows_N: Tensor, y_ND: Tensor) -> None:
        """Puts given rows where those of other experts are."""
        rows_N = rows_N.long()
        if len(partial) > 1:
            partial[1:].index_fill_(1, rows_N, 0.0)
        partial[0].index_copy_(0, rows_N, y_ND.float())

    def sums(self, slot_of_expert: Tensor | None = None) -> Tensor:
        """The output, once every expert was added that an id names and that has a slot here.

        Args:
            slot_of_expert: `[E]`, below 0 for experts that take no part; None if all do.
        """
        if self._partial is None and self._given:
            shape = 1, self._ids_TK.numel(), self._dim
            self._partial = self._x_TD.new_empty(shape, dtype=torch.float32)
        partial, weights_TK = self._partial, self._weights_TK
        out_TD = self._x_TD.new_empty(len(self._x_TD), self._dim)
        if partial is None:
            return out_TD.zero_()
        for given in self._given:
            self._put(partial, *given)
        rows = self._rows(slot_of_expert)
        prepared = prepare_sums(rows[0], self._device, len(partial), self._dim, weights_TK.stride())
        prepared(partial_ptr=partial, weights_ptr=weights_TK, out_ptr=out_TD, **rows[1])
        return out_TD


def _split(packed: dict[str, Any]) -> tuple[dict[str, Tensor], tuple[tuple[str, Any], ...]]:
    """The tensors and the numbers of `packed_arguments`."""
    tensors = {name: packed.pop(name) for name in ("scales_ptr", "zeros_ptr", "global_ptr")}
    return tensors, tuple(packed.items())
