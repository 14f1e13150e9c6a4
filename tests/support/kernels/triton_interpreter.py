"""Repairs to Triton's interpreter, which multiplies bf16 as if it were integers and truncates it.

Hardware does neither: products of bf16 are exact in fp32, and conversions round to nearest even.
It also prepares the language anew for every launch and for every call of a function by another,
works out at every call what a builtin does with the types of its operands, describes the type of
every value anew, and computes sums of integers a second time for a check that it leaves out. That
takes far longer than what most functions compute; here it is done once, or not at all, where the
interpreter is one that is known to allow it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def repair_interpreter() -> None:
    """Patches the interpreter of this process; doing so twice is harmless."""
    import triton
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
        if pair == (tl.float8e4nv, tl.float32):
            codes = torch.from_numpy(src.data.astype(np.uint8)).view(torch.float8_e4m3fn)
            return handle(codes.float().numpy(), tl.float32)
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
    # what is watched and repeated is what this version of the interpreter does
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        _prepare_the_language_once(interpreter)
        _describe_types_once(interpreter)
        _launch_repeatedly(interpreter)


def _prepare_the_language_once(interpreter: Any) -> None:
    """For all kernels, whatever names they know it by."""
    import triton.language as tl
    from remembered_builtins import remembered

    everything = SimpleNamespace(__globals__={"language": tl, "core": tl.core})
    builtins = dict[int, Any]()
    for where, name, before in interpreter._patch_lang(everything)._changes:
        if tl.core.is_builtin(before):
            prepared = builtins.setdefault(id(before), remembered(getattr(where, name)))
            setattr(where, name, prepared)
    nothing_to_restore = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: nothing_to_restore


def _launch_repeatedly(interpreter: Any) -> None:
    """Without what does not differ between launches and between programs."""
    import triton.language as tl
    from repeated_programs import Launcher, have_values_noted

    have_values_noted(tl)
    launcher = Launcher()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            launcher(self.fn, self.constexprs, self.grid, args, kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch


def _describe_types_once(interpreter: Any) -> None:
    """Types that are equal are one, and values of a type share its description."""
    import triton.language as tl
    from triton.language import core

    builder = interpreter.interpreter_builder
    # a check that calls an assertion on the device, which debug mode alone has
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    describe = core.block_type.__init__
    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}
    blocks = dict[Any, Any]()

    def make_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        lengths = tuple(map(core._unwrap_if_constexpr, core._unwrap_if_constexpr(shape)))
        key = cls, id(element_ty), lengths
        if key not in blocks:
            block = object.__new__(cls)
            describe(block, element_ty, shape)
            blocks[key] = block
        return blocks[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        try:
            self.dtype, self.shape, self.numel = type.of_tensors
        except AttributeError:
            lengths = [core.constexpr(length) for length in type.shape] if type.is_block() else []
            numel = core.constexpr(math.prod(length.value for length in lengths))
            type.of_tensors = type.scalar, core.tuple(lengths), numel
            self.dtype, self.shape, self.numel = type.of_tensors

    def numpy_dtype_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(dtype.scalar)
        return numpy_dtypes[name]

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and data.itemsize * 8 > getattr(dtype, "primitive_bitwidth", 64):
            raise ValueError(f"{data.dtype} is wider than {dtype}")

    interpreter.TensorHandle.__init__ = make_handle
    core.block_type.__new__ = make_block
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.tensor.__init__ = make_tensor
    interpreter._get_np_dtype = numpy_dtype_of
    tl.str_to_ty = functools.cache(tl.str_to_ty)


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of fp32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(values)
    return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)
