"""The quantised experts of one layer, in slots; they are never trained.

Shape suffixes: T tokens, K top-k, S slots, E experts, D model, F hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.expert_weights import ExpertWeights
from moe_runtime.kernels.expert_mlp.experts import StackedExperts, check_slots, ids_in_slots
from moe_runtime.kernels.operands import GateLayout, check_shape
from moe_runtime.kernels.quantized import QuantizedStack


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedExperts:
    """Matrices as they lie in a checkpoint or a slab, and biases of one floating dtype.

    Gate and up of one tensor are its `halves()`, or `alternating()` rows.

    Attributes:
        gate: ``[S, F, D]``, or None for experts without a gate.
        up: ``[S, F, D]``.
        down: ``[S, D, F]``.
        gate_bias: ``[S, F]`` or None, like `up_bias`, at any strides.
        down_bias: ``[S, D]`` or None.
        slot_of_expert: As in `StackedExperts`.
    """

    gate: QuantizedStack | None
    up: QuantizedStack
    down: QuantizedStack
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    slot_of_expert: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if shapes or devices do not fit; reads no values."""
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
        check_slots(self.slot_of_expert)

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
        return GateLayout(self.gate is not None)

    def products(
        self,
    ) -> tuple[
        QuantizedStack, Tensor | None, tuple[QuantizedStack, Tensor | None] | None, QuantizedStack
    ]:
        """Matrix and bias of the first product (the gate, or up without one); up and its bias;
        down.
        """
        if self.gate is None:
            return self.up, self.up_bias, None, self.down
        return self.gate, self.gate_bias, (self.up, self.up_bias), self.down

    def named(self, ids_TK: Tensor) -> Tensor:
        """Ids, with -1 for experts that take no part."""
        return ids_in_slots(ids_TK, self.slot_of_expert)

    def weights(self, slot: int) -> ExpertWeights:
        """Views of one slot."""
        gate = None if self.gate is None else self.gate.matrix(slot)
        biases = (
            None if bias is None else bias[slot]
            for bias in (self.gate_bias, self.up_bias, self.down_bias)
        )
        return ExpertWeights(gate, self.up.matrix(slot), self.down.matrix(slot), *biases)

    def widened(self, ids_TK: Tensor, dtype: torch.dtype) -> StackedExperts:
        """The values of the experts named by `ids_TK`, copied in `dtype`; waits for the device."""
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
        """Slots of the used experts, and every expert's index among them."""
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
