"""Repairs to Triton's interpreter, which multiplies bf16 as if it were integers and truncates it.

Hardware does neither: products of bf16 are exact in fp32, and conversions round to nearest even.
It also prepares the language anew for every call of a function by another, which takes longer than
what most of them compute; here it is prepared once for a kernel.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
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
    _prepare_the_language_once(interpreter)


def _prepare_the_language_once(interpreter: Any) -> None:
    """In calls between functions of one kernel, for each module that they know it by."""
    prepare, call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__
    prepared: set[ModuleType] = set()

    def begin(fn: Any) -> Any:
        prepared.clear()
        prepared.update(_languages_of(fn))
        return prepare(fn)

    def prepare_what_is_not(fn: Any) -> None:
        found = _languages_of(fn)
        if not found <= prepared:
            prepare(fn)
            prepared.update(found)

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        # what the interpreter's own call would prepare for itself
        interpreter._patch_lang = prepare_what_is_not
        try:
            return call(self, *args, **kwargs)
        finally:
            interpreter._patch_lang = begin

    interpreter._patch_lang = begin
    interpreter.InterpretedFunction.__call__ = call_function


@functools.cache
def _languages_of(fn: Any) -> frozenset[ModuleType]:
    """The modules of the language that a function knows."""
    import triton.language as tl

    return frozenset(
        value
        for value in fn.__globals__.values()
        if inspect.ismodule(value) and value in (tl, tl.core)
    )


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of fp32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(values)
    return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)
