"""The CPU path: the C kernels for experts with few rows, torch's products for many.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, n rows of one expert, D model, F hidden,
Z = 2F with a gate and F without.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_runtime.kernels.decode_step.prepared import call_kernel
from moe_runtime.kernels.expert_mlp.expert_weights import ExpertShape
from moe_runtime.kernels.expert_mlp.experts import PackedExperts, StackedExperts
from moe_runtime.kernels.expert_mlp.products import NativeProducts
from moe_runtime.kernels.expert_mlp.rows import RoutedBatch, groups
from moe_runtime.kernels.expert_mlp.torch_path import Call, TorchPath, TorchSteps
from moe_runtime.kernels.native import ACTIVATION_CODES, DTYPE_CODES, NativeLibrary, require_native
from moe_runtime.kernels.native.pages import with_huge_pages
from moe_runtime.kernels.operands import ActivationSpec, GateLayout


class NativeSteps(TorchSteps):
    """The steps between the products in C, and the products for few rows."""

    def __init__(self, library: NativeLibrary, activation: ActivationSpec) -> None:
        super().__init__(activation)
        self._library = library
        self._shares_threads = library.shares_threads()
        numbers = activation.numbers()
        self._formula = (ctypes.c_float * len(numbers))(*numbers)

    def products(self, dtype: torch.dtype) -> NativeProducts:
        return NativeProducts(self._library, dtype)

    def gather(self, source_TD: Tensor, tokens_n: Tensor, out_nD: Tensor) -> Tensor:
        self._library.gather_rows(
            source_TD.data_ptr(),
            source_TD.stride(0) * source_TD.element_size(),
            source_TD.shape[1],
            DTYPE_CODES[source_TD.dtype],
            tokens_n.data_ptr(),
            len(tokens_n),
            out_nD.data_ptr(),
            DTYPE_CODES[out_nD.dtype],
            self._shares_threads,
        )
        return out_nD

    def activate(
        self, z_nZ: Tensor, layout: GateLayout, hidden_nF: Tensor, kept_nZ: Tensor | None = None
    ) -> None:
        self._gate(z_nZ, layout, hidden_nF, kept_nZ=kept_nZ)

    def activate_backward(
        self,
        z_nZ: Tensor,
        layout: GateLayout,
        hidden_nF: Tensor,
        weights_n: Tensor | None,
        grad_z_nZ: Tensor,
    ) -> Tensor:
        weights_grad_n = torch.empty(len(z_nZ), dtype=torch.float32)
        backward = (grad_z_nZ, weights_n, weights_grad_n)
        self._gate(z_nZ, layout, hidden_nF, backward=backward)
        return weights_grad_n

    def add_rows(
        self, sums_TD: Tensor, tokens_n: Tensor, rows_nD: Tensor, weights_n: Tensor | None
    ) -> None:
        self._library.add_rows(
            sums_TD.data_ptr(),
            sums_TD.shape[1],
            tokens_n.data_ptr(),
            rows_nD.data_ptr(),
            len(rows_nD),
            _address(weights_n),
            DTYPE_CODES[rows_nD.dtype],
            self._shares_threads,
        )

    def _gate(
        self,
        z_nZ: Tensor,
        layout: GateLayout,
        hidden_nF: Tensor,
        *,
        kept_nZ: Tensor | None = None,
        backward: tuple[Tensor | None, ...] = (None, None, None),
    ) -> None:
        """Either pass; `backward` is the gradient of `z`, the gate weights, and their gradient."""
        self._library.gate(
            z_nZ.data_ptr(),
            z_nZ.stride(0) * z_nZ.element_size(),
            len(z_nZ),
            hidden_nF.shape[1],
            *layout,
            DTYPE_CODES[z_nZ.dtype],
            DTYPE_CODES[hidden_nF.dtype],
            ACTIVATION_CODES[self._activation.function],
            self._activation.is_plain,
            self._formula,
            _address(kept_nZ),
            DTYPE_CODES[z_nZ.dtype if kept_nZ is None else kept_nZ.dtype],
            hidden_nF.data_ptr(),
            *(_address(tensor) for tensor in backward),
            self._shares_threads,
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativePath(TorchPath):
    """The implementation `native`."""

    def __init__(self) -> None:
        self._library = require_native()

    def steps(self, activation: ActivationSpec) -> NativeSteps:
        return NativeSteps(self._library, activation)

    def infer(self, batch: RoutedBatch) -> Tensor:
        """Experts with few rows in one call of the C kernel, then the others."""
        x_TD, weights_TK, experts = batch.x_TD, batch.weights_TK, batch.experts
        if isinstance(experts, PackedExperts) or weights_TK is None:
            return super().infer(batch)
        found = list(groups(batch.rows, experts))
        limit = 0
        if _fits_kernel(experts, batch.activation):
            limit = NativeProducts(self._library, experts.dtype).row_limit
        few = [group for group in found if group.num_rows <= limit]
        many = [group for group in found if group.num_rows > limit]
        steps = self.steps(batch.activation)
        call = Call(x_TD, weights_TK, batch.rows, many, steps)
        call.begin_forward(x_TD.new_empty(0))
        if few:
            order_N = torch.cat([batch.rows.order_R[group.rows] for group in few])
            tokens_N = order_N // batch.num_choices
            x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
            dim_d = experts.dim_model
            y_ND = with_huge_pages(x_TD.new_empty(len(tokens_N), dim_d))
            call_kernel(
                self._library, x_TD, _records([group.slot for group in few], experts).tobytes(),
                [group.num_rows for group in few], tokens_N, torch.arange(len(tokens_N)), y_ND,
                shape=ExpertShape(dim_d, experts.dim_hidden, dim_d, experts.dtype),
                activation=batch.activation.function,
            )  # fmt: skip
            weights_N = weights_TK.flatten()[order_N].float()
            steps.add_rows(call.sums_TD, tokens_N, y_ND, weights_N)
        for group in many:
            call.forward(group, experts.one(group.slot))
        return call.sums()


def _fits_kernel(experts: StackedExperts, activation: ActivationSpec) -> bool:
    """Whether the C kernel of whole experts can read these in place."""
    unit_stride = all(t.stride(-1) == 1 for t in experts.tensors() if t is not None)
    biases_apart = experts.is_concatenated or experts.gate_up_bias is None or not experts.has_gate
    return not experts.is_transposed and unit_stride and biases_apart and activation.is_plain


def _records(slots: Sequence[int], experts: StackedExperts) -> np.ndarray:
    """The C structs `Expert` of some slots: three matrices of four words, three biases of two."""
    gate_up, down, gate_up_bias, down_bias = experts.tensors()
    size = gate_up.element_size()
    slots_N = np.array(slots, dtype=np.int64)
    structs = np.zeros((len(slots), 18), dtype=np.int64)
    row = gate_up.stride(1) * size
    first = gate_up.data_ptr() + slots_N * (gate_up.stride(0) * size)
    if experts.has_gate:
        structs[:, 0] = first
        structs[:, 1] = structs[:, 5] = row if experts.is_concatenated else 2 * row
        first = first + (experts.dim_hidden * row if experts.is_concatenated else row)
    else:
        structs[:, 5] = row
    structs[:, 4] = first
    structs[:, 8] = down.data_ptr() + slots_N * (down.stride(0) * size)
    structs[:, 9] = down.stride(1) * size
    if gate_up_bias is not None:
        bias = gate_up_bias.data_ptr() + slots_N * (gate_up_bias.stride(0) * size)
        if experts.has_gate:
            structs[:, 12] = bias
            bias = bias + experts.dim_hidden * size
        structs[:, 14] = bias
    if down_bias is not None:
        structs[:, 16] = down_bias.data_ptr() + slots_N * (down_bias.stride(0) * size)
    structs[:, 13::2] = size
    return structs
