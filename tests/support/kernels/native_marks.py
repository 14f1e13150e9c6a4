"""Marks of tests that need the native library, and `impl="native"` with that mark."""

import pytest

from moe_runtime.kernels.native import native_library

needs_native = pytest.mark.skipif(native_library() is None, reason="the library was not built")
NATIVE = pytest.param("native", marks=needs_native)
