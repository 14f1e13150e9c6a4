"""`expert_mlp` of experts that stay quantised: from codes as they lie, on a CPU and on a GPU.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, S slots, E experts, D model, F hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights
from moe_runtime.kernels.expert_mlp.experts import StackedExperts, ids_in_slots
from moe_runtime.kernels.expert_mlp.operators import call, resolve_path, wants_gradient
from moe_runtime.kernels.expert_mlp.rows import groups_between, sort_rows
from moe_runtime.kernels.expert_mlp.separate_experts import expert_ffn
from moe_runtime.kernels.operands import check_shape, without_autocast
from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.kernels.quantized import QuantizedStack


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedExperts:
    """Matrices as they lie in a checkpoint or a slab, and biases of one floating dtype.

    Gate and up that one tensor holds are its `halves()`, or `alternating()` rows.

    Attributes:
        gate: ``[S, F, D]``, or None for experts without a gate.
        up: ``[S, F, D]``.
        down: ``[S, D, F]``.
        gate_bias: ``[S, F]`` or None, as `up_bias` is.
        up_bias: ``[S, F]``, at any strides, or None.
        down_bias: ``[S, D]`` or None.
        slot_of_expert: ``[E]`` integers: the slot that each expert lies in, below 0 for one that
            takes no part. None means that expert ``e`` lies in slot ``e``.
    """

    gate: QuantizedStack | None
    up: QuantizedStack
    down: QuantizedStack
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    slot_of_expert: Tensor | None = None

    def __post_init__(self) -> None:
        """Checks that the parts belong together; looks at shapes only.

        Raises:
            ValueError: Shapes or devices do not fit each other.
        """
        num_slots, dim_hidden, dim_model = self.up.shape
        stacks = {"gate": self.gate, "up": self.up, "down": self.down}
        for name, stack in stacks.items():
            shape = (dim_model, dim_hidden) if name == "down" else (dim_hidden, dim_model)
            if stack is not None and (
                stack.shape != (num_slots, *shape) or stack.device != self.device
            ):
                raise ValueError(
                    f"{name} must be {[num_slots, *shape]} on {self.device} for up "
                    f"{list(self.up.shape)}, got {list(stack.shape)} on {stack.device}"
                )
        if self.gate is not None and (self.gate_bias is None) != (self.up_bias is None):
            raise ValueError("gate and up both have a bias, or neither has")
        if self.gate is None and self.gate_bias is not None:
            raise ValueError("gate_bias is given, and gate is not")
        self._check_biases(dim_hidden, dim_model)
        slots = self.slot_of_expert
        if slots is not None and (slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"slot_of_expert must be [E] of int32 or int64, got {list(slots.shape)} of "
                f"{slots.dtype}"
            )

    def _check_biases(self, dim_hidden: int, dim_model: int) -> None:
        dims = {"gate_bias": dim_hidden, "up_bias": dim_hidden, "down_bias": dim_model}
        for name, dim in dims.items():
            bias: Tensor | None = getattr(self, name)
            if bias is None:
                continue
            check_shape(name, bias, [self.up.shape[0], dim])
            if bias.device != self.device:
                raise ValueError(f"{name} must be on {self.device}, got {bias.device}")
        biases = [getattr(self, name) for name in dims]
        dtypes = {bias.dtype for bias in biases if bias is not None}
        if len(dtypes) > 1:
            raise ValueError(f"biases must have one dtype, got {dtypes}")
        strides = {bias.stride() for bias in (self.gate_bias, self.up_bias) if bias is not None}
        if len(strides) > 1:
            raise ValueError("biases of gate and up must have equal strides")

    @property
    def num_experts(self) -> int:
        """Experts that ids may name."""
        return self.up.shape[0] if self.slot_of_expert is None else self.slot_of_expert.shape[0]

    @property
    def dim_model(self) -> int:
        return self.up.num_cols

    @property
    def dim_hidden(self) -> int:
        return self.up.shape[1]

    @property
    def device(self) -> torch.device:
        return self.up.device

    @property
    def layout(self) -> GateLayout:
        """Of pre-activations: those of gates come before those of up."""
        return GateLayout(self.gate is not None)

    def named(self, ids_TK: Tensor) -> Tensor:
        """Ids, -1 where their expert takes no part."""
        return ids_in_slots(ids_TK, self.slot_of_expert)

    def weights(self, slot: int) -> ExpertWeights:
        """Views of everything in one slot."""
        gate = None if self.gate is None else self.gate.matrix(slot)
        biases = (
            None if bias is None else bias[slot]
            for bias in (self.gate_bias, self.up_bias, self.down_bias)
        )
        return ExpertWeights(gate, self.up.matrix(slot), self.down.matrix(slot), *biases)

    def widened(self, ids_TK: Tensor, dtype: torch.dtype) -> StackedExperts:
        """The values of the experts that some id names, in memory of their own.

        Args:
            ids_TK: As `named` gives them; waits for the device to learn whom they name.
            dtype: Of the values.
        """
        used_U, places_E = self._used(ids_TK)

        def bias(*parts: Tensor | None) -> Tensor | None:
            some = [part[used_U].to(dtype) for part in parts if part is not None]
            return torch.cat(some, dim=1) if some else None

        inputs = [stack for stack in (self.gate, self.up) if stack is not None]
        return StackedExperts(
            gate_up=torch.cat([stack.dequantize(used_U, dtype) for stack in inputs], dim=1),
            down=self.down.dequantize(used_U, dtype),
            gate_up_bias=bias(self.gate_bias, self.up_bias),
            down_bias=bias(self.down_bias),
            has_gate=self.gate is not None,
            slot_of_expert=places_E,
        )

    def _used(self, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of the experts that are used, and the place of every expert among them."""
        num_experts = self.num_experts
        slots_E = torch.arange(num_experts, device=self.device)
        if self.slot_of_expert is not None:
            slots_E = self.slot_of_expert.long()
        if torch.compiler.is_compiling():
            # the compiler needs shapes that do not depend on the routing
            return slots_E.clamp(min=0), torch.arange(num_experts, device=self.device)
        used_U = torch.unique(ids_TK)
        used_U = used_U[(used_U >= 0) & (used_U < num_experts)].long()
        places_E = torch.zeros(num_experts, dtype=torch.int64, device=self.device)
        places_E[used_U] = torch.arange(len(used_U), device=self.device)
        return slots_E[used_U], places_E


