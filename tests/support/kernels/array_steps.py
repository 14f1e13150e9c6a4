"""Operations on arrays that Triton's interpreter does for what a kernel asks of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core, standard
from triton.runtime import interpreter

_LOGICAL = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def _functions() -> dict[str, Any]:
    """What the builder's one-liners do: they are called with somebody who says so."""
    says = SimpleNamespace(
        binary_op=lambda *args: args[-1],
        unary_op=lambda *args: args[-1],
        ternary_op=lambda *args: args[-1],
        cast_impl=lambda *args: "cast",
    )
    found = {"create_fp_to_fp": "cast"}
    for name, member in vars(interpreter.InterpreterBuilder).items():
        code = getattr(member, "__code__", None)
        if code is not None and code.co_name == "<lambda>":
            try:
                found[name] = member(says, *[None] * (code.co_argcount - 1))
            except AttributeError:  # does something else
                continue
    return found


_FUNCTIONS = _functions()
_REDUCTIONS: list[tuple[Any, Any]] = [
    (standard._sum_combine, np.add),
    (standard._elementwise_max, np.fmax),
    (standard._elementwise_min, np.fmin),
]


def is_handle(value: Any) -> bool:
    return isinstance(value, interpreter.TensorHandle)


def view_of(name: str, args: Any, result: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """The handle whose array has the values of the result, and how they become as many.

    An operation on each element repeats them itself.
    """
    shape = result.data.shape
    source = args[0] if name == "create_broadcast" else args[-1] if name == "create_splat" else None
    if source is None or source.data.dtype != result.data.dtype:
        return None
    return source, lambda data: np.broadcast_to(data, shape)


def step_of(
    name: str, function: Callable[..., Any], args: Any, result: Any, source: Callable[[Any], Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """A function of arrays that gives what a call gave, and the handles of these arrays.

    Args:
        name: of what was called.
        function: that was called.
        args: it was called with.
        result: of the call: a handle, or None.
        source: gives the handle of which a handle is a view.
    """
    handles = [*filter(is_handle, args)]
    made = _FUNCTIONS.get(name)
    if made == "cast" and not _is_special(args[0], result):
        dtype = result.data.dtype
        return (lambda data: data.astype(dtype)), handles
    if isinstance(made, np.ufunc) or made is np.where:
        arrays = [handle.data for handle in handles]
        natural = made(*arrays)
        is_logical = made in _LOGICAL
        if is_logical or not all(array.dtype == bool for array in arrays):
            operands = _sources(handles, result.data.shape, source)
            return _converted(made, natural, result.data.dtype), operands
    if name == "create_addptr":
        width = max(1, handles[0].get_element_ty().primitive_bitwidth // 8)
        operands = _sources(handles, result.data.shape, source)
        return (lambda ptr, offset: ptr + width * offset.astype(np.uint64)), operands
    if name == "create_expand_dims":
        shape = result.data.shape
        return (lambda data: data.reshape(shape)), handles
    if name == "create_masked_load":
        dtype, load = result.data.dtype, interpreter._interpreter.load
        if len(handles) == 3:
            return (lambda *arrays: load(*arrays, dtype)), handles
        other = np.zeros(result.data.shape, dtype)
        return (lambda ptrs, mask: load(ptrs, mask, other, dtype)), handles
    if name == "create_load":
        dtype, load, shape = result.data.dtype, interpreter._interpreter.load, result.data.shape
        every, other = np.ones(shape, bool), np.zeros(shape, dtype)
        return (lambda ptrs: load(ptrs, every, other, dtype)), handles
    if name == "create_masked_store":
        return interpreter._interpreter.store, handles
    return _with_handles(function, args), handles


def _is_special(src: Any, result: Any) -> bool:
    """Whether numbers lie in an array of another type."""
    return any("bf16" in str(each.dtype) or "fp8" in str(each.dtype) for each in (src, result))


def _converted(function: Any, natural: Any, dtype: Any) -> Callable[..., Any]:
    if natural.dtype == dtype:
        return function
    return lambda *arrays: function(*arrays).astype(dtype)


def _sources(handles: list[Any], shape: Any, source: Callable[[Any], Any]) -> list[Any]:
    """With what views show, where the result is as large without them."""
    found = [*map(source, handles)]
    for keep in (range(0), *((number,) for number in range(len(handles)))):
        tried = [
            handle if number in keep else shown
            for number, (handle, shown) in enumerate(zip(handles, found, strict=True))
        ]
        if np.broadcast_shapes(*(each.data.shape for each in tried)) == shape:
            return tried
    return handles


def _with_handles(function: Callable[..., Any], args: Any) -> Callable[..., Any]:
    dtypes = [arg.dtype if is_handle(arg) else None for arg in args]

    def call(*arrays: Any) -> Any:
        left = iter(arrays)
        result = function(
            *(
                arg if dtype is None else interpreter.TensorHandle(next(left), dtype)
                for arg, dtype in zip(args, dtypes, strict=True)
            )
        )
        return None if result is None else result.data

    args = [None if is_handle(arg) else arg for arg in args]
    return call


def reduction_of(
    reduce: Callable[..., Any],
    operand: Any,
    axis: Any,
    combine: Any,
    args: Any,
    kwargs: Any,
    result: Any,
) -> Callable[[Any], Any]:
    """A function of an array that gives what a reduction or a scan of a tensor gave."""
    handle, type = operand.handle.dtype, operand.type
    dtype, shape = result.handle.data.dtype, result.handle.data.shape
    ufunc = next((ufunc for known, ufunc in _REDUCTIONS if combine is known), None)
    if ufunc is not None and operand.handle.data.size > result.handle.data.size:
        return lambda data: ufunc.reduce(data, axis=axis).astype(dtype).reshape(shape)

    def again(data: Any) -> Any:
        value = core.tensor(interpreter.TensorHandle(data, handle), type)
        return reduce(value, axis, combine, *args, **kwargs).handle.data

    return again
