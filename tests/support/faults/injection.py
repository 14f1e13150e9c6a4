"""Raises an exception where a call enters functions of ours.

An operation of a store defers Ctrl-C to its end, so that nothing strikes its monitor: signals that
are sent while it works prove that (``tests/memory/test_recovery.py``).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import moe_runtime
from moe_runtime.errors import MoERuntimeError

ROOT = str(Path(moe_runtime.__file__).parent)
KINDS = (KeyboardInterrupt, MemoryError, OSError, RuntimeError)
MONITORS = ("Monitor.", "NativeReadQueue.deliver", "NativeReadQueue.sleep", "NativeReadQueue.start")


class Site(NamedTuple):
    """A function, by its first line."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename[len(ROOT) + 1 :]}:{self.line}"


def is_ours(code: CodeType) -> bool:
    """Whether code is one that exceptions strike."""
    return code.co_filename.startswith(ROOT) and not code.co_qualname.startswith(MONITORS)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """What other calls have left is ended before, not at a time that the garbage collector chooses,
    so that none of its lines are among those of a call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def calls_of(call: Callable[[], Any]) -> Counter[Site]:
    """The functions that a call enters in this thread, by their first lines, and how often."""
    with without_collection():
        sites = traced(call)
    # a generator may be entered to close it, where nothing raises
    return Counter({s: n for s, n in sites.items() if not s.code.co_flags & inspect.CO_GENERATOR})


def traced(call: Callable[[], Any]) -> Counter[Site]:
    """The functions of ours that a call enters, generators included, by their first lines."""
    seen: Counter[Site] = Counter()

    def enter(frame: FrameType, _event: str, _: Any) -> None:
        if is_ours(frame.f_code):
            seen[Site(frame.f_code, frame.f_lineno)] += 1

    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(None)
    return seen


def raise_on(
    site: Site, occurrence: int, kind: type[BaseException], call: Callable[[], Any]
) -> bool:
    """Makes a call in which an exception strikes at a site, some time.

    Returns:
        Whether it came to that; how often a site is passed may depend on how quick the disk is.
    """
    left, struck, is_done, before = occurrence, False, False, _autocast_state()

    def enter(frame: FrameType, _event: str, _: Any) -> None:
        nonlocal left, struck
        if frame.f_code is site.code and not struck:
            left -= 1
            if left == 0:
                struck = True
                raise kind("injected")

    sys.settrace(enter)
    try:
        with contextlib.suppress(*KINDS, MoERuntimeError):  # some become errors of the runtime
            call()
            is_done = True
    finally:
        sys.settrace(None)
    assert struck or is_done, "the call failed on its own"
    # inside an autocast that is never left, torch keeps narrow copies of weights that change
    assert _autocast_state() == before, "the call left an autocast entered"
    return struck


@contextlib.contextmanager
def struck(number: int, kind: type[BaseException], folder: str) -> Iterator[None]:
    """Has an exception strike the n-th call of functions in a folder that this thread makes."""
    left = number

    def enter(frame: FrameType, _event: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if not code.co_filename.startswith(f"{ROOT}/{folder}") or not is_ours(code):
            return
        if not code.co_flags & inspect.CO_GENERATOR:
            left -= 1
            if left == 0:
                raise kind("injected")

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)


def _autocast_state() -> tuple[int, bool]:
    """Contexts of autocast that this thread is in, and whether it is on for the CPU."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting(), torch.is_autocast_enabled("cpu")


class StruckThreads:
    """A function that other threads call, in which an exception strikes one of them once.

    Attributes:
        sites: of functions that its calls entered while they were `listed`.
        target: the site to strike and with what; None when it has been struck, or none is meant.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.sites: dict[Site, int] = {}
        self.target: tuple[Site, type[BaseException]] | None = None
        self._function = function
        self._lists = False

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """Lists the functions of calls."""
        with without_collection():
            self._lists = True
            yield
        self._lists = False

    def __call__(self, *args: Any) -> Any:
        target, results = self.target, []
        if self._lists:
            self.sites.update(traced(lambda: results.append(self._function(*args))))
            return results[0]
        if target is None:
            return self._function(*args)
        site, kind = target

        def enter(frame: FrameType, _event: str, _: Any) -> Any:
            if frame.f_code is site.code and self.target is target:
                self.target = None
                raise kind("injected")

        sys.settrace(enter)
        try:
            return self._function(*args)
        finally:
            sys.settrace(None)
