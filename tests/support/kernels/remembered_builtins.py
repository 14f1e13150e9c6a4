"""Builtins of Triton's language that are worked out once for operands of one kind.

What a builtin asks of the builder depends on the types of its tensors and on constants alone: a
compiler knows no more. Triton's interpreter finds it out anew at every call, which takes ten times
as long as the few operations on arrays that come of it. Here a builtin is watched the first time,
and what it asked for is asked for again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from array_steps import is_handle
from program_tapes import TapedBuilder, taking
from triton.language import core
from triton.runtime import interpreter

# what makes constants of constants
_FOLDED = ("create_make_range", "create_splat")


class _Plan(NamedTuple):
    """Calls of a builder, in order.

    Attributes:
        constants: what is the same at every call; the operands' handles follow, then the results.
        steps: functions, and what takes their arguments from all that is known so far.
        names: of the functions.
        place: of the handle of the builtin's result, whose type is ``type``.
        operands: their types, which must live as long as their addresses stand for them.
    """

    constants: list[Any]
    steps: list[tuple[Callable[..., Any], Callable[[list[Any]], Any]]]
    names: list[str]
    place: int
    type: Any
    operands: list[Any]


class NoPlanError(Exception):
    """A builtin does what cannot be done again without it."""


class _WatchedBuilder:
    """Passes on what is asked of a builder, and notes the calls with what they returned."""

    def __init__(self, builder: Any) -> None:
        self._builder, self.calls = builder, list[tuple[Any, str, tuple[Any, ...], Any]]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            result = found(*args)
            self.calls.append((found, name, args, result))
            return result

        return call


def remembered(member: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin, as the interpreter has prepared it, that is worked out once for every kind."""
    plans: dict[tuple[Any, ...], _Plan | None] = {}
    semantic, tensor = interpreter.interpreter_semantic, core.tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        builder = semantic.builder
        if builder.__class__ is _WatchedBuilder:
            return member(*args, **kwargs)
        handles, kind = list[Any](), list[Any](kwargs)
        try:
            for value in (*args, *kwargs.values()) if kwargs else args:
                if value.__class__ is tensor:
                    handles.append(value.handle)
                    kind.append(id(value.type))
                else:
                    kind.append(kind_of(value))
        except NoPlanError:
            return member(*args, **kwargs)
        key = tuple(kind)
        if builder.__class__ is TapedBuilder:
            plan = plans.get(key)
            return _do_on_tape(plan, handles, builder.tape) if plan else member(*args, **kwargs)
        if key not in plans:
            result, plans[key] = _watch(member, args, kwargs)
            return result
        plan = plans[key]
        if plan is None:
            return member(*args, **kwargs)
        constants, steps, _, place, type, _ = plan
        known = constants + handles
        for function, arguments in steps:
            known.append(function(*arguments(known)))
        return tensor(known[place], type)

    return call


def _do_on_tape(plan: _Plan, handles: list[Any], tape: Any) -> Any:
    for constant in filter(is_handle, plan.constants):
        tape.constant(constant)
    known = plan.constants + handles
    for (function, arguments), name in zip(plan.steps, plan.names, strict=True):
        known.append(tape.do(name, function, tuple(arguments(known))))
    return core.tensor(known[plan.place], plan.type)


def kind_of(constant: Any) -> Any:
    """What tells a constant from others; numbers that are equal may be of several types."""
    kind = constant.__class__
    if kind is int or kind is bool or kind is str or constant is None:
        return kind, constant
    if kind is float:
        return kind, constant.hex()
    if kind is core.dtype:
        return kind, constant.name
    if kind is core.constexpr:
        return kind, kind_of(constant.value)
    if kind is slice:
        return kind, *map(kind_of, (constant.start, constant.stop, constant.step))
    if kind is list or isinstance(constant, tuple):
        return kind, *map(kind_of, constant)
    if dataclasses.is_dataclass(constant) and kind.__hash__ is not None:  # frozen
        values = (getattr(constant, field.name) for field in dataclasses.fields(constant))
        return kind, *map(kind_of, values)
    raise NoPlanError


def _watch(
    member: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, _Plan | None]:
    """The result of a call, and a plan for others of its kind if there is one."""
    operands = list[Any]()

    def apart(value: Any) -> Any:  # what is given twice may differ the next time
        if value.__class__ is not core.tensor:
            return value
        handle = interpreter.TensorHandle(value.handle.data, value.handle.dtype)
        operands.append(core.tensor(handle, value.type))
        return operands[-1]

    args, kwargs = tuple(map(apart, args)), {name: apart(value) for name, value in kwargs.items()}
    semantic = interpreter.interpreter_semantic
    builder = semantic.builder
    semantic.builder = watched = _WatchedBuilder(builder)
    try:
        result = member(*args, **kwargs)
    finally:
        semantic.builder = builder
    try:
        return result, _plan(watched.calls, operands, result)
    except NoPlanError:
        return result, None


def _plan(calls: list[Any], operands: list[Any], result: Any) -> _Plan:
    if result.__class__ is not core.tensor:
        raise NoPlanError
    varying = {id(operand.handle): number for number, operand in enumerate(operands)}
    constants, steps = list[Any](), list[tuple[Any, str, list[tuple[bool, int]]]]()

    def place_of(value: Any) -> tuple[bool, int]:
        """Whether it is a constant, and its number among those or among what varies."""
        if id(value) in varying:
            return False, varying[id(value)]
        if isinstance(value, (list, tuple, core.tuple)) and any(map(is_handle, value)):
            raise NoPlanError
        constants.append(value)
        return True, len(constants) - 1

    for function, name, args, returned in calls:
        is_folded = name.startswith("get_") or name in _FOLDED
        if is_folded and varying.keys().isdisjoint(map(id, args)):
            if is_handle(returned):  # and no type
                returned.data.flags.writeable = False
            continue
        steps.append((function, name, [*map(place_of, args)]))
        if is_handle(returned):
            varying[id(returned)] = len(operands) + len(steps) - 1
        elif returned is not None:
            raise NoPlanError
    place = place_of(result.handle)

    def settled(is_constant: bool, number: int) -> int:
        return number if is_constant else len(constants) + number

    done = [
        (function, taking([settled(*where) for where in places])) for function, _, places in steps
    ]
    names = [name for _, name, _ in steps]
    types = [operand.type for operand in operands]
    return _Plan(constants, done, names, settled(*place), result.type, types)
