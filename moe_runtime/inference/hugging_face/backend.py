"""The runtime's kernels as an experts backend of transformers: ``experts_implementation``.

Shape suffixes: T tokens, K top-k, E experts, D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.known_classes import recognise_activation
from moe_runtime.kernels.expert_mlp import QuantizedExperts, StackedExperts, expert_mlp
from moe_runtime.kernels.quantized import SCALES, CodeName, QuantizedStack, ScaleName, WeightFormat

BACKEND_NAME = "moe_runtime"
_CODES: dict[torch.dtype, CodeName] = {torch.float8_e4m3fn: "e4m3", torch.int8: "e2m1"}
_SCALES: dict[torch.dtype, ScaleName] = {
    torch.float8_e8m0fnu: "e8m0",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}


def register_with_transformers() -> None:
    """Registers ``experts_implementation="moe_runtime"`` with transformers.

    ``from_pretrained`` and ``model.set_experts_implementation`` then use the runtime's kernels for
    every model with transformers' experts interface, in generation and training. Experts of fp8
    checkpoints, and the 4-bit ones of DeepSeek-V4, are computed from their codes. gpt-oss has the
    interface in bf16, not in 4 bits (on a GPU, or with ``use_kernels=True``). Repeated calls change
    nothing.
    """
    private.ExpertsInterface.register(BACKEND_NAME, experts_forward)
    private.FP8ExpertsInterface.register(BACKEND_NAME, fp8_experts_forward)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward pass of an experts module of transformers, ``self``.

    Kernels compute known gates; the model's own function computes others.

    Args:
        hidden_states: ``[T, D]``.
        top_k_index: ``[T, K]``; ids outside the experts add nothing (expert parallelism marks slots
            of other ranks with ``num_experts``).
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
    """As `experts_forward`, for frozen experts in 8 or 4 bits with scales.

    Kernels read the codes. Unlike in transformers' own backends, activations are not rounded to 8
    bits. Raises UnsupportedModelError: the type or the grouping of the scales is unknown.
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    inputs, down = (
        _packed(self, name, getattr(self, name), getattr(self, f"{name}_scale_inv"))
        for name in (first, "down_proj")
    )
    experts: StackedExperts | QuantizedExperts
    if isinstance(inputs, QuantizedStack) and isinstance(down, QuantizedStack):
        gate, up = inputs.halves() if self.has_gate else (None, inputs)
        experts = QuantizedExperts(gate=gate, up=up, down=down)
    else:
        dtype = hidden_states.dtype
        experts = StackedExperts(
            gate_up=_values(inputs, dtype), down=_values(down, dtype), has_gate=self.has_gate
        )
    return _run(self, hidden_states, top_k_index, top_k_weights, experts)


def _run(
    module: Any,
    hidden_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts | QuantizedExperts,
) -> Tensor:
    spec, has_norm = recognise_activation(module), getattr(module, "has_post_expert_norm", False)
    own = private.gate_of(module) if module.has_gate else module.act_fn
    out_TD = expert_mlp(
        hidden_TD.to(experts.dtype) if isinstance(experts, StackedExperts) else hidden_TD,
        ids_TK,
        weights_TK,
        experts,
        activation=own if spec is None else spec,
        post_expert=module.post_expert_norm if has_norm else None,
    )
    return out_TD.to(hidden_TD.dtype)


def _packed(module: Any, name: str, weight: Tensor, scale: Tensor) -> QuantizedStack | Tensor:
    """A projection ``[E, N, K]`` of all experts; unchanged if it has more than 8 bits."""
    weight, scale = weight.detach(), scale.detach()
    if weight.element_size() > 1:
        return weight
    kind = _SCALES.get(scale.dtype)
    if kind is None or weight.dtype not in _CODES or scale.ndim != 3:
        raise UnsupportedModelError(
            f"experts_implementation={BACKEND_NAME!r} takes float8_e4m3fn, or int8 for pairs of "
            f"4-bit numbers, with scales [E, rows, columns] in fp32, bf16, fp16 or e8m0; {name} is "
            f"{weight.dtype} with scales {list(scale.shape)} in {scale.dtype}; choose another "
            "implementation"
        )
    num_cols = weight.shape[2] * (2 if weight.dtype == torch.int8 else 1)
    blocks = (1, 32) if weight.dtype == torch.int8 else module.block_size
    num_rows, blocks = weight.shape[1], blocks or (None, None)
    num_parts = 2 if module.has_gate and name == "gate_up_proj" else 1
    rows = _group(name, num_rows, scale.shape[1], blocks[0], num_parts)
    cols = _group(name, num_cols, scale.shape[2], blocks[1])
    found = WeightFormat(_CODES[weight.dtype], kind, group_rows=rows, group_cols=cols)
    codes = weight.view(torch.uint8)
    return QuantizedStack(found, num_cols, codes, scale.view(SCALES[kind]))


def _group(name: str, size: int, num_groups: int, block: int | None, num_parts: int = 1) -> int:
    """The number of rows or columns that share a scale; 0 for all."""
    if num_groups == 1:
        return 0
    if block is not None and -(-size // block) == num_groups:
        part = size // num_parts
        if num_parts == 1 or part % block == 0 or num_parts * -(-part // block) != num_groups:
            return block
    elif size % num_groups == 0 and (block is None or num_groups == num_parts):
        return size // num_groups  # one scale each, or one for gate and one for up
    raise UnsupportedModelError(
        f"experts_implementation={BACKEND_NAME!r} cannot tell which of the {size} rows or columns "
        f"of {name} share each of {num_groups} scales: expected whole blocks of {block} in gate "
        "and in up; use moe_runtime.load, which reads each with its own, or another implementation"
    )


def _values(weight: QuantizedStack | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    return weight.dequantize(torch.arange(weight.shape[0], device=weight.device), dtype)
