"""The runtime's kernels as an experts backend of transformers: ``experts_implementation``.

One function serves every model that transformers builds with its experts interface. What a model
does between its two projections is recognised by evaluating it, never by its name: a gate whose
values agree with a formula of the kernels is computed by them, any other runs as the model has it.

Shape suffixes: T tokens, K top-k, E experts, D model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.expert_mlp import (
    ACTIVATION_NAMES,
    ActivationSpec,
    StackedExperts,
    expert_mlp,
)

BACKEND_NAME = "moe_runtime"
# Formulas as text; None stands for a module whose own function is called. Gates do not change after
# a module is made.
_FORMULAS: WeakKeyDictionary[torch.nn.Module, str | None] = WeakKeyDictionary()
# Gates compute in fp32 or fp64 here; formulas that differ at all differ by far more.
_SAME = 1e-5
_PROBES = 2048


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


def recognise_activation(module: torch.nn.Module) -> ActivationSpec | None:
    """The formula that computes what an experts module does between its projections.

    Args:
        module: An experts module of transformers.

    Returns:
        A formula whose values agree with the module's over the range in which its constants act,
        or None: then the module's own function has to be called.
    """
    found = _formula(module)
    if found is None:
        return None
    function, *numbers = found.split()
    return ActivationSpec.from_numbers(function, [float(number) for number in numbers])


# The compiler takes the answer for a constant, as the constants are that it follows from.
@torch.compiler.assume_constant_result
def _formula(module: torch.nn.Module) -> str | None:
    if module not in _FORMULAS:
        # in a thread of its own, where no tracing (torch.export) makes values unknown
        with ThreadPoolExecutor(1) as thread:
            spec = thread.submit(_find_formula, module).result()
        _FORMULAS[module] = None if spec is None else _as_text(spec)
    return _FORMULAS[module]


def _as_text(spec: ActivationSpec) -> str:
    """A formula as the compiler keeps a constant: it would make variables of numbers."""
    return " ".join([spec.function, *map(repr, spec.numbers())])


@torch.no_grad()
def _find_formula(module: Any) -> ActivationSpec | None:
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, torch.nn.Module) and any(True for _ in act_fn.parameters()):
        # values that training changes are no constants
        return None
    numbers = sorted(_numbers(module))
    reach = 3 * max((number for number in numbers if number < 1e4), default=1) + 3
    generator = torch.Generator().manual_seed(0)
    gate = torch.empty(1, _PROBES, dtype=torch.float64).uniform_(-reach, reach, generator=generator)
    up = torch.empty_like(gate).uniform_(-reach, reach, generator=generator)
    if not module.has_gate:
        expected = module.act_fn(up)
        return _first_match(map(ActivationSpec, ACTIVATION_NAMES), None, up, expected)
    pair = torch.cat((gate, up), -1)
    if not module.is_concatenated:
        pair = torch.stack((gate, up), -1).flatten(-2)
    return _first_match(_candidates(numbers), gate, up, private.gate_of(module)(pair))


def _first_match(
    candidates: Iterator[ActivationSpec], gate: Tensor | None, up: Tensor, expected: Tensor
) -> ActivationSpec | None:
    for spec in candidates:
        if torch.allclose(spec(gate, up), expected.to(up.dtype), rtol=_SAME, atol=_SAME):
            return spec
    return None


def _numbers(module: Any) -> set[float]:
    """The constants of a module and of the modules in it that may appear in its gate."""
    return {
        float(value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and any(word in name for word in ("limit", "alpha", "softcap"))
        and 0 < value < math.inf
    }


def _candidates(numbers: list[float]) -> Iterator[ActivationSpec]:
    """Formulas that a gate with these constants may have, the common ones first."""
    yield from map(ActivationSpec, ACTIVATION_NAMES)
    for name, limit in itertools.product(ACTIVATION_NAMES, numbers):
        yield ActivationSpec(name, limit=limit)
        yield ActivationSpec(name, limit=limit, clamps_after=True)
    for first, second in itertools.product(numbers, repeat=2):
        yield ActivationSpec("silu", alpha=first, limit=second, up_offset=1.0)
        yield ActivationSpec("silu", gate_softcap=first, up_softcap=second)


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
