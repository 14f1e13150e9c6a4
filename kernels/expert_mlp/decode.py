"""The routed feed-forward of a handful of tokens on a GPU: three launches for the whole layer.

What counts is how many bytes are on their way at once, so the work is cut along the columns until
there are programs for the whole GPU, and along the summed dimension if that is not enough. What the
launches need beside tensors is found once for each layer's shapes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.decode_kernels import (
    decode_combine,
    decode_down,
    decode_down_row,
    decode_up,
    decode_up_row,
)
from moe_runtime.kernels.grouped_gemm.forward import precision_of
from moe_runtime.kernels.grouped_gemm.packed import (
    Weights,
    codes_of,
    depth_of,
    distance,
    packed_arguments,
)
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, Tile, describe_device
from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout
from moe_runtime.kernels.quantized import WeightFormat
from moe_runtime.kernels.triton_support import (
    PreparedLaunch,
    cdiv,
    is_interpreted,
    power_of_2,
)

# A tile holds every token; the smallest a matrix instruction takes.
MAX_TOKENS = 16
# Programs that each multiprocessor should have.
_PROGRAMS_EACH = 2
_MAX_PARTS = 8
_BLOCK_N = 32
_NUM_WARPS = 4
# Bytes of a row of the weights a step, or half of them of each of two; and most steps under way.
_ROW_BYTES = _CODED_ROW_BYTES = 512
_NUM_STAGES = 4
# Columns of the output that one program sums up.
_BLOCK_D = 64
# Summed elements a step with packed weights at most: decoded codes take registers.
_DEPTH = 128
# Layers times numbers of tokens.
MOST_PREPARED = 2048

Numbers = tuple[tuple[str, Any], ...]
Strides = tuple[int, ...]


class DecodeRows(NamedTuple):
    """Numbers of tokens, of experts and of choices, and whether experts have slots."""

    num_tokens: int
    num_experts: int
    num_choices: int
    has_slots: bool

    @property
    def num_slots(self) -> int:
        """Rows that are computed."""
        return self.num_tokens * self.num_choices

    def arguments(self) -> dict[str, Any]:
        """What every kernel is told."""
        return {
            "num_experts": self.num_experts,
            "NUM_CHOICES": self.num_choices,
            "HAS_SLOTS": self.has_slots,
            "BLOCK_C": power_of_2(self.num_choices),
        }


@lru_cache(maxsize=MOST_PREPARED)
def prepare_up(
    rows: DecodeRows,
    device: GpuLimits,
    precision: str,
    dtype: torch.dtype,
    stride_x: Strides,
    dims: tuple[int, int],
    stride_w: Strides,
    distances: tuple[int, int] | None,
    stride_b: Strides,
    *,
    has_bias: bool,
    spec: ActivationSpec,
    layout: GateLayout,
    packed: Numbers,
) -> PreparedLaunch:
    """The first product with the activation.

    Args:
        rows: Who chose whom.
        device: What it must fit in.
        precision: Of products.
        dtype: Of the rows.
        stride_x: Of `x`.
        dims: F and D.
        stride_w: Of the weights, or of their codes.
        distances: From the gate to up, in weights and biases, where both are tensors of their own.
        stride_b: Of the biases.
        has_bias: Whether there are any.
        spec: The activation.
        layout: Of the pre-activations.
        packed: How the weights are written.
    """
    dim_f, dim_d = dims
    step, to_up = rows_of_gate_and_up(layout, dim_f)
    to_up_w, to_up_b = distances or (stride_w[1] * to_up, stride_b[1] * to_up)
    numbers = dict(packed)
    block_k, num_stages = _depth(numbers["FORMAT"], dtype, dim_d, device, has_gate=layout.has_gate)
    return PreparedLaunch(
        decode_up, (rows.num_slots, cdiv(dim_f, _BLOCK_N)),
        num_tokens=rows.num_tokens, dim_n=dim_f, dim_k=dim_d,
        stride_xt=stride_x[0], stride_xk=stride_x[1],
        stride_ws=stride_w[0], stride_wn=stride_w[1] * step, stride_wk=stride_w[2],
        stride_w_up=to_up_w, stride_bs=stride_b[0], stride_bn=stride_b[1] * step,
        stride_b_up=to_up_b, stride_hr=dim_f,
        IS_GATED=layout.has_gate, HAS_BIAS=has_bias, ACTIVATION=spec, PRECISION=precision,
        BLOCK_T=MAX_TOKENS, BLOCK_N=_BLOCK_N, BLOCK_K=block_k,
        EVEN_N=dim_f % _BLOCK_N == 0, EVEN_K=dim_d % block_k == 0,
        num_warps=_NUM_WARPS, num_stages=num_stages,
        **chain(device), **rows.arguments(), **numbers,
    )  # fmt: skip


@lru_cache(maxsize=MOST_PREPARED)
def prepare_down(
    rows: DecodeRows,
    device: GpuLimits,
    precision: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    stride_w: Strides,
    stride_b: Strides,
    *,
    has_bias: bool,
    packed: Numbers,
    given_parts: int | None = None,
) -> tuple[PreparedLaunch, int]:
    """The second product, and in how many parts it is summed: as many as are given, where other
    experts' sums are there. Other arguments as in `prepare_up`."""
    dim_f, dim_d = dims
    numbers = dict(packed)
    block_k, num_stages = _depth(numbers["FORMAT"], dtype, dim_f, device, has_gate=False)
    programs = min(rows.num_slots, rows.num_experts) * cdiv(dim_d, _BLOCK_N)
    num_parts, split_k = _parts(programs, dim_f, block_k, device, given_parts)
    prepared = PreparedLaunch(
        decode_down, (rows.num_slots, cdiv(dim_d, _BLOCK_N), num_parts),
        num_tokens=rows.num_tokens, dim_n=dim_d, dim_k=dim_f, split_k=split_k,
        stride_hr=dim_f, stride_ws=stride_w[0], stride_wn=stride_w[1], stride_wk=stride_w[2],
        stride_bs=stride_b[0], stride_bn=stride_b[1],
        stride_ps=rows.num_slots * dim_d, stride_pr=dim_d,
        HAS_BIAS=has_bias, PRECISION=precision,
        BLOCK_T=MAX_TOKENS, BLOCK_N=_BLOCK_N, BLOCK_K=block_k,
        EVEN_N=dim_d % _BLOCK_N == 0, EVEN_K=dim_f % block_k == 0,
        num_warps=_NUM_WARPS, num_stages=num_stages,
        **chain(device), **rows.arguments(), **numbers,
    )  # fmt: skip
    return prepared, num_parts


