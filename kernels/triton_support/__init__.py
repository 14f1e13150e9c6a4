"""What the Triton side of every op shares: choosing an implementation, and saying why it cannot."""

from moe_runtime.kernels.triton_support.choice import (
    TRITON_HINT,
    check_triton_dtype,
    is_interpreted,
    require_triton,
    resolve_impl,
)
from moe_runtime.kernels.triton_support.dependent_launch import dependent_launch
from moe_runtime.kernels.triton_support.launch import PreparedLaunch, cdiv, launch, power_of_2

__all__ = [
    "TRITON_HINT",
    "PreparedLaunch",
    "cdiv",
    "check_triton_dtype",
    "dependent_launch",
    "is_interpreted",
    "launch",
    "power_of_2",
    "require_triton",
    "resolve_impl",
]
