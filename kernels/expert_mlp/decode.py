"""The routed feed-forward of a few tokens on a GPU: three launches for the whole layer.

The number of bytes in flight decides the speed. So the work is cut along the columns until the GPU
is full, and along the summed dimension if that is not enough. A step takes as long as the host
needs for its launches, so everything except tensors is prepared once per layer shape.

Shape suffixes: T tokens, K top-k, S slots, E experts, D model, F hidden.
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
from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.quantized import QuantizedExperts
from moe_runtime.kernels.grouped_gemm.forward import precision_of
from moe_runtime.kernels.grouped_gemm.packed import (
    Weights,
    codes_of,
    depth_of,
    distance,
    has_word_rows,
    packed_arguments,
    packed_row_block,
)
from moe_runtime.kernels.grouped_gemm.tile import (
    GpuLimits,
    Tile,
    casts_codes,
    describe_device,
)
from moe_runtime.kernels.operands import ActivationSpec, GateLayout
from moe_runtime.kernels.quantized import WeightFormat
from moe_runtime.kernels.triton_support import PreparedLaunch, cdiv, is_interpreted, power_of_2

MAX_TOKENS = 16  # a tile holds every token: the least rows of a matrix instruction
_PROGRAMS_EACH = 2  # per multiprocessor
_MAX_PARTS = 8
_BLOCK_N = 32
_NUM_WARPS = 4
_ROW_BYTES = 512  # of a row of weights per step, half of it for each of gate and up
_NUM_STAGES = 4  # most steps in flight
_BLOCK_D = 64  # output columns that one program sums
_DEPTH = 128  # most summed elements per step of packed weights: decoded codes take registers
# Weights per program and step for one token, of each of gate and up and of down: the best blocks
# of 2,048 to 16,384 for the layers of OLMoE and Qwen3-30B-A3B on an H200.
_ROW_UP, _ROW_DOWN = 4096, 2048
_ROW_BLOCK_K = 256
_MOST_PREPARED = 2048  # layers times numbers of tokens

_Strides = tuple[int, ...]


class _Rows(NamedTuple):
    """The numbers that all three launches take."""

    num_tokens: int
    num_experts: int
    num_choices: int
    has_slots: bool

    @property
    def num_slots(self) -> int:
        return self.num_tokens * self.num_choices

    def arguments(self, device: GpuLimits) -> dict[str, Any]:
        is_chained = device.chains_launches and not is_interpreted()
        return {
            "num_experts": self.num_experts,
            "NUM_CHOICES": self.num_choices,
            "HAS_SLOTS": self.has_slots,
            "BLOCK_C": power_of_2(self.num_choices),
            "IS_CHAINED": is_chained,
            **({"launch_pdl": True} if is_chained else {}),
        }


class _Product(NamedTuple):
    """A launch's parameters except its rows.

    `packed` describes packed weights. `is_row`: one token and weights with whole rows, multiplied
    by kernels without matrix units.
    """

    device: GpuLimits
    precision: str
    dtype: torch.dtype
    dim_n: int
    dim_k: int
    stride_w: _Strides
    stride_b: _Strides
    has_bias: bool
    packed: tuple[tuple[str, Any], ...]
    is_row: bool

    @property
    def format(self) -> WeightFormat | None:
        return dict(self.packed)["FORMAT"]

    def arguments(self, rows: _Rows, block_n: int, block_k: int) -> dict[str, Any]:
        return {
            "dim_n": self.dim_n, "dim_k": self.dim_k, "HAS_BIAS": self.has_bias,
            "BLOCK_T": 1 if self.is_row else MAX_TOKENS,
            "BLOCK_N": block_n, "BLOCK_K": block_k,
            "EVEN_N": self.dim_n % block_n == 0, "EVEN_K": self.dim_k % block_k == 0,
            "num_warps": _NUM_WARPS, **rows.arguments(self.device), **dict(self.packed),
        }  # fmt: skip

    def row_arguments(self, rows: _Rows, num_weights: int, num_matrices: int) -> dict[str, Any]:
        """For one token; `num_weights` per program and step, of each of `num_matrices`."""
        kind = self.format
        if kind is None:
            block_k = min(_ROW_BLOCK_K, power_of_2(self.dim_k))
            block_n = min(16, num_weights // block_k)
        else:
            block_n, block_k = packed_row_block(kind, self.dim_k, _NUM_WARPS, num_matrices)
        found = self.arguments(rows, block_n, block_k)
        del found["SCALES_TILE"]
        found["CASTS"] = kind is not None and casts_codes(kind, self.device)
        return found

    def depth(self, *, has_gate: bool) -> tuple[int, int]:
        """`(summed elements per step, steps in flight)`: as many as fit the shared memory."""
        kind = self.format
        most = _ROW_BYTES // self.dtype.itemsize
        tile = Tile(MAX_TOKENS, _BLOCK_N, most, _NUM_WARPS, _NUM_STAGES)
        tile = tile.fitted(self.dtype.itemsize, self.device)
        block_k = most // 2 if has_gate else most
        if kind is None:
            return block_k, tile.num_stages
        depth = depth_of(kind, self.dtype, min(block_k, _DEPTH), self.dim_k)
        return depth, tile.num_stages * (1 if depth >= _DEPTH else 2)


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare_up(
    rows: _Rows,
    product: _Product,
    stride_x: _Strides,
    distances: tuple[int, int] | None,
    spec: ActivationSpec,
    layout: GateLayout,
) -> PreparedLaunch:
    """The first product with the activation.

    `distances` lead from the gate to up, in weights and biases, if these are separate tensors.
    """
    dim_f, stride_w, stride_b = product.dim_n, product.stride_w, product.stride_b
    # Rows from one hidden column to the next, and from a gate to its up.
    step, to_up = 1, dim_f if layout.has_gate else 0
    if layout.has_gate and not layout.is_concatenated:
        step, to_up = 2, 1
    to_up_w, to_up_b = distances or (stride_w[1] * to_up, stride_b[1] * to_up)
    numbers: dict[str, Any] = {
        "stride_ws": stride_w[0], "stride_wn": stride_w[1] * step, "stride_w_up": to_up_w,
        "stride_bs": stride_b[0], "stride_bn": stride_b[1] * step, "stride_b_up": to_up_b,
        "IS_GATED": layout.has_gate, "ACTIVATION": spec,
    }  # fmt: skip
    if product.is_row:
        numbers |= product.row_arguments(rows, _ROW_UP, 1 + layout.has_gate)
        grid = (rows.num_slots, cdiv(dim_f, numbers["BLOCK_N"]))
        return PreparedLaunch(decode_up_row, grid, **numbers)
    block_k, num_stages = product.depth(has_gate=layout.has_gate)
    return PreparedLaunch(
        decode_up, (rows.num_slots, cdiv(dim_f, _BLOCK_N)),
        num_tokens=rows.num_tokens, stride_xt=stride_x[0], stride_xk=stride_x[1],
        stride_wk=stride_w[2], stride_hr=dim_f, PRECISION=product.precision,
        num_stages=num_stages,
        **product.arguments(rows, _BLOCK_N, block_k), **numbers,
    )  # fmt: skip


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare_down(
    rows: _Rows, product: _Product, given_parts: int | None
) -> tuple[PreparedLaunch, int]:
    """The second product and its number of parts: `given_parts` if other experts' sums are
    there.
    """
    dim_d, dim_f, stride_w, stride_b = (
        product.dim_n, product.dim_k, product.stride_w, product.stride_b,
    )  # fmt: skip
    numbers: dict[str, Any] = {
        "stride_ws": stride_w[0], "stride_wn": stride_w[1],
        "stride_bs": stride_b[0], "stride_bn": stride_b[1],
    }  # fmt: skip
    if product.is_row:
        numbers |= product.row_arguments(rows, _ROW_DOWN, 1)
        grid = (rows.num_slots, cdiv(dim_d, numbers["BLOCK_N"]))
        return PreparedLaunch(decode_down_row, grid, **numbers), 1
    block_k, num_stages = product.depth(has_gate=False)
    # enough parts to give the GPU enough programs
    programs = min(rows.num_slots, rows.num_experts) * cdiv(dim_d, _BLOCK_N)
    wanted = given_parts or cdiv(product.device.num_multiprocessors * _PROGRAMS_EACH, programs)
    num_steps = max(1, cdiv(dim_f, block_k))
    steps_each = cdiv(num_steps, min(wanted, num_steps, _MAX_PARTS))
    num_parts = given_parts or cdiv(num_steps, steps_each)
    prepared = PreparedLaunch(
        decode_down, (rows.num_slots, cdiv(dim_d, _BLOCK_N), num_parts),
        num_tokens=rows.num_tokens, split_k=steps_each * block_k, stride_hr=dim_f,
        stride_wk=stride_w[2], stride_ps=rows.num_slots * dim_d, stride_pr=dim_d,
        PRECISION=product.precision, num_stages=num_stages,
        **product.arguments(rows, _BLOCK_N, block_k), **numbers,
    )  # fmt: skip
    return prepared, num_parts


@lru_cache(maxsize=_MOST_PREPARED)
def _prepare_sums(
    rows: _Rows, device: GpuLimits, num_parts: int, dim_d: int, stride_weights: _Strides
) -> PreparedLaunch:
    return PreparedLaunch(
        decode_combine, (rows.num_tokens, cdiv(dim_d, _BLOCK_D)),
        num_parts=num_parts, IS_ONE_PART=num_parts == 1, dim=dim_d,
        stride_ps=rows.num_slots * dim_d, stride_pr=dim_d,
        stride_wt=stride_weights[0], stride_wk=stride_weights[1], stride_ot=dim_d,
        BLOCK_D=_BLOCK_D, **rows.arguments(device),
    )  # fmt: skip


def decode_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts | QuantizedExperts,
    spec: ActivationSpec,
    device: GpuLimits | None = None,
) -> Tensor:
    """The routed feed-forward of at most `MAX_TOKENS` tokens, without a backward pass.

    Ids of no expert add nothing, and a token may name an expert twice. Weights have any strides, or
    are packed. `device` overrides the limits that the kernels must fit.
    """
    products = DecodeProducts(x_TD, ids_TK, weights_TK, experts.num_experts, device)
    products.add(experts, spec)
    return products.sums(experts.slot_of_expert)


class DecodeProducts:
    """`decode_expert_mlp` of experts that arrive a few at a time, each once.

    Each expert's rows have programs of their own and are summed at the end in the order of a
    token's choices, so the bits do not depend on the arrival order.
    """

    def __init__(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        device: GpuLimits | None = None,
    ) -> None:
        self._x_TD, self._weights_TK = x_TD, weights_TK
        self._ids_TK = ids_TK.contiguous()
        self._device = device or describe_device(x_TD.device)
        self._num_experts = num_experts
        self._hidden = self._partial = None
        self._given: list[tuple[Tensor, Tensor]] = []
        self._dim = x_TD.shape[1]

    def add(self, experts: StackedExperts | QuantizedExperts, spec: ActivationSpec) -> None:
        """Computes the rows of the experts that have a slot."""
        x_TD, num_slots = self._x_TD, self._ids_TK.numel()
        matrix, bias_SZ, up, down = experts.products()
        self._dim, dim_f = down.shape[1:]
        if not num_slots or not self._dim:
            return
        if self._hidden is None:
            self._hidden = x_TD.new_empty(num_slots, dim_f)
        rows, places = self._rows(experts.slot_of_expert)
        product, operands = self._product(matrix, up and up[0], bias_SZ, dim_f, x_TD.shape[1])
        distances = None
        if not isinstance(matrix, Tensor):
            # packed weights of up are a separate tensor, unless there is no gate
            distances = 0, 0
            if up is not None:
                to_bias = 0 if up[1] is None else distance(operands["bias_ptr"], up[1])
                distances = distance(matrix.codes, codes_of(up[0])), to_bias
        prepared = _prepare_up(rows, product, x_TD.stride(), distances, spec, experts.layout)
        x_TD = x_TD.contiguous() if product.is_row else x_TD
        prepared(x_ptr=x_TD, hidden_ptr=self._hidden, **places, **operands)

        given_parts = None if self._partial is None else len(self._partial)
        product, operands = self._product(
            down, None, experts.down_bias, self._dim, dim_f, is_whole=given_parts in (None, 1)
        )
        prepared, num_parts = _prepare_down(rows, product, given_parts)
        if self._partial is None:
            self._partial = x_TD.new_empty(num_parts, num_slots, self._dim, dtype=torch.float32)
        prepared(hidden_ptr=self._hidden, partial_ptr=self._partial, **places, **operands)

    def _product(
        self,
        weight: Weights,
        up: Weights | None,
        bias: Tensor | None,
        dim_n: int,
        dim_k: int,
        *,
        is_whole: bool = True,
    ) -> tuple[_Product, dict[str, Tensor]]:
        """A product and its tensors; `is_whole` unless it is summed in parts."""
        codes, x_TD = codes_of(weight), self._x_TD
        tensors = {"weight_ptr": codes, "bias_ptr": codes[:, :, 0] if bias is None else bias}
        is_row = len(x_TD) == 1 and is_whole and codes.shape[2] > 0
        if not isinstance(weight, Tensor):
            is_row = is_row and x_TD.data_ptr() % 4 == 0
            is_row = is_row and all(map(has_word_rows, (weight, weight if up is None else up)))
        elif codes.stride(2) != 1:
            is_row = False
        packed = packed_arguments(weight, up, x_TD)
        for name in ("scales_ptr", "zeros_ptr", "global_ptr"):
            tensors[name] = packed.pop(name)
        shape = (dim_n, dim_k, codes.stride(), tensors["bias_ptr"].stride(), bias is not None)
        kind = self._device, precision_of(x_TD), x_TD.dtype
        return _Product(*kind, *shape, tuple(packed.items()), is_row), tensors

    def _rows(self, slot_of_expert: Tensor | None) -> tuple[_Rows, dict[str, Tensor]]:
        ids_TK = self._ids_TK
        slots = ids_TK if slot_of_expert is None else slot_of_expert
        numbers = _Rows(len(ids_TK), self._num_experts, ids_TK.shape[1], slots is not ids_TK)
        return numbers, {"ids_ptr": ids_TK, "slots_ptr": slots}

    def give(self, rows_N: Tensor, y_ND: Tensor) -> None:
        """Takes rows that were computed elsewhere, of experts that are never added here.

        `rows_N` are indices in the flattened ids; `y_ND` is not yet weighted.
        """
        self._dim = y_ND.shape[1]
        if self._partial is None:
            self._given.append((rows_N, y_ND))
        else:  # at once: rows left over after an interrupt would belong to the next replay
            self._put(self._partial, rows_N, y_ND)

    def _put(self, partial: Tensor, rows_N: Tensor, y_ND: Tensor) -> None:
        rows_N = rows_N.long()
        if len(partial) > 1:
            partial[1:].index_fill_(1, rows_N, 0.0)
        partial[0].index_copy_(0, rows_N, y_ND.float())

    def sums(self, slot_of_expert: Tensor | None = None) -> Tensor:
        """The output, after adding every named expert that has a slot in this table."""
        if self._partial is None and self._given:
            shape = 1, self._ids_TK.numel(), self._dim
            self._partial = self._x_TD.new_empty(shape, dtype=torch.float32)
        partial, weights_TK = self._partial, self._weights_TK
        out_TD = self._x_TD.new_empty(len(self._x_TD), self._dim)
        if partial is None:
            return out_TD.zero_()
        for given in self._given:
            self._put(partial, *given)
        rows, places = self._rows(slot_of_expert)
        prepared = _prepare_sums(rows, self._device, len(partial), self._dim, weights_TK.stride())
        prepared(partial_ptr=partial, weights_ptr=weights_TK, out_ptr=out_TD, **places)
        return out_TD
