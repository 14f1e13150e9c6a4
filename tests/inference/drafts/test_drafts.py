"""Lookup drafts, and the number of drafted tokens that are verified."""

import random
from collections.abc import Callable

import pytest

from moe_runtime.inference.drafts import BARREN, PLACES, DraftControl, Lookup, Offer

MOST = 16


def brute_force(text: list[int], most: int) -> list[int]:
    """The tokens after the last earlier occurrence of the latest four or two tokens; at the end of
    the text it continues with its own draft."""
    for size in PLACES:
        ends = range(size, len(text))
        places = [
            end for end in ends if len(text) > size and text[end - size : end] == text[-size:]
        ]
        if places:
            whole = list(text)
            for step in range(most):
                whole.append(whole[places[-1] + step])
            return whole[len(text) :]
    return []


@pytest.mark.parametrize("vocabulary", [2, 3, 7])
def test_a_lookup_drafts_what_followed_the_last_place_of_the_latest_tokens(vocabulary):
    draw = random.Random(vocabulary)
    lookup, text, num_found = Lookup(), [], 0
    for _ in range(120):
        new = [draw.randrange(vocabulary) for _ in range(draw.choice((1, 1, 2, 5)))]
        text += new
        lookup.extend(new)
        most = draw.randrange(1, 9)
        count = lookup.offer(most).most
        assert lookup.draft(count) == brute_force(text, most)
        num_found += bool(count)
    assert num_found > 40


def test_a_longer_agreement_is_another_grade():
    lookup = Lookup()
    lookup.extend([1, 2, 9, 3, 1, 2])
    assert (lookup.offer(3), lookup.draft(3)) == (Offer(3, 1), [9, 3, 1])
    lookup.extend([9, 3])
    assert (lookup.offer(2), lookup.draft(2)) == (Offer(2, 2), [1, 2])
    assert Lookup().offer(3).most == 0


def run(
    seconds_of: Callable[[int], float],
    is_right: Callable[[int], bool],
    num_tokens: int,
    *,
    num_sequences: int = 1,
    grade: int = 2,
) -> tuple[float, DraftControl]:
    """Seconds of texts of so many tokens; ``is_right`` says of each token whether its draft is.
    One text rests, as those of a model do."""
    control, spent = DraftControl(MOST), 0.0
    places = [0] * num_sequences
    while min(places) < num_tokens:
        if num_sequences == 1 and control.rests():
            spent += seconds_of(1)
            places[0] += 1
            continue
        chosen = control.choose([Offer(15, grade)] * num_sequences)
        rows = num_sequences + sum(chosen)
        assert rows <= max(MOST, num_sequences)
        spent += seconds_of(rows)
        control.measured(num_sequences, rows, seconds_of(rows))
        for index, num_drafted in enumerate(chosen):
            accepted = 0
            while accepted < num_drafted and is_right(places[index] + accepted):
                accepted += 1
            has_failed = accepted < num_drafted
            control.judged(grade, accepted, has_failed=has_failed, num_base=num_sequences)
            places[index] += 1 + accepted
    return spent, control


def test_right_drafts_are_verified_while_they_pay():
    spent, control = run(lambda rows: 1 + 0.1 * (rows - 1), lambda _: True, 400)
    # 16 tokens in 2.5 seconds; at first and from time to time a step goes without
    assert spent < 400 * 2.5 / 16 * 1.35
    assert control.counts()["accepted_drafts"] > 300
    # from five rows on a row takes as long as a step: three or four are best
    spent, control = run(lambda rows: 1 + 0.1 * (rows - 1) + max(rows - 4, 0), lambda _: True, 400)
    assert spent < 400 * 1.2 / 3 * 1.05
    counts = control.counts()
    assert 1.5 <= counts["drafted_tokens"] / counts["draft_steps"] <= 3.2


