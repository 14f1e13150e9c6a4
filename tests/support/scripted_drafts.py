"""Drafts for tests: told beforehand, verified whatever they cost."""

from collections.abc import Callable, Sequence
from typing import Any

from moe_runtime.inference.drafts import DraftControl, Lookups, Offer


class EveryDraft(DraftControl):
    """Has as many drafted tokens verified as there may be."""

    def choose(self, offers: Sequence[Offer]) -> list[int]:
        left = self.most_rows - len(offers)
        chosen = []
        for offer in offers:
            chosen.append(min(left, offer.most))
            left -= chosen[-1]
        return chosen

    def may_catch_up(self, num_base: int) -> bool:
        return True


class Told:
    """Drafts what is told to follow, but for every third token."""

    def __init__(self, whole: Sequence[int], most: int = 15) -> None:
        self.whole, self.most, self.place = list(whole), most, 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.place += len(tokens)

    def offer(self, most: int) -> Offer:
        return Offer(max(min(most, self.most, len(self.whole) - self.place), 0), 1)

    def draft(self, count: int) -> list[int]:
        places = range(self.place, self.place + count)
        right = [self.whole[place] for place in places]
        return [
            token if place % 3 else (token + 1) % 64
            for place, token in zip(places, right, strict=True)
        ]


class Scripted(Lookups):
    """Makes drafters of tests."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.new = make
