"""The native CPU library: its C sources, and what finds, loads and describes the built file."""

from moe_runtime.kernels.native.differentiation import NO_BACKWARD, is_differentiated
from moe_runtime.kernels.native.library import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    STATUS_BAD_ROW,
    STATUS_DAMAGED,
    STATUS_NO_MEMORY,
    STATUS_OK,
    NativeDescription,
    NativeLibrary,
    NativeUnavailableError,
    describe,
    native_library,
    require_native,
)

__all__ = [
    "ACTIVATION_CODES",
    "DTYPE_CODES",
    "NO_BACKWARD",
    "STATUS_BAD_ROW",
    "STATUS_DAMAGED",
    "STATUS_NO_MEMORY",
    "STATUS_OK",
    "NativeDescription",
    "NativeLibrary",
    "NativeUnavailableError",
    "describe",
    "is_differentiated",
    "native_library",
    "require_native",
]
