"""What clients ask and when: prompts and answers of drawn lengths, arrivals of a drawn rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

_MOST_TOKENS = 1 << 20
_WORDS = """
    the of and to in that is was he for it with as his on be at by had not are but from or have
    an they which one you were her all she there would their we him been has when who will more
    no if out so said what up its about into than them can only other new some could time these
    two may then do first any my now such like our over man me even most made after also did many
"""
"""Common English words, most of which most tokenisers know as one token."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens from `low` to `high`, each as likely."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        """One of them."""
        return random.randint(self.low, self.high)


def parse_lengths(text: str, name: str) -> Lengths:
    """Reads ``N`` or ``LOW:HIGH``.

    Raises:
        ValueError: it is neither.
    """
    found = re.fullmatch(r"([0-9]{1,7})(?::([0-9]{1,7}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= _MOST_TOKENS:
        raise ValueError(
            f"{name} must be a number of tokens or LOW:HIGH, from 1 to {_MOST_TOKENS}, got {text!r}"
        )
    return Lengths(low, high)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request.

    Attributes:
        prompt: text.
        max_tokens: most tokens of the answer.
    """

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How many tokens a server makes of drawn words, found by asking it.

    Attributes:
        per_word: tokens of one more word.
        around: tokens that stand around the words, those of a chat template among them.
    """

    per_word: float = 1.0
    around: float = 0.0

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> TokenCount:
        """From words and tokens of two prompts; one token a word where these make no sense."""
        words, tokens = long[0] - short[0], long[1] - short[1]
        if words <= 0 or tokens <= 0:
            return cls()
        per_word = tokens / words
        return cls(per_word, max(short[1] - per_word * short[0], 0.0))

    def words(self, tokens: int) -> int:
        """How many words come nearest to so many tokens; at least one."""
        return max(round((tokens - self.around) / self.per_word), 1)


def draw_words(count: int, random: Random) -> str:
    """A text of so many words that no earlier text begins with, but by chance."""
    return " ".join(random.choices(_WORDS.split(), k=count))


def make_requests(
    num_requests: int,
    *,
    prompt: Lengths,
    output: Lengths,
    count: TokenCount,
    texts: Sequence[str],
    random: Random,
) -> list[LoadRequest]:
    """Draws requests.

    Args:
        num_requests: how many.
        prompt: tokens of a prompt, where there are no texts.
        output: most tokens of an answer.
        count: how words become tokens.
        texts: prompts, in turn and from the first one again, instead of drawn ones.
        random: decides.
    """
    return [
        LoadRequest(
            texts[number % len(texts)]
            if texts
            else draw_words(count.words(prompt.draw(random)), random),
            output.draw(random),
        )
        for number in range(num_requests)
    ]


def arrivals(num_requests: int, rate: float, random: Random) -> list[float]:
    """Seconds from the start at which requests come: a Poisson process, the first one at once.

    Args:
        num_requests: how many.
        rate: requests a second, in the mean.
        random: decides.
    """
    at_s, found = 0.0, []
    for _ in range(num_requests):
        found.append(at_s)
        at_s += random.expovariate(rate)
    return found
