"""The runtime's kernels as an experts backend of transformers: ``experts_implementation``.

One function serves every model that transformers builds with its experts interface. A gate whose
values agree with a formula of the kernels is computed by them, any other runs as the model has it.

Shape suffixes: T tokens, K top-k, E experts, D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.hugging_face.gate_formulas import recognise_activation
from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp

BACKEND_NAME = "moe_runtime"


def register_with_transformers() -> None:
    """Makes ``experts_implementation="moe_runtime"`` known to transformers.

    From then on ``from_pretrained(..., experts_implementation="moe_runtime")`` and
    ``model.set_experts_implementation("moe_runtime")`` use the runtime's kernels for every model
    whose experts transformers builds with its experts interface, in generation and in training,
    fp8 checkpoints included. Calling it again changes nothing.
    """
    private.ExpertsInterface.register(BACKEND_NAME, experts_forward)
    private.FP8ExpertsInterface.register(BACKEND_NAME, fp8_experts_forward)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward pass of an experts module of transformers.

    Args:
        self: The module: its parameters, its layout flags and its gate.
        hidden_states: ``[T, D]``.
        top_k_index: ``[T, K]``; ids of no expert (expert parallelism marks the slots of other ranks
            with ``num_experts``) add nothing.
        top_k_weights: ``[T, K]`` gate weights.

    Returns:
        ``[T, D]`` in the dtype of `hidden_states`.
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    experts = StackedExperts(
        gate_up=getattr(self, first),
        down=self.down_proj,
        gate_up_bias=getattr(self, f"{first}_bias") if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        has_gate=self.has_gate,
        is_transposed=self.is_transposed,
        is_concatenated=self.is_concatenated,
    )
    return _run(self, hidden_states, top_k_index, top_k_weights, experts)


def fp8_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As `experts_forward`, for experts in 8-bit floating point with scales.

    The experts that are used are widened to the dtype of `hidden_states` for the call; activations
    are not rounded to 8 bits, unlike in transformers' own backends.

    Raises:
        UnsupportedModelError: The experts are packed in 4 bits.
    """
    gate_up = self.gate_up_proj if self.has_gate else self.up_proj
    if gate_up.dtype == torch.int8:
        raise UnsupportedModelError(
            "experts in 4-bit floating point are not supported by "
            f"experts_implementation={BACKEND_NAME!r}; choose another implementation"
        )
    used_U, slot_of_expert = _used_experts(top_k_index, self.num_experts)
    first_scale = self.gate_up_proj_scale_inv if self.has_gate else self.up_proj_scale_inv
    dtype = hidden_states.dtype
    experts = StackedExperts(
        gate_up=_widen(gate_up, first_scale, used_U, dtype, self.block_size),
        down=_widen(self.down_proj, self.down_proj_scale_inv, used_U, dtype, self.block_size),
        has_gate=self.has_gate,
        slot_of_expert=slot_of_expert,
    )
    return _run(self, hidden_states, top_k_index, top_k_weights, experts)


def _run(
    module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: StackedExperts
) -> Tensor:
    spec = recognise_activation(module)
    own = private.gate_of(module) if module.has_gate else module.act_fn
    out_TD = expert_mlp(
        hidden_TD.to(experts.dtype),
        ids_TK,
        weights_TK,
        experts,
        activation=own if spec is None else spec,
        post_expert=module.post_expert_norm if _has_post_norm(module) else None,
    )
    return out_TD.to(hidden_TD.dtype)


def _has_post_norm(module: Any) -> bool:
    return bool(getattr(module, "has_post_expert_norm", False))


def _used_experts(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Ids of the experts that are used, and the place of every expert among them."""
    if torch.compiler.is_compiling():
        # the compiler needs shapes that do not depend on the routing
        every = torch.arange(num_experts, device=ids_TK.device)
        return every, every
    used_U = torch.unique(ids_TK)
    used_U = used_U[(used_U >= 0) & (used_U < num_experts)]
    slots = torch.zeros(num_experts, dtype=torch.int64, device=ids_TK.device)
    slots[used_U] = torch.arange(len(used_U), device=ids_TK.device)
    return used_U, slots


def _widen(
    weight: Tensor,
    scale: Tensor,
    used_U: Tensor,
    dtype: torch.dtype,
    block_size: tuple[int, int] | None,
) -> Tensor:
    """``weight[used] * scale[used]``, with one scale per block of rows and columns."""
    some = weight.detach()[used_U]
    if some.element_size() > 1:
        return some.to(dtype)
    scales = scale.detach()[used_U].float()
    for dim in (1, 2):
        size, num_scales = some.shape[dim], scales.shape[dim]
        block = block_size[dim - 1] if block_size is not None else size
        if -(-size // block) != num_scales:
            # no blocks along this dimension: one scale, or one for gate and one for up
            block = -(-size // num_scales)
        scales = scales.repeat_interleave(block, dim=dim).narrow(dim, 0, size)
    return (some.float() * scales).to(dtype)
