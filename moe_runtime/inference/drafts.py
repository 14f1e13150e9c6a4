"""Drafts of the next tokens, and how many of them are worth a verification. No model, no clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Offer(NamedTuple):
    """So many tokens at most; ``grade`` groups offers that are about equally often right."""

    most: int
    grade: int


class Draft(NamedTuple):
    """Tokens that may follow, and the grade of their offer."""

    tokens: list[int]
    grade: int


class Drafter(Protocol):
    """Drafts for one text, which ``extend`` makes longer."""

    def extend(self, tokens: Sequence[int]) -> None: ...

    def offer(self, most: int) -> Offer: ...


class Source(Protocol):
    """Makes the drafters of a model's texts, and drafts for several of them at once."""

    def new(self) -> Drafter: ...

    def catch_up(self, drafters: Sequence[Any]) -> bool:
        """Computes some of what drafts need of the texts so far; whether anything was left."""
        ...

    def draft(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        """At most so many tokens of each text; fewer where it has not caught up."""
        ...

    def passed(self, drafters: Sequence[Any], firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """The model computed so many tokens of each text, from that one on, in this order."""


MOST_DRAFTED = 8
"""Tokens of a draft that a model writes."""
PLACES = (4, 2)
"""Latest tokens that are looked up, the longer ones first."""
LONGEST = 16
"""Tokens up to which the agreement of two places is counted."""


class Lookup:
    """Drafts what followed the latest tokens where they stood before (prompt lookup, Saxena 2023;
    LLMA, Yang et al. 2023), of several places the last one."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._place = 0  # of what was last offered

    def extend(self, tokens: Sequence[int]) -> None:
        known = self._tokens
        for token in tokens:
            for size in PLACES:
                if len(known) >= size:
                    self._behind[tuple(known[-size:])] = len(known)
            known.append(token)

    def offer(self, most: int) -> Offer:
        """At most so many tokens; none where the latest ones are new."""
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
        """So many tokens of what was last offered."""
        known, tokens = self._tokens, list[int]()
        for index in range(self._place, self._place + count):
            at = index - len(known)  # a text that repeats itself may go on doing so
            tokens.append(known[index] if at < 0 else tokens[at])
        return tokens


class Lookups:
    """The `Source` of `Lookup`."""

    def new(self) -> Lookup:
        return Lookup()

    def catch_up(self, drafters: Sequence[Lookup]) -> bool:
        return False

    def passed(self, drafters: Sequence[Any], firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """Looks at nothing but tokens."""

    def draft(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        """Nothing of texts that another source began, which was given up."""
        pairs = zip(drafters, counts, strict=True)
        return [one.draft(count) if isinstance(one, Lookup) else [] for one, count in pairs]


PRIOR_RIGHT = (0.6, 0.3, 0.5, 0.75, 0.9)
"""How often a drafted token is right, by grade, before that is known."""
_PRIOR_WEIGHT = 3.0
_KEPT_SHARE = 0.98
"""Of what is known of a grade, with each offer: what failed long ago is tried again."""
_PRIOR_ROW_SHARE = 0.15
"""Of a step's time for a sequence, what a row more takes before it is measured."""
LOSS_SHARE, FIRST_LOSS = 0.01, 0.25
"""Of all time, what drafts may have cost more than they saved; and of the time of a step."""
DEBT_SHARE, FIRST_DEBT = 0.01, 2.0
"""The same, for what a drafter computes of a text before it drafts."""
_FIRST_STEPS = 4
"""Steps without drafts that come first."""
_BASE_AGE, _AGE = 64, 512
"""Passes after which steps without drafts, and times of others, are measured again."""
_NEW_SHARE = 0.2
_MOST_GAINED = 4
"""Steps whose time, once gained, may be lost again at once."""
MOST_DEAR = 8
"""Steps whose time a drafter may cost, with the reads that its memory would spare, before it is
given up."""


BARREN = 16
"""Passes without a draft after which drafts are looked for in one pass of so many."""


COUNTS = ("draft_steps", "drafted_tokens", "accepted_drafts", "draft_failures")


class _Time:
    def __init__(self) -> None:
        self.seconds, self.count, self.latest = 0.0, 0, 0

    def add(self, seconds: float, now: int) -> None:
        self.count += 1
        self.seconds += max(_NEW_SHARE, 1 / self.count) * (seconds - self.seconds)
        self.latest = now


class DraftControl:
    """Chooses how many drafted tokens a pass verifies, by measured times and by how often drafts
    were right.

    A pass is worth the tokens that it is expected to give, per second. What drafts cost in all more
    than they saved stays within `LOSS_SHARE` of the time. All decisions follow from what is told.

    Attributes:
        most_rows: of a pass.
        is_too_dear: whether answers come sooner without the drafter, whose memory experts lack.
    """

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.reset_counts()
        self.is_too_dear = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets all times and what was right: another drafter comes, with other memory."""
        self._num_passes = 0
        self._times: dict[int, _Time] = {}
        self._of_token = _Time()  # to draft one
        self._right = [[0.0, 0.0] for _ in PRIOR_RIGHT]  # of each grade: right, judged
        self._total_s = self._lost_s = self._debt_s = self._dear_s = 0.0
        self._spared_share = _Time()  # of a step without drafts
        self._could_draft = False  # in the step that comes
        self._barren = 0  # passes since the last draft that might have had one
        self._is_held = False  # whether the step that comes may have none

    def reset_counts(self) -> None:
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """As `RuntimeStats` has them."""
        counts = {name: self._counts[name] for name in COUNTS}
        return counts | {"drafts_given_up": int(self.is_too_dear)}

    def choose(self, offers: Sequence[Offer]) -> list[int]:
        """Drafted tokens to verify of each sequence, which has a row without drafts too."""
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
        """Whether the next pass is not worth a look for drafts. It is then not measured, and
        taken to last as long as others."""
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
        """A pass for so many sequences had so many rows, those of drafted tokens included, which
        took so long to draft before. With the drafter's memory for experts it would have taken
        ``spared_s`` less, which counts where drafts could be chosen."""
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
        """So many tokens of a draft were right, and maybe the one after them was not."""
        self._counts["accepted_drafts"] += num_right
        right = self._right[grade]
        right[0] += num_right
        right[1] += num_right + has_failed
        self._lose(0.0, num_right, num_base)

    def may_catch_up(self, num_base: int) -> bool:
        """Whether drafters may compute what they lack, which takes time before it saves any."""
        base = self._times.get(num_base)
        limit_s = 0.0 if base is None else FIRST_DEBT * base.seconds
        return base is not None and self._debt_s <= DEBT_SHARE * self._total_s + limit_s

    def caught_up(self, seconds: float) -> None:
        """Drafters took so long for what they lacked."""
        self._total_s += seconds
        self._debt_s += seconds

    def failed(self) -> None:
        """Nothing could be drafted."""
        self._counts["draft_failures"] += 1

    def passed(self, seconds: float) -> None:
        """A pass that no draft may go with took so long, as one for a prompt does."""
        self._total_s += seconds
        self._barren = 0

    def _lose(self, seconds: float, num_tokens: int, num_base: int) -> None:
        """Seconds were spent, and tokens came that steps of so many sequences take time for. What
        is gained pays debts."""
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
        """Seconds of a pass, between measured numbers of rows or beyond them by their slope."""
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
