"""What an experts module of transformers does between its projections, as a formula of the kernels.

It is recognised by evaluating it, never by its name.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.kernels.expert_mlp import ACTIVATION_NAMES, ActivationSpec

# The function that a module had and its formula as text; None stands for a module whose own one is
# called. But for that function gates do not change after a module is made.
_FORMULAS: WeakKeyDictionary[torch.nn.Module, tuple[Any, str | None]] = WeakKeyDictionary()
# Gates compute in fp32 or fp64 here; formulas that differ at all differ by far more.
_SAME = 1e-5
_PROBES = 2048


def recognise_activation(module: torch.nn.Module) -> ActivationSpec | None:
    """The formula that computes what an experts module does between its projections.

    Args:
        module: An experts module of transformers.

    Returns:
        A formula whose values agree with the module's over the range in which its constants act,
        or None: then the module's own function has to be called.
    """
    found = _formula(id(module))
    if found is None:
        return None
    function, *numbers = found.split()
    return ActivationSpec.from_numbers(function, [float(number) for number in numbers])


# The compiler takes the answer for a constant, as the constants are that it follows from, and keeps
# it as text: it would make variables of numbers. In torch 2.11 it gives no objects, but addresses.
@torch.compiler.assume_constant_result
def _formula(address: int) -> str | None:
    module: Any = ctypes.cast(address, ctypes.py_object).value
    function = getattr(module, "act_fn", None)
    known = _FORMULAS.get(module)
    if known is not None and known[0] is function:
        return known[1]
    # in a thread of its own, where no tracing (torch.export) makes values unknown
    with ThreadPoolExecutor(1) as thread:
        spec = thread.submit(find_formula, module).result()
    formula = None if spec is None else " ".join([spec.function, *map(repr, spec.numbers())])
    _FORMULAS[module] = function, formula
    return formula


@torch.no_grad()
def find_formula(module: Any) -> ActivationSpec | None:
    """`recognise_activation`, of what the module does now; it must not run where torch traces."""
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
