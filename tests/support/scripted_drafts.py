"""Drafts for tests: told beforehand, verified whatever they cost."""

from collections.abc import Sequence

from moe_runtime.inference.drafts import Draft, DraftControl


class EveryDraft(DraftControl):
    """Has as many drafted tokens verified as there may be."""

    def choose(self, offers: Sequence[Draft]) -> list[int]:
        left = self.most_rows - len(offers)
        chosen = []
        for offer in offers:
            chosen.append(min(left, len(offer.tokens)))
            left -= chosen[-1]
        return chosen


class Told:
    """Drafts what is told to follow, but for every third token."""

    def __init__(self, whole: Sequence[int], most: int = 15) -> None:
        self.whole, self.most, self.place = list(whole), most, 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.place += len(tokens)

    def draft(self, most: int) -> Draft:
        places = range(self.place, min(self.place + min(most, self.most), len(self.whole)))
        right = [self.whole[place] for place in places]
        tokens = [
            token if place % 3 else (token + 1) % 64
            for place, token in zip(places, right, strict=True)
        ]
        return Draft(tokens, 1)