@lru_cache(maxsize=MOST_PREPARED)
def prepare_sums(
    rows: DecodeRows, device: GpuLimits, num_parts: int, dim_d: int, stride_weights: Strides
) -> PreparedLaunch:
    """The sums of the parts and of the choices."""
    return PreparedLaunch(
        decode_combine, (rows.num_tokens, cdiv(dim_d, _BLOCK_D)),
        num_parts=num_parts, IS_ONE_PART=num_parts == 1, dim=dim_d,
        stride_ps=rows.num_slots * dim_d, stride_pr=dim_d,
        stride_wt=stride_weights[0], stride_wk=stride_weights[1], stride_ot=dim_d,
        BLOCK_D=_BLOCK_D, **chain(device), **rows.arguments(),
    )  # fmt: skip


def rows_of_gate_and_up(layout: GateLayout, dim_f: int) -> tuple[int, int]:
    """`(rows from one hidden column to the next, rows from a gate to its up)`."""
    if not layout.has_gate:
        return 1, 0
    return (1, dim_f) if layout.is_concatenated else (2, 1)


def chain(device: GpuLimits) -> dict[str, bool]:
    """As `dependent_launch`; every kernel of a step is launched so."""
    is_chained = device.has_wide_accumulators and not is_interpreted()
    return {"IS_CHAINED": is_chained} | ({"launch_pdl": True} if is_chained else {})


