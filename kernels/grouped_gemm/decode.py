"""Launcher of the kernels for a handful of tokens: three launches for the whole layer.

What counts is how many bytes are on their way at once, so the work is cut along the columns until
there are programs for the whole GPU, and along the summed dimension if that is not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.decode_kernel import decode_combine, decode_down, decode_up
from moe_runtime.kernels.grouped_gemm.forward import precision_of
from moe_runtime.kernels.grouped_gemm.packed import (
    Weights,
    codes_of,
    depth_of,
    distance,
    packed_arguments,
    stages_of,
)
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, Tile
from moe_runtime.kernels.grouped_gemm.tiles import describe_device
from moe_runtime.kernels.triton_support import cdiv, launch, power_of_2

if TYPE_CHECKING:
    from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout

# A tile holds every token; the smallest a matrix instruction takes.
MAX_TOKENS = 16
# Programs that each multiprocessor should have.
_PROGRAMS_EACH = 2
_MAX_PARTS = 8
_BLOCK_N = 32
# Summed elements a step with packed weights at most: decoded codes take registers.
_DEPTH = 128


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
        common = self._common(slot_of_expert)
        products: dict[str, Any] = {
            "num_tokens": len(x_TD),
            "PRECISION": precision_of(x_TD),
            "BLOCK_T": MAX_TOKENS,
            "BLOCK_N": _BLOCK_N,
            "num_warps": 4,
        }
        num_stages = _num_stages(x_TD, self._device)
        self._add_up(
            gate_up_SZD, up, gate_up_bias_SZ, spec, layout, num_stages, **common, **products
        )
        self._add_down(down_SDF, down_bias_SD, num_stages, **common, **products)

    def _common(self, slot_of_expert: Tensor | None) -> dict[str, Any]:
        return {
            "ids_ptr": self._ids_TK,
            "slots_ptr": self._ids_TK if slot_of_expert is None else slot_of_expert,
            "num_experts": self._num_experts,
            "NUM_CHOICES": self._num_choices,
            "HAS_SLOTS": slot_of_expert is not None,
            "BLOCK_C": power_of_2(self._num_choices),
        }

    def _add_up(
        self,
        gate_up_SZD: Weights,
        up: tuple[Weights, Tensor | None] | None,
        gate_up_bias_SZ: Tensor | None,
        spec: ActivationSpec,
        layout: GateLayout,
        num_stages: int,
        **arguments: Any,
    ) -> None:
        x_TD, hidden = self._x_TD, self._hidden
        assert hidden is not None
        dim_f, dim_d = hidden.shape[1], x_TD.shape[1]
        step, to_up = (2, 1) if layout.has_gate and not layout.is_concatenated else (1, dim_f)
        weight = codes_of(gate_up_SZD)
        bias = weight[:, :, 0] if gate_up_bias_SZ is None else gate_up_bias_SZ
        to_up_w, to_up_b = weight.stride(1) * to_up, bias.stride(1) * to_up
        if weight is not gate_up_SZD:
            # of packed weights up is a tensor of its own, or there is no gate
            to_up_w = 0 if up is None else distance(weight, codes_of(up[0]))
            to_up_b = 0 if up is None or up[1] is None else distance(bias, up[1])
        block_k = _block_k(x_TD, gate_up_SZD, has_gate=layout.has_gate)
        launch(
            decode_up, (len(hidden), cdiv(dim_f, _BLOCK_N)),
            x_ptr=x_TD, weight_ptr=weight, bias_ptr=bias, hidden_ptr=hidden,
            dim_n=dim_f, dim_k=dim_d,
            stride_xt=x_TD.stride(0), stride_xk=x_TD.stride(1),
            stride_ws=weight.stride(0), stride_wn=weight.stride(1) * step,
            stride_wk=weight.stride(2), stride_w_up=to_up_w,
            stride_bs=bias.stride(0), stride_bn=bias.stride(1) * step,
            stride_b_up=to_up_b, stride_hr=hidden.stride(0),
            IS_GATED=layout.has_gate, HAS_BIAS=gate_up_bias_SZ is not None,
            BLOCK_K=block_k, EVEN_N=dim_f % _BLOCK_N == 0, EVEN_K=dim_d % block_k == 0,
            ACTIVATION=spec,
            num_stages=stages_of(gate_up_SZD, num_stages, _DEPTH, block_k),
            **packed_arguments(gate_up_SZD, None if up is None else up[0], x_TD),
            **arguments,
        )  # fmt: skip

    def _add_down(
        self, down_SDF: Weights, down_bias_SD: Tensor | None, num_stages: int, **arguments: Any
    ) -> None:
        x_TD, hidden = self._x_TD, self._hidden
        assert hidden is not None
        num_slots, dim_f = hidden.shape
        weight, dim_d = codes_of(down_SDF), self._dim
        block_k = _block_k(x_TD, down_SDF, has_gate=False)
        programs = min(num_slots, self._num_experts) * cdiv(dim_d, _BLOCK_N)
        num_parts, split_k = _parts(programs, dim_f, block_k, self._device)
        if self._partial is None:
            self._partial = x_TD.new_empty(num_parts, num_slots, dim_d, dtype=torch.float32)
        partial = self._partial
        bias = weight[:, :, 0] if down_bias_SD is None else down_bias_SD
        launch(
            decode_down, (num_slots, cdiv(dim_d, _BLOCK_N), num_parts),
            hidden_ptr=hidden, weight_ptr=weight, bias_ptr=bias, partial_ptr=partial,
            dim_n=dim_d, dim_k=dim_f, split_k=split_k,
            stride_hr=hidden.stride(0), stride_ws=weight.stride(0), stride_wn=weight.stride(1),
            stride_wk=weight.stride(2), stride_bs=bias.stride(0), stride_bn=bias.stride(1),
            stride_ps=partial.stride(0), stride_pr=partial.stride(1),
            HAS_BIAS=down_bias_SD is not None, BLOCK_K=block_k,
            EVEN_N=dim_d % _BLOCK_N == 0, EVEN_K=dim_f % block_k == 0,
            num_stages=stages_of(down_SDF, num_stages, _DEPTH, block_k),
            **packed_arguments(down_SDF, None, x_TD), **arguments,
        )  # fmt: skip

    def give(self, rows_N: Tensor, y_ND: Tensor) -> None:
        """Takes rows that somebody else computed, of experts that are never added here.

        Args:
            rows_N: integers, places in the flattened ids.
            y_ND: what their experts make of them, not yet weighted.
        """
        self._given.append((rows_N.long(), y_ND))
        self._dim = y_ND.shape[1]

    def sums(self, slot_of_expert: Tensor | None = None) -> Tensor:
        """The output, once every expert was added that an id names and that has a slot here.

        Args:
            slot_of_expert: `[E]`, below 0 for experts that take no part; None if all do.
        """
        partial, weights_TK = self._partial, self._weights_TK
        if partial is None and self._given:
            shape = 1, self._ids_TK.numel(), self._dim
            partial = self._x_TD.new_empty(shape, dtype=torch.float32)
        for rows_N, y_ND in self._given:
            assert partial is not None
            partial[1:, rows_N] = 0.0
            partial[0, rows_N] = y_ND.float()
        out_TD = self._x_TD.new_empty(len(self._x_TD), self._dim)
        if partial is None:
            return out_TD.zero_()
        block_d = 256
        launch(
            decode_combine, (len(out_TD), cdiv(self._dim, block_d)),
            partial_ptr=partial, weights_ptr=weights_TK, out_ptr=out_TD,
            num_parts=len(partial), dim=self._dim,
            stride_ps=partial.stride(0), stride_pr=partial.stride(1),
            stride_wt=weights_TK.stride(0), stride_wk=weights_TK.stride(1),
            stride_ot=out_TD.stride(0), BLOCK_D=block_d,
            **self._common(slot_of_expert),
        )  # fmt: skip
        return out_TD


def _block_k(x: Tensor, weight: Weights, *, has_gate: bool) -> int:
    """Summed elements a step: 512 bytes of a row of x, half of it where two weights are read."""
    block_k = (512 if not has_gate else 256) // x.element_size()
    if isinstance(weight, Tensor):
        return block_k
    return depth_of(weight.format, x.dtype, min(block_k, _DEPTH), weight.num_cols)


def _num_stages(x: Tensor, device: GpuLimits) -> int:
    """Loads in flight: as many as the shared memory holds, at most four."""
    tile = Tile(MAX_TOKENS, _BLOCK_N, _block_k(x, x, has_gate=False), 4, 4)
    return tile.fitted(x.element_size(), device).num_stages


def _parts(programs: int, dim_k: int, block_k: int, device: GpuLimits) -> tuple[int, int]:
    """`(parts, summed columns of each)` so that the GPU has enough programs at once."""
    wanted = cdiv(device.num_multiprocessors * _PROGRAMS_EACH, programs)
    num_steps = cdiv(dim_k, block_k)
    steps_each = cdiv(num_steps, min(wanted, num_steps, _MAX_PARTS))
    return cdiv(num_steps, steps_each), steps_each * block_k
