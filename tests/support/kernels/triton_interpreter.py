"""Repairs to Triton's interpreter, which multiplies bf16 as if it were integers and truncates it.

Hardware does neither: products of bf16 are exact in fp32, and conversions round to nearest even.
Two things that the interpreter does again and again, and that take almost half of its time, it
does once here: its table of types, and the replacement of the language's functions, which it
repeats whenever a kernel calls a function.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def repair_interpreter() -> None:
    """Patches the interpreter of this process; doing so twice is harmless."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    if getattr(builder, "bf16_is_repaired", False):
        return
    original_cast, original_dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return handle(widen(src.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return handle(narrow(src.data), tl.bfloat16)
        return original_cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (
            handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return original_dot(self, a, b, d, *rest)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return cast_impl(self, src, dst_type)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    builder.create_fp_to_fp = create_fp_to_fp
    builder.bf16_is_repaired = True
    # Versions of Triton name these otherwise; they only save time.
    if all(hasattr(interpreter, name) for name in ("_get_np_dtype", "_LangPatchScope")):
        _look_up_types_once(interpreter)
        _replace_functions_once(interpreter)


def _look_up_types_once(interpreter: Any) -> None:
    import triton.language as tl

    look_up, known = interpreter._get_np_dtype, {}

    def get_np_dtype(kind: Any) -> np.dtype:
        name = (kind.element_ty if isinstance(kind, tl.block_type) else kind).name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def _replace_functions_once(interpreter: Any) -> None:
    """A kernel replaces the functions of modules, and restores them at its end; what it calls finds
    them replaced."""
    import triton.language as tl

    replace, replaced = interpreter._patch_lang, []

    @functools.cache
    def parts_of(function: Any) -> list[Any]:
        values = function.__globals__.values()
        return [part for part in (tl, tl.core) if any(value is part for value in values)]

    def patch_lang(function: Any) -> Any:
        given = parts_of(function)
        if replaced and all(part in replaced for part in given):
            return interpreter._LangPatchScope()
        scope, is_kernel = replace(function), not replaced
        replaced.extend(given)
        if is_kernel:
            restore = scope.restore

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of fp32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(values)
    return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)
