"""Repairs to Triton's interpreter, which multiplies bf16 as if it were integers and truncates it.

Hardware does neither: products of bf16 are exact in fp32, and conversions round to nearest even.
It also prepares the language anew for every call of a function by another, describes the shape of
every value anew, and computes sums of integers a second time for a check that it leaves out. That
takes longer than what most functions compute; here it is done once for a kernel, once for a shape,
and not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
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
    _describe_types_once(interpreter)


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


def _describe_types_once(interpreter: Any) -> None:
    """Values of one shape share its description: equal shapes are mostly the same object."""
    import triton.language.core as core

    builder, semantic = interpreter.interpreter_builder, type(interpreter.interpreter_semantic)
    # a check that calls an assertion on the device, which debug mode alone has
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    describe, broadcast = core.block_type.__init__, semantic.broadcast_impl_value
    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    @functools.cache
    def shape_of_types(*lengths: int) -> tuple[Any, int]:
        sample = core.block_type.__new__(core.block_type)
        describe(sample, core.int32, list(lengths))
        return sample.shape, sample.numel

    @functools.cache
    def shape_of_values(*lengths: int) -> tuple[Any, Any]:
        constants = [core.constexpr(length) for length in lengths]
        return core.tuple(constants), core.constexpr(math.prod(lengths))

    def describe_block(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = map(core._unwrap_if_constexpr, core._unwrap_if_constexpr(shape))
        self.element_ty = element_ty
        self.shape, self.numel = shape_of_types(*lengths)
        self.name = f"<{self.shape.values}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of_values(*(type.shape.values if type.is_block() else ()))

    def broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
        shapes = getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None)
        return (lhs, rhs) if shapes[0] is shapes[1] else broadcast(self, lhs, rhs)

    def numpy_dtype_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(dtype.scalar)
        return numpy_dtypes[name]

    core.block_type.__init__, core.tensor.__init__ = describe_block, make_tensor
    semantic.broadcast_impl_value = broadcast_what_differs
    interpreter._get_np_dtype = numpy_dtype_of


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of fp32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(values)
    return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)
