"""Text comes in pieces that are whole: no part of a character, nothing of a stop string."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.serving.http.answer_text import AnswerText, MarkSearch
from moe_runtime.serving.requests import NewToken

TEXTS = ["naïve café", "日本語のテキスト", "🦊🦊 fox", "a\n\n  b", "العربية", "x" * 40]
WORDS = st.text(alphabet="abc<", max_size=30)
STOPS = st.lists(st.text(alphabet="abc<", min_size=1, max_size=4), max_size=4)


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    text = IncrementalText(tokenizer.decode)
    return [*(text.add(token) for token in ids), text.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(2, 4095), max_size=30))
def test_pieces_together_are_the_text(tokenizer, ids):
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_text_are_not_waited_for_for_ever(tokenizer):
    lone = tokenizer("🦊")["input_ids"][-1]
    ids = [lone] * 100
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(map(len, pieces[:50])) >= 30


def test_special_tokens_have_no_text_unless_they_are_shown(tokenizer):
    ids = [*tokenizer("one")["input_ids"], 0, *tokenizer(" two")["input_ids"]]
    text = IncrementalText(tokenizer.decode, frozenset({0}))
    assert "".join(map(text.add, ids)) == "one two"


@given(text=WORDS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_text_ends_before_the_stop_string_that_is_whole_first(text, stops, cuts):
    ends = sorted((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    expected = text[: ends[0][1]] if ends else text
    search, sent, found = MarkSearch(stops), "", None
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        free, found, rest = search.add(text[start:end])
        sent += free
        assert expected.startswith(sent)
        if found:
            assert sent + found + rest == text[:end]
            break
    assert sent + ("" if found else search.end()) == expected


def test_tokens_are_released_with_their_text(tokenizer):
    ids = tokenizer("one two three")["input_ids"]
    answer = AnswerText(IncrementalText(tokenizer.decode), ["thr"], frozenset())
    pieces = [answer.add(NewToken(token, -1.0)) for token in ids]
    stopped = next(piece for piece in pieces if piece.finish)
    assert stopped.finish == "stop"
    assert "".join(piece.text for piece in pieces) == "one two "
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.offset for token in tokens] == [
        len(tokenizer.decode(ids[:at])) for at in range(len(tokens))
    ]
    assert all(token.offset < len("one two ") for token in tokens)


def test_a_stop_token_ends_the_text_and_is_reported(tokenizer):
    ids = tokenizer("one")["input_ids"]
    answer = AnswerText(IncrementalText(tokenizer.decode), ["zz"], frozenset({7}))
    pieces = [*(answer.add(NewToken(token, -1.0)) for token in [*ids, 7]), answer.end("stop")]
    assert "".join(piece.text for piece in pieces) == "one"
    assert [token.token_id for piece in pieces for token in piece.tokens] == [*ids, 7]


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "a"), (2, "a"), (3, "abca"), (5, "abca"), (6, "abcabca")]
)
def test_a_stop_string_ends_no_answer_before_its_least_tokens(min_tokens, expected):
    text = IncrementalText(lambda ids: "".join(map(chr, ids)))
    answer = AnswerText(text, ["bc"], frozenset(), min_tokens)
    pieces = []
    for letter in "abcabcabc":
        pieces.append(answer.add(NewToken(ord(letter))))
        if pieces[-1].finish is not None:
            break
    assert pieces[-1].finish == "stop"
    assert "".join(piece.text for piece in pieces) == expected
