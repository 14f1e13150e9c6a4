"""One matrix product per expert, in torch operations, on any device; forward and backward.

The backward pass needs the input, the pre-activations and the routing only. It makes no copy of all
routed rows: rows are gathered, multiplied and summed expert by expert, in memory that one expert
leaves to the next.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, n rows of one expert, D model, F hidden,
Z = 2F with a gate and F without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import (
    OneExpert,
    PackedExperts,
    RoutedExperts,
    StackedExperts,
)
from moe_runtime.kernels.expert_mlp.rows import (
    Gradients,
    Group,
    Needs,
    RoutedBatch,
    SortedRows,
    groups,
    sort_rows,
)
from moe_runtime.kernels.expert_mlp.steps import TorchSteps
from moe_runtime.kernels.native.pages import untouched_zeros, with_huge_pages
from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.operands.activation import ActivationSpec

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.parameter_gradients import ParameterGradients


class TorchPath:
    """The implementation `torch`.

    Args:
        steps: The operations of one expert.
    """

    def __init__(self, steps: TorchSteps | None = None) -> None:
        self.steps = steps or TorchSteps()

    def infer(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        experts: RoutedExperts,
        activation: ActivationSpec,
    ) -> Tensor:
        """As `Path.infer`."""
        rows = sort_rows(ids_TK, experts.num_experts)
        batch = RoutedBatch(x_TD, weights_TK, rows, experts, activation)
        return self.forward(batch, keeps=False)[0]

    def forward(self, batch: RoutedBatch, *, keeps: bool) -> tuple[Tensor, Tensor]:
        """As `Path.forward`; experts of several widths keep their pre-activations ``[R * Z]``."""
        x_TD, experts = batch.x_TD, batch.experts
        call, pairs = self._call(batch)
        if isinstance(experts, PackedExperts):
            kept = x_TD.new_empty(call.num_kept if keeps else 0)
        else:
            kept = x_TD.new_empty(batch.num_rows if keeps else 0, experts.dim_preactivation)
        kept = with_huge_pages(kept)
        sums_TD = call.new_sums()
        for group, one in pairs:
            call.run_forward(group, one, kept, sums_TD)
        return sums_TD.to(x_TD.dtype), kept

    def backward(
        self,
        grad_TD: Tensor,
        batch: RoutedBatch,
        kept: Tensor,
        *,
        needs: Needs,
        parameter_gradients: ParameterGradients | None = None,
    ) -> Gradients:
        """As `Path.backward`."""
        x_TD, weights_TK, experts = batch.x_TD, batch.weights_TK, batch.experts
        call, pairs = self._call(batch)
        grad_TD = grad_TD.to(x_TD.dtype).contiguous()
        sums_TD = call.new_sums() if needs.x else x_TD.new_empty(0)
        into, slots = None, experts.slot_of_expert
        if parameter_gradients is not None:
            into, slots = parameter_gradients.into, parameter_gradients.trained_slots(experts)
        trained = set(range(experts.num_experts) if slots is None else slots.tolist())
        tensors = experts.tensors()
        parameters = tuple(
            x_TD.new_empty(0)
            if not need or tensor is None
            else untouched_zeros(tensor)
            if given is None
            else given
            for tensor, need, given in zip(
                tensors, needs.parameters, into or (None,) * len(tensors), strict=True
            )
        )
        gradients = Gradients(sums_TD, torch.zeros_like(call.weights_R), parameters)
        # Slots whose gradients something was written to.
        used: set[int] = set() if into is None else set(trained)
        frozen = needs._replace(parameters=(False,) * len(tensors))
        for group, one in pairs:
            needed = needs if group.slot in trained else frozen
            is_first = group.slot not in used
            call.run_backward(
                group, experts, one, grad_TD, kept, gradients, needed, is_first=is_first
            )
            used.add(group.slot)
        weights_grad = x_TD.new_empty(0)
        if needs.weights and weights_TK is not None:
            weights_grad = unsorted(gradients.weights, batch.rows, weights_TK)
        return gradients._replace(x=sums_TD.to(x_TD.dtype), weights=weights_grad)

    def _call(self, batch: RoutedBatch) -> tuple[Call, list[tuple[Group, OneExpert]]]:
        """The call, and the experts that have rows, in order."""
        found = list(groups(batch.rows, batch.experts))
        pairs = [(group, batch.experts.one(group.slot)) for group in found]
        call = Call(batch.x_TD, batch.weights_TK, batch.rows, found, batch.activation, self.steps)
        if isinstance(batch.experts, PackedExperts):
            call.set_widths([one.dim_preactivation for _, one in pairs])
        return call, pairs


def unsorted(sorted_R: Tensor, rows: SortedRows, like_TK: Tensor) -> Tensor:
    """One value a sorted row, back where its slot is in ``[T, K]``."""
    values_TK = torch.empty_like(like_TK, memory_format=torch.contiguous_format)
    values_TK.view(-1)[rows.order_R] = sorted_R.to(like_TK.dtype)
    return values_TK


class Call:
    """What the experts of one call share: operands, routing, and memory used by each in turn.

    Every view that an expert needs is made before the first needs it, for all of them: between two
    products, which leave nothing of the interpreter in the processor's caches, it takes ten times
    as long.
    """

    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        rows: SortedRows,
        found: Sequence[Group],
        activation: ActivationSpec,
        steps: TorchSteps,
    ) -> None:
        """Takes what a `RoutedBatch` holds, and the experts that will have their turn."""
        self.activation = activation
        self.steps = steps
        self.products = steps.products(x_TD.dtype)
        self.x_TD = x_TD.contiguous()
        # rows of x and of the output's gradient are widened as they are gathered
        self._dtype = self.products.operand_dtype(x_TD.dtype)
        self.tokens_R: Tensor | None = None
        self.weights_R = x_TD.new_empty(0, dtype=precise_dtype(x_TD))
        if weights_TK is not None:
            self.tokens_R = rows.order_R // weights_TK.shape[1]
            self.weights_R = weights_TK.flatten().to(precise_dtype(x_TD))[rows.order_R]
        self._groups = found
        self._views: dict[str, dict[Group, Tensor]] = {}
        self._kept_places: dict[Group, slice] = {}
        self.num_kept = 0

    def set_widths(self, widths: Sequence[int]) -> None:
        """Says that experts differ in width: pre-activations are kept in one flat tensor.

        Args:
            widths: Z of each expert.
        """
        for group, width in zip(self._groups, widths, strict=True):
            first, self.num_kept = self.num_kept, self.num_kept + group.num_rows * width
            self._kept_places[group] = slice(first, self.num_kept)

    def new_sums(self) -> Tensor:
        """Zeros to add rows of width D to; rows are sorted already: zeros to write them to."""
        dtype = self._dtype if self.tokens_R is None else precise_dtype(self.x_TD)
        return self.x_TD.new_zeros(self.x_TD.shape, dtype=dtype)

    def run_forward(self, group: Group, one: OneExpert, kept: Tensor, sums_TD: Tensor) -> None:
        """One expert's outputs, added to `sums` or written there; its `z` unless that is empty."""
        z_nZ = self._preactivations(group, one, kept)
        kept_nZ = None
        if len(kept) and kept.dtype != z_nZ.dtype:
            kept_nZ = self._kept(group, kept, one)
        hidden_nF = self._buffer("hidden", group, one.dim_hidden)
        self.steps.activate(z_nZ, one, self.activation, hidden_nF, kept_nZ)
        # nothing reads the gathered rows any more, and their memory is in the cache
        y_nD = self._out_rows(group, sums_TD, "x")
        self.products.forward(hidden_nF, one.down_DF, one.down_bias, y_nD)
        self._add(group, y_nD, sums_TD, weighted=True)

    def run_backward(
        self,
        group: Group,
        experts: RoutedExperts,
        one: OneExpert,
        grad_TD: Tensor,
        kept: Tensor,
        gradients: Gradients,
        needs: Needs,
        *,
        is_first: bool,
    ) -> None:
        """One expert's part of all gradients; its own are added to unless it `is_first`.

        Args:
            group: The expert and its rows.
            experts: All experts, for their layout.
            one: Its parameters.
            grad_TD: Gradient of the output, contiguous, in the dtype of `x`.
            kept: Kept pre-activations or nothing.
            gradients: Where to; `weights` has one element a sorted row.
            needs: Which gradients.
            is_first: Whether nothing was written to this slot's gradients before.
        """
        grad_nD = self._rows(grad_TD, group, "grad")
        z_nZ, grad_z_nZ = self._kept_preactivations(group, one, kept)
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
            z_nZ, hidden_nF, weights_n, one, self.activation, grad_z_nZ
        )
        if self.tokens_R is not None:
            if one.down_bias is not None:
                weight_grad_n = weight_grad_n + grad_nD @ one.down_bias.to(grad_nD.dtype)
            self._part("grad_weights_R", gradients.weights, group).copy_(weight_grad_n)
        num_inputs = len(one.inputs)
        own = [
            experts.part(tensor, group.slot) if need else None
            for tensor, need in zip(gradients.parameters, needs.parameters, strict=True)
        ]
        down, biases, down_bias = own[num_inputs], own[num_inputs + 1 : -1], own[-1]
        rows_first = isinstance(experts, StackedExperts) and experts.is_transposed
        if down is not None:
            is_transposed = is_packed or rows_first
            sides = (hidden_nF, grad_nD) if is_transposed else (grad_nD, hidden_nF)
            self.products.outer(*sides, down, is_first=is_first)
        if down_bias is not None:
            _add_sum(grad_nD, weights_n, down_bias, is_first=is_first)
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
                _add_sum(dz_n, None, bias, is_first=is_first)
        if needs.x:
            for dz_n, matrix in zip(halves, one.inputs, strict=True):
                dx_nD = self._out_rows(group, gradients.x, "grad")
                self.products.backward(dz_n, matrix, dx_nD)
                self._add(group, dx_nD, gradients.x, weighted=False)

    def _preactivations(self, group: Group, one: OneExpert, kept: Tensor) -> Tensor:
        """Computes them, in place where they are kept as they are, else in the shared memory."""
        if len(kept) and kept.dtype == self._dtype:
            z_nZ = self._kept(group, kept, one)
        else:
            z_nZ = self._buffer("z", group, one.dim_preactivation)
        x_nD = self._rows(self.x_TD, group, "x")
        parts = _halves(z_nZ, len(one.inputs))
        for matrix, bias, part in zip(one.inputs, one.input_biases, parts, strict=True):
            self.products.forward(x_nD, matrix, bias, part)
        return z_nZ

    def _kept_preactivations(
        self, group: Group, one: OneExpert, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pre-activations with the bits that were or would have been kept; memory like them."""
        if len(kept):
            grad_z_nZ = self._buffer("z", group, one.dim_preactivation)
            return self._kept(group, kept, one), grad_z_nZ
        z_nZ = self._preactivations(group, one, kept)
        return z_nZ.to(self.x_TD.dtype), z_nZ

    def _kept(self, group: Group, kept: Tensor, one: OneExpert) -> Tensor:
        """Where one expert's kept pre-activations ``[n, Z]`` are."""
        if self._kept_places:
            return kept[self._kept_places[group]].view(-1, one.dim_preactivation)
        return self._part("z_RZ", kept, group)

    def _rows(self, source_TD: Tensor, group: Group, name: str) -> Tensor:
        """One expert's rows of tokens, or of rows that are sorted already."""
        if self.tokens_R is None and source_TD.dtype == self._dtype:
            return self._part(f"{name}_RD", source_TD, group)
        out_nD = self._buffer(name, group, source_TD.shape[1])
        if self.tokens_R is None:
            return out_nD.copy_(self._part(f"{name}_RD", source_TD, group))
        return self.steps.gather(source_TD, self._part("tokens_R", self.tokens_R, group), out_nD)

    def _out_rows(self, group: Group, sums_TD: Tensor, name: str) -> Tensor:
        """Where a product's rows go that `_add` takes: the memory of that name."""
        if self.tokens_R is None:
            return self._part("sums_RD", sums_TD, group)
        return self._buffer(name, group, sums_TD.shape[1])

    def _add(self, group: Group, rows_nD: Tensor, sums_TD: Tensor, *, weighted: bool) -> None:
        """Adds rows to their tokens; sorted rows are where they belong already."""
        if self.tokens_R is None:
            return
        weights_n = self._part("weights_R", self.weights_R, group) if weighted else None
        tokens_n = self._part("tokens_R", self.tokens_R, group)
        self.steps.add_rows(sums_TD, tokens_n, rows_nD, weights_n)

    def _part(self, name: str, rows_R: Tensor, group: Group) -> Tensor:
        """One expert's part of the sorted rows; a name stands for the same tensor all the time."""
        if name not in self._views:
            self._views[name] = {group: rows_R[group.rows] for group in self._groups}
        return self._views[name][group]

    def _buffer(self, name: str, group: Group, width: int) -> Tensor:
        """Memory that the experts of this call use one after another, ``[n, width]``."""
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
    """What each matrix of the first product gives."""
    return (z_nZ,) if num_parts == 1 else z_nZ.chunk(num_parts, dim=1)


def _add_sum(rows_nA: Tensor, weights_n: Tensor | None, out_A: Tensor, *, is_first: bool) -> None:
    rows_nA = rows_nA.to(precise_dtype(rows_nA))
    if weights_n is not None:
        rows_nA = rows_nA * weights_n[:, None]
    total = rows_nA.sum(0)
    out_A.copy_(total if is_first else total + out_A)
