"""Builtins of Triton's language that are worked out once for operands of one kind.

What a builtin asks of the builder depends on the types of its tensors and on constants alone: a
compiler knows no more. Triton's interpreter finds it out anew at every call, which takes ten times
as long as the few operations on arrays that come of it. Here a builtin is watched the first time,
and what it asked for is asked for again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import triton.language.core as core
from triton.runtime import interpreter

# what makes constants of constants
_FOLDED = ("create_make_range", "create_splat")


class _Plan(NamedTuple):
    """Calls of a builder, in order.

    Attributes:
        constants: handles that are the same at every call; those of the operands follow.
        steps: functions, and what takes their arguments from all that is known so far.
        finish: makes the builtin's result of all that is known in the end.
        types: those of the operands, which live as long as their addresses stand for them.
    """

    constants: list[Any]
    steps: list[tuple[Callable[..., Any], Callable[[list[Any]], Any]]]
    finish: Callable[[list[Any]], Any]
    types: list[Any]


class _NoPlanError(Exception):
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

    @functools.wraps(member)
    def call(*args: Any, **kwargs: Any) -> Any:
        semantic = interpreter.interpreter_semantic
        if type(semantic.builder) is _WatchedBuilder:
            return member(*args, **kwargs)
        handles, kind = list[Any](), list[Any](kwargs)
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value.__class__ is core.tensor:
                handles.append(value.handle)
                kind.append(id(value.type))
            else:
                try:
                    kind.append(_kind_of(value))
                except _NoPlanError:
                    return member(*args, **kwargs)
        key = tuple(kind)
        try:
            plan = plans[key]
        except KeyError:
            result, plans[key] = _watch(member, args, kwargs)
            return result
        if plan is None:
            return member(*args, **kwargs)
        known = plan.constants + handles
        for function, arguments in plan.steps:
            known.append(function(*arguments(known)))
        return plan.finish(known)

    return call


def _kind_of(constant: Any) -> Any:
    """What tells a constant from others; numbers that are equal may be of several types."""
    kind = constant.__class__
    if kind is int or kind is bool or kind is str or constant is None:
        return kind, constant
    if kind is float:
        return kind, constant.hex()
    if kind is core.dtype:
        return kind, constant.name
    if kind is core.constexpr:
        return kind, _kind_of(constant.value)
    if kind is slice:
        return kind, *map(_kind_of, (constant.start, constant.stop, constant.step))
    if kind is tuple or kind is list:
        return kind, *map(_kind_of, constant)
    raise _NoPlanError


def _watch(
    member: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, _Plan | None]:
    """The result of a call, and a plan for others of its kind if there is one."""
    operands = list[Any]()

    def apart(value: Any) -> Any:  # what is given twice may differ the next time
        if value.__class__ is not core.tensor:
            return value
        handle = value.handle
        operands.append(core.tensor(interpreter.TensorHandle(handle.data, handle.dtype), value.type))
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
    except _NoPlanError:
        return result, None


def _plan(calls: list[Any], operands: list[Any], result: Any) -> _Plan:
    given = {id(operand.handle) for operand in operands}
    varying, constants, steps = set(given), list[Any](), list[Any]()
    for call in calls:
        _, name, args, returned = call
        is_constant = name.startswith("get_") or name in _FOLDED
        if is_constant and varying.isdisjoint(map(id, args)):
            if isinstance(returned, interpreter.TensorHandle):  # and no type
                returned.data.flags.writeable = False
        else:
            varying.add(id(returned))
            steps.append(call)
    places = dict[int, int]()

    def place_of(value: Any) -> int:
        if id(value) not in places:
            if id(value) in varying or _holds_handles(value):
                raise _NoPlanError
            places[id(value)] = ~len(constants)
            constants.append(value)
        return places[id(value)]

    places.update((id(operand.handle), number) for number, operand in enumerate(operands))
    planned = []
    for number, (function, _, args, returned) in enumerate(steps, len(operands)):
        planned.append((function, [*map(place_of, args)]))
        if not isinstance(returned, interpreter.TensorHandle) and returned is not None:
            raise _NoPlanError
        if returned is not None:
            places[id(returned)] = number
    if result is None:
        finish: Callable[[list[Any]], Any] = _nothing
    elif result.__class__ is core.tensor and isinstance(result.handle, interpreter.TensorHandle):
        place = _settle([place_of(result.handle)], constants)[0]
        finish = functools.partial(_tensor, place, result.type)
    else:
        raise _NoPlanError
    found = [(function, _taking(_settle(where, constants))) for function, where in planned]
    return _Plan(constants, found, finish, [operand.type for operand in operands])


def _holds_handles(value: Any) -> bool:
    return isinstance(value, (list, tuple, core.tuple)) and any(
        isinstance(each, interpreter.TensorHandle) for each in value
    )


def _settle(places: list[int], constants: list[Any]) -> list[int]:
    """Places where all constants lie before what is not: theirs are counted by complements."""
    return [~place if place < 0 else len(constants) + place for place in places]


def _taking(places: list[int]) -> Callable[[list[Any]], Any]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda known: [known[place] for place in places]


def _nothing(known: list[Any]) -> None:
    """The result of what stores."""


def _tensor(place: int, type: Any, known: list[Any]) -> Any:
    return core.tensor(known[place], type)
