"""How many tokens of prompts go into a step with sequences that decode, from measured times.

A step of more tokens costs less per token, since it reads each expert once; but decoding sequences
wait for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MIN_TOKENS = 16
"""Tokens of prompts that a step may always have."""
MAX_COST_RATIO = 3.0
"""A token takes at most so many times its time in the most efficient step."""
FREE_GROWTH = 1.25
"""Where all steps take too long, more tokens may make them so much longer: then there are fewer."""
_NEW_SHARE = 0.3
_STEPS_KEPT = 500
"""Steps after which larger sizes count as never measured: one slow time would exclude them for
ever."""


class StepSizes:
    """Chooses sizes of steps that keep decoding sequences from waiting long.

    Sizes are doubled from `MIN_TOKENS`. A step with prompts takes at most ``max_slowdown`` times as
    long as one without, as far as `MAX_COST_RATIO` allows: with experts on a disk, a step of few
    tokens reads nearly as much as one of many. A larger size is tried when it would still be short
    enough: it takes at most twice the time of the one before, and no more per additional token than
    that one did. Where every efficient step takes longer than that, it takes as many tokens as cost
    little more time.
    """

    def __init__(
        self, most_tokens: int, max_slowdown: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        sizes = [MIN_TOKENS]
        while sizes[-1] < most_tokens:
            sizes.append(2 * sizes[-1])
        self._sizes = [min(size, most_tokens) for size in sizes]
        self._max_slowdown = max_slowdown
        self._clock = clock
        self._seconds: dict[int, float] = {}
        self._num_timed = 0
        self._decode_s: float | None = None
        self._least_token_s = math.inf
        self._is_ignored = False

    @contextmanager
    def timed(self, *, num_prompt: int, num_decoding: int) -> Iterator[None]:
        self._is_ignored = False
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        if self._is_ignored:
            return
        if not num_prompt:
            if num_decoding:
                self._decode_s = _mean(self._decode_s, seconds)
            return
        token_s = seconds / num_prompt
        self._least_token_s = min(token_s, self._least_token_s)
        size = max((size for size in self._sizes if size <= num_prompt), default=None)
        if num_decoding and size is not None:
            self._seconds[size] = _mean(self._seconds.get(size), token_s * size)
            self._num_timed += 1
            if self._num_timed % _STEPS_KEPT == 0:
                most = self.most_tokens()
                self._seconds = {one: s for one, s in self._seconds.items() if one <= most}

    def ignore_step(self) -> None:
        self._is_ignored = True

    def most_tokens(self) -> int:
        """Tokens of prompts for the next step beside sequences that decode."""
        size = self._sizes[0]
        for index, larger in enumerate(self._sizes[1:]):
            if size not in self._seconds:
                break
            seconds = self._seconds[size]
            expected = self._seconds.get(larger, self._expected(index))
            most_s = seconds * larger / size
            if expected is not None:
                most_s = min(expected, most_s)
            is_efficient = seconds / size <= MAX_COST_RATIO * self._least_token_s
            if not self._is_short(most_s) and is_efficient:
                break
            size = larger
        if size in self._seconds and not self._is_short(self._seconds[size]):
            return self._at_nearly_the_same_time(size)
        return size

    def _at_nearly_the_same_time(self, size: int) -> int:
        """The largest size whose steps take little longer, by measured times and their slope."""
        most_s = FREE_GROWTH * self._seconds[size]
        index = self._sizes.index(size)
        while index + 1 < len(self._sizes):
            larger = self._seconds.get(self._sizes[index + 1], self._expected(index))
            if larger is None or larger > most_s:
                break
            index += 1
        return self._sizes[index]

    def _expected(self, index: int) -> float | None:
        """Seconds of a step of the next size, if more tokens cost what the last ones did."""
        smaller, size, larger = self._sizes[max(index - 1, 0)], *self._sizes[index : index + 2]
        if smaller == size or not {smaller, size} <= self._seconds.keys():
            return None
        seconds = self._seconds[size]
        token_s = max(seconds - self._seconds[smaller], 0.0) / (size - smaller)
        return seconds + token_s * (larger - size)

    def _is_short(self, seconds: float) -> bool:
        if self._decode_s is None:
            return math.isinf(self._max_slowdown)
        return seconds <= self._max_slowdown * self._decode_s


def _mean(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _NEW_SHARE * (seconds - before)
