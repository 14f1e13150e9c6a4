"""Drafts by lookup, and the number of drafted tokens worth verifying. No model, no clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Offer(NamedTuple):
    """At most ``most`` tokens; ``grade`` groups offers with about equal accuracy."""

    most: int
    grade: int


class Draft(NamedTuple):
    """Drafted tokens, and the grade of their offer."""

    tokens: list[int]
    grade: int


class Drafter(Protocol):
    """Drafts for one text; ``extend`` appends tokens of the text."""

    def extend(self, tokens: Sequence[int]) -> None: ...

    def offer(self, most: int) -> Offer: ...


class Source(Protocol):
    """Makes the drafters of a model's texts, and drafts for several texts at once."""

    def new(self) -> Drafter: ...

    def catch_up(self, drafters: Sequence[Any]) -> bool:
        """Computes a part of the texts that drafts need; returns whether anything was missing."""
        ...

    def draft(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        """Up to ``counts`` tokens per text; fewer if the source has not caught up."""
        ...

    def passed(self, drafters: Sequence[Any], firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """The model has computed ``sizes`` tokens of each text, from token ``firsts`` on."""


MOST_DRAFTED = 8
"""Most tokens of a draft from a model."""
PLACES = (4, 2)
"""Numbers of latest tokens to look up, longest first."""
LONGEST = 16
"""Most matching tokens to count before two places."""


class Lookup:
    """Drafts the tokens that followed the last earlier occurrence of the latest tokens (prompt
    lookup, Saxena 2023; LLMA, Yang et al. 2023)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._place = 0  # of the last offer

    def extend(self, tokens: Sequence[int]) -> None:
        known = self._tokens
        for token in tokens:
            for size in PLACES:
                if len(known) >= size:
                    self._behind[tuple(known[-size:])] = len(known)
            known.append(token)

    def offer(self, most: int) -> Offer:
        """At most ``most`` tokens; none if the latest tokens are new."""
        known = self._tokens
        for size in PLACES:
            place = self._behind.get(tuple(known[-size:]))
            if place is not None:
                break
        else:
            return Offer(0, 0)
        self._place, agreed = place, 0
        while agreed < min(LONGEST, place) and known[place - 1 - agreed] == known[-1 - agreed]:
            agreed += 1
        return Offer(most, agreed.bit_length() - 1)

    def draft(self, count: int) -> list[int]:
        """The first ``count`` tokens of the last offer."""
        known, tokens = self._tokens, list[int]()
        for index in range(self._place, self._place + count):
            at = index - len(known)  # a repetition may continue
            tokens.append(known[index] if at < 0 else tokens[at])
        return tokens


class Lookups:
    """The `Source` of `Lookup`."""

    def new(self) -> Lookup:
        return Lookup()

    def catch_up(self, drafters: Sequence[Lookup]) -> bool:
        return False

    def passed(self, drafters: Sequence[Any], firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """Needs only tokens."""

    def draft(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        """No tokens for texts of an earlier source."""
        pairs = zip(drafters, counts, strict=True)
        return [one.draft(count) if isinstance(one, Lookup) else [] for one, count in pairs]


PRIOR_RIGHT = (0.6, 0.3, 0.5, 0.75, 0.9)
"""Prior accuracy of a drafted token, by grade."""
_PRIOR_WEIGHT = 3.0
_KEPT_SHARE = 0.98
"""Decay of a grade's statistics per offer, so that old failures are tried again."""
_PRIOR_ROW_SHARE = 0.15
"""Prior time of one more row, as a share of a step's time per sequence."""
LOSS_SHARE, FIRST_LOSS = 0.01, 0.25
"""Allowed net loss through drafts: a share of all time, plus a share of one step's time."""
DEBT_SHARE, FIRST_DEBT = 0.01, 2.0
"""The same for the time in which a drafter catches up with a text."""
_FIRST_STEPS = 4
"""First steps without drafts."""
_BASE_AGE, _AGE = 64, 512
"""Passes until the time of steps without drafts, and other times, are measured again."""
_NEW_SHARE = 0.2
_MOST_GAINED = 4
"""Most steps of saved time that later losses may use up."""
MOST_DEAR = 8
"""Steps of net loss, with reads that the drafter's memory would save, until the drafter is
closed."""
BARREN = 16
"""Passes without a draft until only one of so many passes looks for drafts."""

COUNTS = ("draft_steps", "drafted_tokens", "accepted_drafts", "draft_failures")


class _Time:
    def __init__(self) -> None:
        self.seconds, self.count, self.latest = 0.0, 0, 0

    def add(self, seconds: float, now: int) -> None:
        self.count += 1
        self.seconds += max(_NEW_SHARE, 1 / self.count) * (seconds - self.seconds)
        self.latest = now


class DraftControl:
    """Chooses the number of drafted tokens of a pass, by measured times and accuracy.

    It maximises the expected tokens per second. The net loss through drafts stays within
    `LOSS_SHARE` of the time. Decisions depend only on calls of this object.

    Attributes:
        most_rows: of a pass.
        is_too_dear: answers come sooner if experts have the drafter's memory.
    """

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.reset_counts()
        self.is_too_dear = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Resets times and accuracies for another drafter."""
        self._num_passes = 0
        self._times: dict[int, _Time] = {}
        self._of_token = _Time()  # to draft one token
        self._right = [[0.0, 0.0] for _ in PRIOR_RIGHT]  # of each grade: right, judged
        self._total_s = self._lost_s = self._debt_s = self._dear_s = 0.0
        self._spared_share = _Time()  # of a step without drafts
        self._could_draft = False  # in the next step
        self._barren = 0  # passes since the last draft, those without permission left out
        self._is_held = False  # the next step may have no draft

    def reset_counts(self) -> None:
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """The fields of `RuntimeStats`."""
        counts = {name: self._counts[name] for name in COUNTS}
        return counts | {"drafts_given_up": int(self.is_too_dear)}

    def choose(self, offers: Sequence[Offer]) -> list[int]:
        """Numbers of drafted tokens per sequence, besides its first row."""
        num_base, none = len(offers), [0] * len(offers)
        if not any(offer.most for offer in offers):
            return none
        base, self._could_draft = self._times.get(num_base), num_base < self.most_rows
        self._forget_old()
        for grade in {offer.grade for offer in offers if offer.most}:
            self._right[grade] = [value * _KEPT_SHARE for value in self._right[grade]]
        if base is None or base.count < _FIRST_STEPS or self._num_passes - base.latest > _BASE_AGE:
            self._is_held = True
            return none
        if self._lost_s > LOSS_SHARE * self._total_s + FIRST_LOSS * base.seconds:
            self._is_held = True
            return none
        gains = [
            (gain, -place, index)
            for index, offer in enumerate(offers)
            for place, gain in enumerate(self._gains(offer))
        ]
        gains = sorted(gains, reverse=True)[: max(self.most_rows - num_base, 0)]
        best, num_best = num_base / base.seconds, 0
        totals = itertools.accumulate((gain for gain, *_ in gains), initial=num_base)
        for num_drafted, expected in enumerate(totals):
            seconds = self._seconds_of(num_base + num_drafted, num_base)
            rate = expected / (seconds + num_drafted * self._of_token.seconds)
            if rate > best:
                best, num_best = rate, num_drafted
        chosen = none
        for *_, index in gains[:num_best]:
            chosen[index] += 1
        return chosen

    def rests(self) -> bool:
        """Whether the next pass should skip drafting. It is then not measured, and counts with the
        usual time."""
        if self._barren < BARREN or self._barren % BARREN == 0:
            return False
        self._barren += 1
        if (known := self._times.get(1)) is not None:
            self._total_s += known.seconds
        self._counts["draft_steps"] += 1
        return True

    def measured(
        self,
        num_base: int,
        num_rows: int,
        seconds: float,
        drafting_s: float = 0.0,
        spared_s: float = 0.0,
    ) -> None:
        """Counts a pass of ``num_base`` sequences and ``num_rows`` rows with drafts.

        ``drafting_s`` is the time of drafting. Without the drafter's memory the pass would have
        been ``spared_s`` faster; this counts if drafts could be chosen.
        """
        could_draft, self._could_draft = self._could_draft, False
        self._num_passes += 1
        is_held, self._is_held = self._is_held, False
        self._barren = 0 if num_rows > num_base else self._barren + (not is_held)
        self._counts["draft_steps"] += num_base
        self._counts["drafted_tokens"] += num_rows - num_base
        self._total_s += seconds + drafting_s
        self._times.setdefault(num_rows, _Time()).add(seconds, self._num_passes)
        if num_rows > num_base:
            self._of_token.add(drafting_s / (num_rows - num_base), self._num_passes)
            self._lose(seconds + drafting_s, num_base, num_base)
        elif spared_s or self._spared_share.seconds:
            self._spared_share.add(spared_s / seconds if seconds else 0.0, self._num_passes)
            if could_draft:
                self._lose(self._times[num_base].seconds, num_base, num_base)

    def judged(self, grade: int, num_right: int, *, has_failed: bool, num_base: int = 1) -> None:
        """Counts right tokens of a draft, and whether the next one was wrong."""
        self._counts["accepted_drafts"] += num_right
        right = self._right[grade]
        right[0] += num_right
        right[1] += num_right + has_failed
        self._lose(0.0, num_right, num_base)

    def may_catch_up(self, num_base: int) -> bool:
        """Whether drafters may catch up with texts, which costs time before it saves any."""
        base = self._times.get(num_base)
        limit_s = 0.0 if base is None else FIRST_DEBT * base.seconds
        return base is not None and self._debt_s <= DEBT_SHARE * self._total_s + limit_s

    def caught_up(self, seconds: float) -> None:
        """Counts the time in which drafters caught up."""
        self._total_s += seconds
        self._debt_s += seconds

    def failed(self) -> None:
        """Counts a failure."""
        self._counts["draft_failures"] += 1

    def passed(self, seconds: float) -> None:
        """Counts a pass that cannot have drafts, such as a prompt."""
        self._total_s += seconds
        self._barren = 0

    def _lose(self, seconds: float, num_tokens: int, num_base: int) -> None:
        """Books the seconds of a pass against the time of ordinary steps for its tokens. Gains pay
        debts."""
        base = self._times.get(num_base)
        if base is None:
            return
        change_s = seconds - num_tokens / num_base * base.seconds
        most_s = _MOST_GAINED * base.seconds
        self._lost_s = max(self._lost_s + change_s, -most_s)
        self._debt_s = max(self._debt_s + change_s, -most_s)
        change_s += num_tokens / num_base * base.seconds * self._spared_share.seconds
        self._dear_s = max(self._dear_s + change_s, -most_s)
        lacks_room = self._spared_share.seconds > 0
        self.is_too_dear |= lacks_room and self._dear_s > MOST_DEAR * base.seconds

    def _gains(self, offer: Offer) -> list[float]:
        right, judged = self._right[offer.grade]
        prior = PRIOR_RIGHT[offer.grade]
        chance = (right + _PRIOR_WEIGHT * prior) / (judged + _PRIOR_WEIGHT)
        return [chance**place for place in range(1, offer.most + 1)]

    def _seconds_of(self, num_rows: int, num_base: int) -> float:
        """Seconds of a pass, interpolated or extrapolated over measured numbers of rows."""
        if num_rows in self._times:
            return self._times[num_rows].seconds
        known = sorted((rows, time.seconds) for rows, time in self._times.items())
        below = [each for each in known if each[0] < num_rows]
        above = [each for each in known if each[0] > num_rows]
        base = self._times[num_base]
        if not below:
            return base.seconds
        rows, seconds = below[-1]
        if above:
            slope = (above[0][1] - seconds) / (above[0][0] - rows)
        elif len(below) > 1:
            slope = max(seconds - below[0][1], 0.0) / (rows - below[0][0])
        else:
            slope = _PRIOR_ROW_SHARE * base.seconds / num_base
        return seconds + slope * (num_rows - rows)

    def _forget_old(self) -> None:
        old = [rows for rows, time in self._times.items() if self._num_passes - time.latest > _AGE]
        for rows in old:
            del self._times[rows]
        if self._num_passes - self._of_token.latest > _AGE:
            self._of_token = _Time()