@pytest.mark.parametrize("row_s", [0.02, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("grade", [1, 2, 4])
def test_wrong_drafts_take_no_more_than_a_fiftieth_of_the_time(row_s, share, grade):
    draw = random.Random(1)
    right = [draw.random() < share for _ in range(1200)]
    spent, control = run(lambda rows: 1 + row_s * (rows - 1), right.__getitem__, 1000, grade=grade)
    assert spent <= 1000 * 1.02 + 1
    assert control.counts()["draft_steps"] <= 1000


@pytest.mark.parametrize("row_s", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("grade", [0, 1, 2, 3])
def test_a_text_of_some_sentences_pays_no_more_than_long_ones(row_s, grade):
    spent, _ = run(lambda rows: 1 + row_s * (rows - 1), lambda _: False, 64, grade=grade)
    assert spent <= 64 * 1.02


def test_drafts_begin_again_when_a_text_starts_to_repeat_itself():
    spent, control = run(lambda rows: 1 + 0.3 * (rows - 1), lambda place: place >= 1000, 2000)
    begun, _ = run(lambda rows: 1 + 0.3 * (rows - 1), lambda place: False, 1000)
    assert control.counts()["accepted_drafts"] > 600
    assert spent < begun + 1000 * 0.6


def test_rests_do_not_prolong_the_recovery_from_a_loss(monkeypatch):
    """Ten texts, each with a loss at first."""
    steps = list[int]()
    for barren in (2000, BARREN):
        monkeypatch.setattr("moe_runtime.inference.drafts.BARREN", barren)
        text = [place % 1000 >= 100 for place in range(10_000)]
        _, control = run(lambda rows: 1 + 0.3 * (rows - 1), text.__getitem__, 9_900)
        steps.append(control.counts()["draft_steps"])
    assert steps[1] <= steps[0] + 10 * BARREN


def test_one_slow_draft_is_not_held_against_later_ones():
    """The first one reads weights from a disk, which takes as long as five steps."""
    control, num_drafts = DraftControl(MOST), 0
    for _ in range(1200):
        (count,) = control.choose([Offer(8, 0)])
        drafting_s = 0.02 * count if num_drafts else 5.0
        control.measured(1, 1 + count, 1 + 0.05 * count, drafting_s if count else 0.0)
        if count:
            control.judged(0, count, has_failed=False)
        num_drafts += bool(count)
    assert num_drafts > 400


def test_several_sequences_share_the_rows():
    spent, control = run(lambda rows: 1 + 0.05 * rows, lambda _: True, 200, num_sequences=3)
    assert spent < 200 * 1.15 * 0.45
    assert control.choose([Offer(15, 2)] * 20) == [0] * 20


@pytest.mark.parametrize(("share", "most"), [(0.0, 1.02), (0.1, 1.02), (0.9, 0.7)])
def test_catching_up_stays_within_what_drafts_pay(share, most):
    """Twenty texts of 200 tokens; a drafter needs four steps' time for each before it drafts."""
    control, draw, spent = DraftControl(MOST), random.Random(4), 0.0
    for _ in range(20):
        place, behind = 0, 4
        while place < 200:
            (chosen,) = control.choose([Offer(4, 0)])
            if chosen and behind and control.may_catch_up(1):
                control.caught_up(1.0)
                spent, behind = spent + 1, behind - 1
            chosen = 0 if behind else chosen
            seconds = 1 + 0.15 * chosen
            spent += seconds
            control.measured(1, 1 + chosen, seconds)
            right = 0
            while right < chosen and draw.random() < share:
                right += 1
            control.judged(0, right, has_failed=right < chosen)
            place += 1 + right
    assert spent <= 20 * 200 * most + 4


@pytest.mark.parametrize(
    ("spared_s", "share", "is_given_up"),
    [(0.4, 0.1, True), (0.4, 0.95, False), (0.0, 0.0, False), (0.05, 0.0, True)],
)
def test_a_drafter_is_closed_if_experts_need_its_memory(spared_s, share, is_given_up):
    """Steps of one second, of which ``spared_s`` are reads that the drafter's memory would save."""
    control, draw, lost_s = DraftControl(MOST), random.Random(6), 0.0
    for _ in range(600):
        (chosen,) = control.choose([Offer(4, 0)])
        seconds = 1 + 0.1 * chosen
        control.measured(1, 1 + chosen, seconds, spared_s=spared_s)
        right = 0
        while right < chosen and draw.random() < share:
            right += 1
        control.judged(0, right, has_failed=right < chosen)
        lost_s += seconds - (1 + right) * (1 - spared_s)
        if control.is_too_dear:
            break
    assert control.is_too_dear is is_given_up
    assert control.counts()["drafts_given_up"] == is_given_up
    assert lost_s < 12


def test_a_drafter_that_cannot_draft_is_not_closed():
    control = DraftControl(MOST)
    for offers in ([Offer(0, 0)], [Offer(4, 0)] * MOST):  # nothing to draft, and no rows for it
        for _ in range(200):
            assert not any(control.choose(offers))
            control.measured(len(offers), len(offers), 1.0, spared_s=0.4)
    assert not control.is_too_dear
