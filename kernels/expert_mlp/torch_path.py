"""One matrix product per expert in torch operations, on any device; forward and backward.

The backward pass needs the input, pre-activations and routing only. Rows are gathered, multiplied
and summed expert by expert, in memory that the experts share.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, n rows of one expert, D model, F hidden,
Z = 2F with a gate and F without.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, MutableMapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from moe_runtime.kernels.expert_mlp.experts import (
    OneExpert,
    PackedExperts,
    RoutedExperts,
    StackedExperts,
)
from moe_runtime.kernels.expert_mlp.products import Products, RoundedProducts
from moe_runtime.kernels.expert_mlp.rows import (
    EVERY_GRADIENT,
    Group,
    ParameterGradients,
    RoutedBatch,
    SortedRows,
    groups,
)
from moe_runtime.kernels.native.pages import clear, is_large, untouched_zeros, with_huge_pages
from moe_runtime.kernels.operands import ActivationSpec, GateLayout, precise_dtype


class TorchSteps:
    """The operations of one expert: its products, and the steps between them."""

    def __init__(self, activation: ActivationSpec) -> None:
        self._activation = activation

    def products(self, dtype: torch.dtype) -> Products:
        return Products()

    def gather(self, source_TD: Tensor, tokens_n: Tensor, out_nD: Tensor) -> Tensor:
        """``out[i] = source[tokens[i]]``, in the dtype of `out`."""
        if source_TD.dtype == out_nD.dtype:
            return torch.index_select(source_TD, 0, tokens_n, out=out_nD)
        return out_nD.copy_(source_TD[tokens_n])

    def activate(
        self, z_nZ: Tensor, layout: GateLayout, hidden_nF: Tensor, kept_nZ: Tensor | None = None
    ) -> None:
        """Writes the hidden values of `z`, computed in fp32 or better; `kept` receives a copy of
        `z`.
        """
        if kept_nZ is not None:
            kept_nZ.copy_(z_nZ)
        gate, up = layout.split(z_nZ.to(precise_dtype(z_nZ)))
        hidden_nF.copy_(self._activation(gate, up))

    def activate_backward(
        self,
        z_nZ: Tensor,
        layout: GateLayout,
        hidden_nF: Tensor,
        weights_n: Tensor | None,
        grad_z_nZ: Tensor,
    ) -> Tensor:
        """The backward step of the activation, including the gate weight (None: one).

        `hidden` holds the gradient of the hidden values for a gate weight of one, and receives the
        hidden values times the gate weight. `grad_z`, which may be `z`, receives the gradient of
        `z`. Returns the gradient of the gate weights ``[n]`` in fp32 or better.
        """
        precise = precise_dtype(z_nZ)
        gate, up = layout.split(z_nZ.to(precise))
        grad = hidden_nF.to(precise)
        hidden = self._activation(gate, up)
        grad_weights_n = (grad * hidden).sum(1)
        if weights_n is not None:
            grad, hidden = grad * weights_n[:, None], hidden * weights_n[:, None]
        gate_grad, up_grad = self._activation.backward(gate, up, grad)
        out_gate, out_up = layout.split(grad_z_nZ)
        out_up.copy_(up_grad)
        if out_gate is not None and gate_grad is not None:
            out_gate.copy_(gate_grad)
        hidden_nF.copy_(hidden)
        return grad_weights_n

    def add_rows(
        self, sums_TD: Tensor, tokens_n: Tensor, rows_nD: Tensor, weights_n: Tensor | None
    ) -> None:
        """``sums[tokens[i]] += weights[i] * rows[i]``.

        The order is fixed even if `index_add_` uses atomics: a token occurs once among an expert's
        rows, unless it chose that expert twice.
        """
        rows_nD = rows_nD.to(sums_TD.dtype)
        if weights_n is not None:
            rows_nD = rows_nD * weights_n[:, None]
        sums_TD.index_add_(0, tokens_n, rows_nD)


class TorchPath:
    """The implementation `torch`."""

    def steps(self, activation: ActivationSpec) -> TorchSteps:
        return TorchSteps(activation)

    def infer(self, batch: RoutedBatch) -> Tensor:
        """The output ``[T, D]`` when nothing is kept for a backward pass."""
        return self.forward(batch, keeps=False)[0]

    def forward(self, batch: RoutedBatch, *, keeps: bool) -> tuple[Tensor, Tensor]:
        """The output, and the pre-activations ``[R, Z]`` of sorted rows if it `keeps` them, else
        empty.

        Without gate weights, rows of `x` are sorted by expert already and so is the output; it is
        zero after the last expert's row. Experts of several widths keep ``[R * Z]``.
        """
        x_TD, experts = batch.x_TD, batch.experts
        call, pairs = self._call(batch)
        if isinstance(experts, PackedExperts):
            kept = x_TD.new_empty(call.num_kept if keeps else 0)
        else:
            kept = x_TD.new_empty(batch.num_rows if keeps else 0, experts.dim_preactivation)
        kept = with_huge_pages(kept)
        call.begin_forward(kept)
        for group, one in pairs:
            call.forward(group, one)
        return call.sums(), kept

    def backward(
        self,
        grad_TD: Tensor,
        batch: RoutedBatch,
        kept: Tensor,
        needs: Sequence[bool],
        parameter_gradients: ParameterGradients = EVERY_GRADIENT,
    ) -> tuple[Tensor, ...]:
        """Gradients of the input, the gate weights and each of the experts' `tensors`.

        Gradients that `needs` leaves out are empty. With empty `kept`, pre-activations are computed
        again. Every element is written, zero for experts without rows, unless `parameter_gradients`
        differs.
        """
        x_TD, weights_TK, experts = batch.x_TD, batch.weights_TK, batch.experts
        call, pairs = self._call(batch)
        needs_x, needs_weights, *needed = needs
        call.begin_backward(grad_TD, kept, needs_x=needs_x)
        into, slots = parameter_gradients.into, parameter_gradients.trained_slots(experts)
        trained = set(range(experts.num_experts) if slots is None else slots.tolist())
        tensors, is_stacked = experts.tensors(), isinstance(experts, StackedExperts)
        written = trained & {group.slot for group, _ in pairs}
        found: list[Tensor | None] = list(into or (None,) * len(tensors))
        for i, (tensor, need) in enumerate(zip(tensors, needed, strict=True)):
            if not need or tensor is None:
                found[i] = None
            elif found[i] is None and is_stacked and tensor.is_contiguous():
                found[i] = gradient_memory().take(tensor, written)
            elif found[i] is None:
                found[i] = untouched_zeros(tensor)
        # Slots whose gradients something was written to.
        used: set[int] = set() if into is None else set(trained)
        for group, one in pairs:
            call.backward(
                group, experts, one, found if group.slot in trained else [None] * len(found),
                needs_x=needs_x, is_first=group.slot not in used,
            )  # fmt: skip
            used.add(group.slot)
        grad_weights = x_TD.new_empty(0)
        if needs_weights and weights_TK is not None:
            grad_weights = call.weights_grad(weights_TK)
        parameters = (x_TD.new_empty(0) if grad is None else grad for grad in found)
        return call.sums(), grad_weights, *parameters

    def _call(self, batch: RoutedBatch) -> tuple[Call, list[tuple[Group, OneExpert]]]:
        """The call, and the experts that have rows, in order."""
        found = list(groups(batch.rows, batch.experts))
        pairs = [(group, batch.experts.one(group.slot)) for group in found]
        steps = self.steps(batch.activation)
        call = Call(batch.x_TD, batch.weights_TK, batch.rows, found, steps)
        if batch.experts.dtype != batch.x_TD.dtype:
            call.products = RoundedProducts(call.products, batch.x_TD.dtype)
        if isinstance(batch.experts, PackedExperts):
            call.set_widths([one.dim_preactivation for _, one in pairs])
        return call, pairs


class Call:
    """The operands, routing and shared memory of one call.

    Views for all experts are made before the first product: between two products, which evict the
    interpreter from the processor's caches, making one takes ten times as long.
    """

    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        rows: SortedRows,
        found: Sequence[Group],
        steps: TorchSteps,
    ) -> None:
        self.steps = steps
        self.products: Products = steps.products(x_TD.dtype)
        self.x_TD = x_TD.contiguous()
        # rows of x and of the output's gradient are widened as they are gathered
        self._dtype = self.products.operand_dtype(x_TD.dtype)
        self.tokens_R: Tensor | None = None
        self.weights_R = x_TD.new_empty(0, dtype=precise_dtype(x_TD))
        if weights_TK is not None:
            self.tokens_R = rows.order_R // weights_TK.shape[1]
            self.weights_R = weights_TK.flatten().to(precise_dtype(x_TD))[rows.order_R]
        self._order_R = rows.order_R
        self._groups = found
        self._views: dict[str, dict[Group, Tensor]] = {}
        self._kept_places: dict[Group, slice] = {}
        self.num_kept = 0
        self.sums_TD = self._kept = self._grad_TD = self._weights_grad_R = x_TD.new_empty(0)

    def set_widths(self, widths: Sequence[int]) -> None:
        """Takes Z of each expert, where it differs: one flat tensor keeps all pre-activations."""
        for group, width in zip(self._groups, widths, strict=True):
            first, self.num_kept = self.num_kept, self.num_kept + group.num_rows * width
            self._kept_places[group] = slice(first, self.num_kept)

    def begin_forward(self, kept: Tensor) -> None:
        """Allocates the output; `kept` receives pre-activations unless it is empty."""
        self._kept, self.sums_TD = kept, self._new_sums()

    def forward(self, group: Group, one: OneExpert) -> None:
        """Adds one expert's outputs to `sums_TD`, or writes them there."""
        kept, z_nZ = self._kept, self._preactivations(group, one)
        kept_nZ = None
        if len(kept) and kept.dtype != z_nZ.dtype:
            kept_nZ = self._kept_rows(group, one)
        hidden_nF = self._buffer("hidden", group, one.dim_hidden)
        self.steps.activate(z_nZ, one.layout, hidden_nF, kept_nZ)
        # nothing reads the gathered rows any more, and their memory is in the cache
        y_nD = self._out_rows(group, "x")
        self.products.forward(hidden_nF, one.down_DF, one.down_bias, y_nD)
        self._add(group, y_nD, weighted=True)

    def sums(self) -> Tensor:
        """``[T, D]`` in the dtype of `x`: the output, or the gradient of `x`."""
        return self.sums_TD.to(self.x_TD.dtype)

    def begin_backward(self, grad_TD: Tensor, kept: Tensor, *, needs_x: bool = True) -> None:
        """Takes the output's gradient and the kept pre-activations (empty: computed again)."""
        self._kept = kept
        self._grad_TD = grad_TD.to(self.x_TD.dtype).contiguous()
        self.sums_TD = self._new_sums() if needs_x else self.x_TD.new_empty(0)
        self._weights_grad_R = torch.zeros_like(self.weights_R)

    def weights_grad(self, like_TK: Tensor) -> Tensor:
        """The gradient of the gate weights, moved from sorted rows to their slots."""
        values_TK = torch.empty_like(like_TK, memory_format=torch.contiguous_format)
        values_TK.view(-1)[self._order_R] = self._weights_grad_R.to(like_TK.dtype)
        return values_TK

    def backward(
        self,
        group: Group,
        experts: RoutedExperts,
        one: OneExpert,
        parameters: Sequence[Tensor | None],
        *,
        needs_x: bool,
        is_first: bool,
    ) -> None:
        """One expert's part of all gradients.

        Gradients of the experts' `tensors` go to `parameters` (None: not needed). They are
        accumulated unless this `is_first` to write to the slot.
        """
        grad_nD = self._rows(self._grad_TD, group, "grad")
        z_nZ, grad_z_nZ = self._kept_preactivations(group, one)
        hidden_nF = self._buffer("hidden", group, one.dim_hidden)
        is_packed = isinstance(experts, PackedExperts)
        if is_packed:
            # the matrix lies as this product reads it, where rows are few in C
            self.products.forward(grad_nD, one.down_DF.T, None, hidden_nF)
        else:
            self.products.backward(grad_nD, one.down_DF, hidden_nF)
        weights_n = None
        if self.tokens_R is not None:
            weights_n = self._part("weights_R", self.weights_R, group)
        weight_grad_n = self.steps.activate_backward(
            z_nZ, one.layout, hidden_nF, weights_n, grad_z_nZ
        )
        if self.tokens_R is not None:
            if one.down_bias is not None:
                # rounded as in the forward pass, whatever products are widened to
                bias_D = one.down_bias.to(self.x_TD.dtype).to(grad_nD.dtype)
                weight_grad_n = weight_grad_n + grad_nD @ bias_D
            self._part("weights_grad_R", self._weights_grad_R, group).copy_(weight_grad_n)
        num_inputs = len(one.inputs)
        own = [
            None if tensor is None else experts.part(tensor, group.slot) for tensor in parameters
        ]
        down, biases, down_bias = own[num_inputs], own[num_inputs + 1 : -1], own[-1]
        rows_first = isinstance(experts, StackedExperts) and experts.is_transposed
        if down is not None:
            is_transposed = is_packed or rows_first
            sides = (hidden_nF, grad_nD) if is_transposed else (grad_nD, hidden_nF)
            self.products.outer(*sides, down, is_first=is_first)
        if down_bias is not None:
            _add_sum(grad_nD, weights_n, down_bias, self.x_TD.dtype, is_first=is_first)
        halves = _halves(grad_z_nZ, num_inputs)
        inputs = own[:num_inputs]
        if any(matrix is not None for matrix in inputs):
            x_nD = self._rows(self.x_TD, group, "x")
            for dz_n, matrix in zip(halves, inputs, strict=True):
                if matrix is not None:
                    sides = (x_nD, dz_n) if rows_first else (dz_n, x_nD)
                    self.products.outer(*sides, matrix, is_first=is_first)
        for dz_n, bias in zip(halves, biases, strict=True):
            if bias is not None:
                _add_sum(dz_n, None, bias, self.x_TD.dtype, is_first=is_first)
        if needs_x:
            for dz_n, matrix in zip(halves, one.inputs, strict=True):
                dx_nD = self._out_rows(group, "grad")
                self.products.backward(dz_n, matrix, dx_nD)
                self._add(group, dx_nD, weighted=False)

    def _new_sums(self) -> Tensor:
        dtype = self._dtype if self.tokens_R is None else precise_dtype(self.x_TD)
        return self.x_TD.new_zeros(self.x_TD.shape, dtype=dtype)

    def _preactivations(self, group: Group, one: OneExpert) -> Tensor:
        """Computes them where they are kept, or in shared memory."""
        if len(self._kept) and self._kept.dtype == self._dtype:
            z_nZ = self._kept_rows(group, one)
        else:
            z_nZ = self._buffer("z", group, one.dim_preactivation)
        x_nD = self._rows(self.x_TD, group, "x")
        parts = _halves(z_nZ, len(one.inputs))
        for matrix, bias, part in zip(one.inputs, one.input_biases, parts, strict=True):
            self.products.forward(x_nD, matrix, bias, part)
        return z_nZ

    def _kept_preactivations(self, group: Group, one: OneExpert) -> tuple[Tensor, Tensor]:
        """Pre-activations with the bits that a forward pass keeps, and memory for their
        gradient.
        """
        if len(self._kept):
            grad_z_nZ = self._buffer("z", group, one.dim_preactivation)
            return self._kept_rows(group, one), grad_z_nZ
        z_nZ = self._preactivations(group, one)
        return z_nZ.to(self.x_TD.dtype), z_nZ

    def _kept_rows(self, group: Group, one: OneExpert) -> Tensor:
        if self._kept_places:
            return self._kept[self._kept_places[group]].view(-1, one.dim_preactivation)
        return self._part("z_RZ", self._kept, group)

    def _rows(self, source_TD: Tensor, group: Group, name: str) -> Tensor:
        """One expert's rows, gathered by token or already sorted."""
        if self.tokens_R is None and source_TD.dtype == self._dtype:
            return self._part(f"{name}_RD", source_TD, group)
        out_nD = self._buffer(name, group, source_TD.shape[1])
        if self.tokens_R is None:
            return out_nD.copy_(self._part(f"{name}_RD", source_TD, group))
        return self.steps.gather(source_TD, self._part("tokens_R", self.tokens_R, group), out_nD)

    def _out_rows(self, group: Group, name: str) -> Tensor:
        """Memory for a product's rows that `_add` takes."""
        if self.tokens_R is None:
            return self._part("sums_RD", self.sums_TD, group)
        return self._buffer(name, group, self.sums_TD.shape[1])

    def _add(self, group: Group, rows_nD: Tensor, *, weighted: bool) -> None:
        """Adds rows to their tokens; sorted rows are in place already."""
        if self.tokens_R is None:
            return
        weights_n = self._part("weights_R", self.weights_R, group) if weighted else None
        tokens_n = self._part("tokens_R", self.tokens_R, group)
        self.steps.add_rows(self.sums_TD, tokens_n, rows_nD, weights_n)

    def _part(self, name: str, rows_R: Tensor, group: Group) -> Tensor:
        """One expert's part of the sorted rows; a name always means the same tensor."""
        if name not in self._views:
            self._views[name] = {group: rows_R[group.rows] for group in self._groups}
        return self._views[name][group]

    def _buffer(self, name: str, group: Group, width: int) -> Tensor:
        """Memory ``[n, width]`` that the experts of this call share."""
        if self._kept_places:
            return self.x_TD.new_empty(group.num_rows, width, dtype=self._dtype)
        if name not in self._views:
            sizes = {group: group.num_rows for group in self._groups}
            flat = self.x_TD.new_empty(max(sizes.values()) * width, dtype=self._dtype)
            self._views[name] = {
                group: flat[: size * width].view(size, width) for group, size in sizes.items()
            }
        return self._views[name][group]


