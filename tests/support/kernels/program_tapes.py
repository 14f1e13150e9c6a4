"""What a program of a kernel asks of Triton's interpreter, noted once and done again without it.

With arguments of one kind, pointers apart, a program differs from others in where it branches, in
how often it loops, and in its numbers. It is watched as far as it asks for a value to decide on one
of the first two: what it computed until then is a segment, and what follows a value is another one.
What is done again are operations on arrays: no Python of the kernel, no types, nothing that depends
on constants alone. Where a program decides on a value that no other one has decided on, the kernel
itself is called, is given what the program has loaded so far, and is watched from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from array_steps import is_handle, step_of, view_of
from triton.runtime import interpreter

# what depends on more than operands, or does more than return something
_NOT_PURE = tuple(
    f"create_{what}"
    for what in (
        *("get_", "load", "masked_load", "store", "masked_store", "atomic", "descriptor"),
        *("assert", "assume", "print", "barrier", "extern", "inline"),
    )
)


class Place:
    """Where a value lies among all that is known when a segment is done, once that is settled."""

    number = -1


class Noted(NamedTuple):
    """Something a program did.

    Attributes:
        name: of what it called; or what was asked of a value, to which the program kept.
        is_pure: whether doing it once more changes nothing, and gives the same.
        place: of the result, if it is computed where it is used by others.
        dtype: of the result.
    """

    name: str
    is_pure: bool
    place: Place | None
    dtype: Any


class Segment:
    """What is computed until a value is asked for, and what follows each value."""

    def __init__(self) -> None:
        self.constants: list[Any] = []
        self.steps: list[tuple[Callable[..., Any], Callable[[list[Any]], Any]]] = []
        self.log: list[Noted] = []
        self.asked: int | None = None
        self.ask: Callable[[Any], Any] = bool
        self.following: dict[Any, Segment] = {}


def replay(segment: Segment, known: list[Any]) -> tuple[list[Segment], Any] | None:
    """Does all that a program does, unless it decides on a value that is new: then as far as that.

    Returns:
        None, or the segments that were done and the value.
    """
    done = [segment]
    while True:
        known += segment.constants
        for function, take in segment.steps:
            known.append(function(*take(known)))
        if segment.asked is None:
            return None
        value = segment.ask(known[segment.asked])
        if value not in segment.following:
            return done, value
        segment = segment.following[value]
        done.append(segment)


class Tape:
    """Watches one program.

    Attributes:
        is_on: whether all that the program did so far could be noted.
    """

    def __init__(self, inputs: Iterable[Any], constants: Iterable[Any]) -> None:
        """Takes handles: of what differs between programs, and of what does not."""
        self.is_on = True
        self._segment = Segment()
        self._kept: list[Any] = []  # whose address stands for them
        self._constants = set[int]()
        self._places: dict[int, Place] = {}
        self._views: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        self._settled = 0
        self._pending: list[tuple[Callable[..., Any], list[Place], Place]] = []
        self._constant_places: list[Place] = []
        self._prefix: list[Noted] = []
        self._known: list[Any] = []
        self._position = 0
        for handle in inputs:
            self._note(handle, place := Place())
            place.number = self._settled
            self._settled += 1
        for handle in constants:
            self.constant(handle)

    def go_on(self, done: list[Segment], value: Any, known: list[Any]) -> None:
        """Behind what was done already: for a program that is called from its beginning."""
        self._prefix = [noted for segment in done for noted in segment.log]
        self._known, self._settled = known, len(known)
        done[-1].following[value] = self._segment

    def stop(self) -> None:
        """Notes nothing any more; what is still to be given from before is given."""
        self.is_on = False

    @property
    def segment(self) -> Segment:
        """The one that is being noted."""
        return self._segment

    def constant(self, handle: Any) -> None:
        """Takes note of a value that does not differ between programs."""
        if id(handle) not in self._constants:
            self._constants.add(id(handle))
            self._kept.append(handle)

    def do(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Calls something with handles among its arguments, and notes it."""
        is_pure = not name.startswith(_NOT_PURE)
        if self._position < len(self._prefix):
            return self._do_again(name, function, args, is_pure)
        result = function(*args)
        if self.is_on:
            self.note(name, function, args, result, is_pure=is_pure)
        return result

    def note(
        self, name: str, function: Callable[..., Any], args: Any, result: Any, *, is_pure: bool
    ) -> None:
        """Takes note of what was done, or of what cannot be noted."""
        handles = [*filter(is_handle, args)]
        if is_pure and all(id(handle) in self._constants for handle in handles):
            for each in result if isinstance(result, tuple) else [result]:
                if is_handle(each):
                    self.constant(each)
            return
        is_known = all(map(self._is_known, handles)) and not any(map(_has_handles, args))
        if is_known and name == "create_split":
            self._note_halves(args[0], result)
            return
        if not is_known or not (is_handle(result) or (result is None and not is_pure)):
            self.stop()
            return
        place = None
        if is_pure and (view := view_of(name, args, result)):
            self._note(result, view)
        else:
            again, operands = step_of(name, function, args, result, self._source)
            place = self._step(again, operands)
            if result is not None:
                self._note(result, place)
        dtype = None if result is None else result.dtype
        self._segment.log.append(Noted(name, is_pure, place, dtype))

    def _note_halves(self, whole: Any, halves: Any) -> None:
        for half, number in zip(halves, (0, 1), strict=True):
            place = self._step(itemgetter((..., number)), [whole])
            self._note(half, place)
            self._segment.log.append(Noted("create_split", True, place, half.dtype))

    def _do_again(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], is_pure: bool
    ) -> Any:
        handles = [*filter(is_handle, args)]
        if is_pure and all(id(handle) in self._constants for handle in handles):
            result = function(*args)
            for each in result if isinstance(result, tuple) else [result]:
                if is_handle(each):
                    self.constant(each)
            return result
        if name == "create_split":
            halves = function(*args)
            for half in halves:
                self._note(half, self._next(name).place)
            return halves
        noted = self._next(name)
        if noted.is_pure:
            result = function(*args)
        elif noted.dtype is None:
            return None
        else:
            assert noted.place is not None
            result = interpreter.TensorHandle(self._known[noted.place.number], noted.dtype)
        self._note(result, noted.place or view_of(name, args, result))
        return result

    def reduction(self, name: str, again: Callable[[Any], Any], operand: Any, result: Any) -> None:
        """Takes note of something pure that was done to one value without asking the builder."""
        if id(operand) in self._constants:
            self.constant(result)
        elif self._position < len(self._prefix):
            self._note(result, self._next(name).place)
        elif not self._is_known(operand):
            self.stop()
        elif self.is_on:
            place = self._step(again, [operand])
            self._note(result, place)
            self._segment.log.append(Noted(name, True, place, result.dtype))

    def ask(self, name: str, function: Callable[[Any], Any], handle: Any) -> Any:
        """What a program decides on."""
        value = function(handle.data)
        if id(handle) in self._constants:
            return value
        if self._position < len(self._prefix):
            self._next(name)
        elif self.is_on and not self._is_known(handle):
            self.stop()
        elif self.is_on:
            asked = self._place_of(handle)
            self._segment.log.append(Noted(name, True, None, None))
            self._settle()
            before, self._segment = self._segment, Segment()
            before.asked, before.ask = asked.number, function
            before.following[value] = self._segment
        return value

    def end(self) -> None:
        """The program has ended."""
        if self.is_on:
            self._settle()

    def _next(self, name: str) -> Noted:
        noted = self._prefix[self._position]
        if noted.name != name:
            raise RuntimeError(f"a program did {noted.name} before, and now {name}")
        self._position += 1
        return noted

    def _is_known(self, handle: Any) -> bool:
        address = id(handle)
        return address in self._places or address in self._views or address in self._constants

    def _note(self, handle: Any, where: Any) -> None:
        self._kept.append(handle)
        if where.__class__ is Place:
            self._places[id(handle)] = where
        else:
            self._views[id(handle)] = where

    def _source(self, handle: Any) -> Any:
        """What a view of other lengths shows; a handle that is no view shows itself."""
        return self._views[id(handle)][0] if id(handle) in self._views else handle

    def _place_of(self, handle: Any) -> Place:
        address = id(handle)
        if address not in self._places:
            if address in self._views:
                source, function = self._views[address]
                place = self._step(function, [source])
            else:
                place = Place()
                self._segment.constants.append(handle.data)
                self._constant_places.append(place)
            self._places[address] = place
        return self._places[address]

    def _step(self, function: Callable[..., Any], operands: list[Any]) -> Place:
        places, place = [*map(self._place_of, operands)], Place()
        self._pending.append((function, places, place))
        return place

    def _settle(self) -> None:
        for place in (*self._constant_places, *(place for *_, place in self._pending)):
            place.number = self._settled
            self._settled += 1
        self._segment.steps = [
            (function, taking([each.number for each in places]))
            for function, places, _ in self._pending
        ]
        self._pending, self._constant_places = [], []


class TapedBuilder:
    """Has a tape note what is asked of a builder."""

    def __init__(self, builder: Any, tape: Tape) -> None:
        self._builder, self.tape = builder, tape

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not callable(found):
            return found
        return lambda *args: self.tape.do(name, found, args)


def taking(places: list[int]) -> Callable[[list[Any]], Any]:
    """A function that takes a step's arguments from what is known."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda known: [known[place] for place in places]


def _has_handles(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(map(is_handle, value))
