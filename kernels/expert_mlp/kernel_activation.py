"""Activations as the C kernel of whole experts takes them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from moe_runtime.kernels.native import ACTIVATION_CODES
from moe_runtime.kernels.operands.activation import ActivationSpec


class KernelActivation(NamedTuple):
    """The arguments of a call.

    Attributes:
        code: Of the function.
        formula: `ActivationSpec.numbers` as C reads them; None for the function alone, which is
            computed without them.
    """

    code: int
    formula: ctypes.Array[ctypes.c_float] | None


@lru_cache(maxsize=64)
def kernel_activation(activation: str | ActivationSpec) -> KernelActivation | None:
    """What the kernel is given for a name or a formula; None for what it does not know."""
    if isinstance(activation, str):
        code = ACTIVATION_CODES.get(activation)
        return None if code is None else KernelActivation(code, None)
    code = ACTIVATION_CODES[activation.function]
    if activation.is_plain:
        return KernelActivation(code, None)
    numbers = activation.numbers()
    return KernelActivation(code, (ctypes.c_float * len(numbers))(*numbers))
