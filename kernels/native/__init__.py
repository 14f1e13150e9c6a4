"""The native CPU library: its C sources, and what finds, loads and describes the built file."""

from moe_runtime.kernels.native.library import (
    ACTIVATION_CODES,
    CACHED_CODES,
    DTYPE_CODES,
    NEEDS_TORCH,
    STATUS_BAD_ROW,
    STATUS_DAMAGED,
    STATUS_NO_MEMORY,
    STATUS_OK,
    NativeLibrary,
    NativeUnavailableError,
    chosen_library,
    describe,
    native_library,
    needs_torch,
    require_native,
)

__all__ = [
    "ACTIVATION_CODES",
    "CACHED_CODES",
    "DTYPE_CODES",
    "NEEDS_TORCH",
    "STATUS_BAD_ROW",
    "STATUS_DAMAGED",
    "STATUS_NO_MEMORY",
    "STATUS_OK",
    "NativeLibrary",
    "NativeUnavailableError",
    "chosen_library",
    "describe",
    "native_library",
    "needs_torch",
    "require_native",
]