def _depth(
    kind: WeightFormat | None,
    dtype: torch.dtype,
    dim_k: int,
    device: GpuLimits,
    *,
    has_gate: bool,
) -> tuple[int, int]:
    """`(summed elements a step, steps under way)`: as many as the shared memory holds."""
    most = (_ROW_BYTES if kind is None else _CODED_ROW_BYTES) // dtype.itemsize
    tile = Tile(MAX_TOKENS, _BLOCK_N, most, _NUM_WARPS, _NUM_STAGES)
    tile = tile.fitted(dtype.itemsize, device)
    block_k = most // 2 if has_gate else most
    if kind is None:
        return block_k, tile.num_stages
    depth = depth_of(kind, dtype, min(block_k, _DEPTH), dim_k)
    return depth, tile.num_stages * (1 if depth >= _DEPTH else 2)


def _parts(
    programs: int, dim_k: int, block_k: int, device: GpuLimits, given: int | None
) -> tuple[int, int]:
    """`(parts, summed columns of each)` so that the GPU has enough programs at once."""
    wanted = given or cdiv(device.num_multiprocessors * _PROGRAMS_EACH, programs)
    num_steps = max(1, cdiv(dim_k, block_k))
    steps_each = cdiv(num_steps, min(wanted, num_steps, _MAX_PARTS))
    return given or cdiv(num_steps, steps_each), steps_each * block_k


# Weights of a program at a time, of each of gate and up and of down: the best for the layers of
# OLMoE and Qwen3-30B-A3B on an H200, of blocks of 2,048 to 16,384.
_BLOCK_UP, _BLOCK_DOWN = 4096, 2048
_BLOCK_K = 256


def takes_row(x_TD: Tensor, weight: Weights) -> bool:
    """Whether these kernels compute a product: one token, and weights whose rows are whole."""
    if len(x_TD) > 1 or not isinstance(weight, Tensor):
        return False
    return weight.stride(2) == 1 and weight.shape[2] > 0


@lru_cache(maxsize=MOST_PREPARED)
def prepare_up_row(
    rows: DecodeRows,
    device: GpuLimits,
    dims: tuple[int, int],
    stride_w: Strides,
    stride_b: Strides,
    *,
    has_bias: bool,
    spec: ActivationSpec,
    layout: GateLayout,
) -> PreparedLaunch:
    """The first product with the activation; arguments as in `prepare_up`."""
    dim_f, dim_d = dims
    step, to_up = rows_of_gate_and_up(layout, dim_f)
    block_n, block_k = _block(dim_d, _BLOCK_UP)
    return PreparedLaunch(
        decode_up_row, (rows.num_slots, cdiv(dim_f, block_n)),
        dim_n=dim_f, dim_k=dim_d,
        stride_ws=stride_w[0], stride_wn=stride_w[1] * step, stride_w_up=stride_w[1] * to_up,
        stride_bs=stride_b[0], stride_bn=stride_b[1] * step, stride_b_up=stride_b[1] * to_up,
        IS_GATED=layout.has_gate, HAS_BIAS=has_bias, ACTIVATION=spec,
        BLOCK_T=1, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=dim_d % block_k == 0,
        num_warps=_NUM_WARPS, **chain(device), **rows.arguments(),
    )  # fmt: skip


@lru_cache(maxsize=MOST_PREPARED)
def prepare_down_row(
    rows: DecodeRows,
    device: GpuLimits,
    dims: tuple[int, int],
    stride_w: Strides,
    stride_b: Strides,
    *,
    has_bias: bool,
) -> PreparedLaunch:
    """The second product, in one part; arguments as in `prepare_up`."""
    dim_f, dim_d = dims
    block_n, block_k = _block(dim_f, _BLOCK_DOWN)
    return PreparedLaunch(
        decode_down_row, (rows.num_slots, cdiv(dim_d, block_n)),
        dim_n=dim_d, dim_k=dim_f, stride_ws=stride_w[0], stride_wn=stride_w[1],
        stride_bs=stride_b[0], stride_bn=stride_b[1], HAS_BIAS=has_bias,
        BLOCK_T=1, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=dim_f % block_k == 0,
        num_warps=_NUM_WARPS, **chain(device), **rows.arguments(),
    )  # fmt: skip


def _block(dim_k: int, num_weights: int) -> tuple[int, int]:
    """Columns of the output and summed elements of a program's step."""
    block_k = min(_BLOCK_K, power_of_2(dim_k))
    return min(16, num_weights // block_k), block_k


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