def quantized_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
    *,
    impl: str,
) -> Tensor:
    """The implementations of `expert_mlp`, whose arguments are checked already.

    Products read codes as they lie, and no weight is rounded: on a GPU by Triton, whatever the
    number of rows, on a CPU as in `expert_ffn`. Gradients of `x` and `weights` are those of the
    values, rounded to the dtype of `x`, of the experts that are used; they are written out for the
    backward pass alone. A compiler that traces this sees `expert_mlp` of the values.

    Raises:
        ValueError: `impl="triton"` cannot read a format.
    """
    if torch.compiler.is_compiling():
        ids_TK = experts.named(ids_TK)
        wide = experts.widened(ids_TK, x_TD.dtype)
        options: dict[str, Any] = {"impl": impl, "recompute": True}
        return call(x_TD, ids_TK, weights_TK, None, wide, activation, **options)
    if wants_gradient((x_TD, weights_TK)):
        return cast(Tensor, _Frozen.apply(x_TD, weights_TK, ids_TK, experts, activation, impl))
    return _infer(x_TD, ids_TK, weights_TK, experts, activation, impl)


def _infer(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
    impl: str,
) -> Tensor:
    with torch.no_grad(), without_autocast(x_TD.device.type):
        if resolve_path(impl, x_TD) == "triton":
            from moe_runtime.kernels.expert_mlp import triton_path

            problem = triton_path.quantized_problem(x_TD, experts)
            if problem is None:
                return triton_path.infer_quantized(x_TD, ids_TK, weights_TK, experts, activation)
            if impl == "triton":
                raise ValueError(f"impl='triton' cannot compute this: {problem}")
            impl = "torch"
        return _by_expert(x_TD, ids_TK, weights_TK, experts, activation, impl)


def _by_expert(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
    impl: str,
) -> Tensor:
    """Each expert's matrices where they lie, in C or torch; waits for a device."""
    ids_TK = experts.named(ids_TK)
    rows = sort_rows(ids_TK, experts.num_experts)
    found = list(groups_between(rows.offsets_E1, experts.slot_of_expert))
    out_RD = x_TD.new_zeros(ids_TK.numel(), experts.dim_model)
    if not found:
        return torch.zeros_like(x_TD)
    sources_R = rows.order_R[: sum(group.num_rows for group in found)]
    expert_ffn(
        x_TD.contiguous(),
        [experts.weights(group.slot) for group in found],
        [group.num_rows for group in found],
        sources_R // ids_TK.shape[1],
        sources_R,
        out_RD,
        activation=activation,
        impl=cast(Literal["auto", "native", "torch"], impl),
    )
    # rows that nobody computed are zero, and stay so whatever their weight
    is_computed = (ids_TK >= 0) & (ids_TK < experts.num_experts)
    return combine_assignments(out_RD, weights_TK.where(is_computed, 0))


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        experts: QuantizedExperts,
        activation: ActivationSpec,
        impl: str,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weights_TK, ids_TK)
        ctx.experts, ctx.activation, ctx.impl = experts, activation, impl
        return _infer(x_TD, ids_TK, weights_TK, experts, activation, impl)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, ids_TK = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        inputs = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip((x_TD, weights_TK), needs, strict=True)
        ]
        ids_TK = ctx.experts.named(ids_TK)
        wide = ctx.experts.widened(ids_TK, x_TD.dtype)
        with torch.enable_grad(), without_autocast(x_TD.device.type):
            out_TD = call(
                inputs[0], ids_TK, inputs[1], None, wide, ctx.activation,
                impl=ctx.impl, recompute=False,
            )  # fmt: skip
            wanted = [tensor for tensor, need in zip(inputs, needs, strict=True) if need]
            grad_TD = grads[0].detach().to(out_TD.dtype)
            found = iter(torch.autograd.grad(out_TD, wanted, grad_TD))
        given = [next(found) if need else None for need in needs]
        return *given, None, None, None, None