def _halves(z_nZ: Tensor, num_parts: int) -> tuple[Tensor, ...]:
    return (z_nZ,) if num_parts == 1 else z_nZ.chunk(num_parts, dim=1)


def _add_sum(
    rows_nA: Tensor, weights_n: Tensor | None, out_A: Tensor, dtype: torch.dtype, *, is_first: bool
) -> None:
    rows_nA = rows_nA.to(precise_dtype(rows_nA))
    if weights_n is not None:
        rows_nA = rows_nA * weights_n[:, None]
    total = rows_nA.sum(0)
    if out_A.dtype != dtype:
        total = total.to(dtype)  # as the matrices' gradients are
    out_A.copy_(total if is_first else total + out_A)


class _Kept(NamedTuple):
    bytes: Any
    holder: StorageWeakRef


class GradientMemory:
    """The memory of one gradient per large parameter, as long as the parameter lives.

    A layer's gradient is as large as the layer, and the first touch of fresh memory takes as long
    as filling it. Once the last gradient is freed, as after `zero_grad(set_to_none=True)`, the next
    one reuses its memory.
    """

    def __init__(self) -> None:
        self._kept: MutableMapping[Tensor, _Kept] = WeakTensorKeyDictionary()
        self._lock = threading.Lock()

    def take(self, parameter: Tensor, written: Collection[int]) -> Tensor:
        """A gradient of a parameter ``[E, ...]``, zero except for the experts that will be
        `written`.

        A view shares the memory of its base.
        """
        if not is_large(parameter):
            return untouched_zeros(parameter)
        owner = parameter if parameter._base is None else parameter._base
        with self._lock:
            last = self._kept.get(owner)
            if last is not None and not last.holder.expired():
                return untouched_zeros(parameter)  # the last gradient is still in use
            if last is not None and last.bytes.nbytes == parameter.nbytes:
                memory, is_stale = last.bytes, True
            else:
                memory, is_stale = untouched_zeros(parameter).view(torch.uint8).numpy(), False
            gradient = torch.from_numpy(memory).view(parameter.dtype).view(parameter.shape)
            self._kept[owner] = _Kept(memory, StorageWeakRef(gradient.untyped_storage()))
        if is_stale:
            for is_written, run in groupby(range(len(gradient)), key=set(written).__contains__):
                first, *others = run
                if not is_written:
                    clear(gradient[first : first + 1 + len(others)])
        return gradient


@functools.cache
def gradient_memory() -> GradientMemory:
    """The one of this process."""
    return GradientMemory()
