"""Launches in Triton's interpreter whose programs are done again once they were watched."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from typing import Any

from array_steps import reduction_of
from program_tapes import Segment, Tape, TapedBuilder, replay
from remembered_builtins import NoPlanError, kind_of
from triton.language import core
from triton.runtime import interpreter

_FIRST = 4
"""Programs of a kind that are not watched: noting takes longer than running, for who runs once."""
_MOST = 64
"""Times that programs of a kind are watched: beyond, they are too different from one another."""


class _Kind:
    """Programs of a kernel whose arguments are equal, or pointers to the same type."""

    def __init__(self, kept: list[Any]) -> None:
        self.number = self.watched = 0
        self.can_be_noted = True
        self.first: Segment | None = None
        self._kept = kept  # whose addresses stand for them


class Launcher:
    """Launches without copies of arguments, which lie on the host already."""

    def __init__(self) -> None:
        self._kinds: dict[Any, dict[Any, _Kind]] = {}
        self._signature = functools.cache(inspect.signature)
        self._lock = threading.RLock()

    def __call__(self, fn: Any, constexprs: Any, grid: Any, args: Any, kwargs: Any) -> None:
        """Runs a kernel, as the interpreter has rewritten it, over a grid."""
        signature = self._signature(fn)
        names = signature.parameters
        kwargs = {name: value for name, value in kwargs.items() if name in names}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments, inputs, constants = {}, list[Any](), list[Any]()
        key, kept = list[Any](), list[Any]()
        for name, value in bound.arguments.items():
            is_fixed = name in constexprs
            argument = value if is_fixed else interpreter._implicit_cvt(value)
            arguments[name] = argument
            if not is_fixed and hasattr(value, "data_ptr"):
                inputs.append(argument.handle)
                key.append(id(argument.type))
                kept.append(argument.type)
                continue
            if argument.__class__ is core.tensor:
                constants.append(argument.handle)
            key.append(_key_of(value))
        if callable(grid):
            grid = grid(arguments)
        builder = interpreter.interpreter_builder
        with self._lock:
            builder.set_grid_dim(*grid, *(1,) * (3 - len(grid)))
            kind = None
            if None not in key:
                kinds = self._kinds.setdefault(fn, {})
                kind = kinds.setdefault(tuple(key), _Kind(kept))
            for place in itertools.product(*map(range, builder.grid_dim)):
                builder.set_grid_idx(*place)
                if kind is None or not kind.can_be_noted or kind.number < _FIRST:
                    fn(**arguments)
                else:
                    self._run(kind, fn, arguments, inputs, constants)
                if kind is not None:
                    kind.number += 1

    def _run(self, kind: _Kind, fn: Any, arguments: Any, inputs: Any, constants: Any) -> None:
        known, tape = [handle.data for handle in inputs], None
        if kind.first is not None:
            new = replay(kind.first, known)
            if new is None:
                return
            tape = Tape(inputs, constants)
            tape.go_on(*new, known)
        else:
            tape = Tape(inputs, constants)
            kind.first = tape.segment
        kind.watched += 1
        kind.can_be_noted = kind.watched < _MOST
        semantic = interpreter.interpreter_semantic
        builder = semantic.builder
        semantic.builder = TapedBuilder(builder, tape)
        try:
            fn(**arguments)
            tape.end()
        finally:
            semantic.builder = builder
            kind.can_be_noted &= tape.is_on


def _key_of(value: Any) -> Any:
    """What tells a plain argument from others; None: nothing does."""
    if isinstance(value, interpreter.InterpretedFunction):
        return value
    try:
        return kind_of(value)
    except NoPlanError:
        return None


def have_values_noted(language: Any) -> None:
    """Of what does not ask the builder: who decides on a value, and reductions."""
    semantic, tensor = interpreter.interpreter_semantic, core.tensor

    def is_true(self: Any) -> bool:
        data, builder = self.handle.data, semantic.builder
        if builder.__class__ is TapedBuilder and data.size == 1:
            return builder.tape.ask("bool", bool, self.handle)
        return bool(data) if data.size == 1 else True

    def number(data: Any) -> int:
        return int(data.squeeze())

    def index(self: Any) -> int:
        builder = semantic.builder
        if builder.__class__ is TapedBuilder:
            return builder.tape.ask("index", number, self.handle)
        return number(self.handle.data)

    def noted(name: str, function: Any) -> Any:
        def call(input: Any, axis: Any, combine: Any, *args: Any, **kwargs: Any) -> Any:
            result, builder = function(input, axis, combine, *args, **kwargs), semantic.builder
            if builder.__class__ is not TapedBuilder:
                return result
            if input.__class__ is not tensor or result.__class__ is not tensor:
                builder.tape.stop()
                return result
            again = reduction_of(function, input, axis, combine, args, kwargs, result)
            builder.tape.reduction(name, again, input.handle, result.handle)
            return result

        return call

    tensor.__bool__, tensor.__index__ = is_true, index
    for name in ("reduce", "associative_scan"):
        call = noted(name, getattr(language, name))
        for where in (language, language.core):
            setattr(where, name, call)
