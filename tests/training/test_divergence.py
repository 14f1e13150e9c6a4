"""When skipped steps end a run."""

import pytest

from moe_runtime.training.loop import MOST_SKIPPED, SkippedSteps


def run(outcomes: str, *, first: int = 1, last: int = 100) -> int:
    """Steps by a letter each: taken, skipped, or without a loss that is a number; how many were."""
    steps = SkippedSteps()
    for step, letter in enumerate(outcomes, first):
        bad = () if letter == "t" else ("weight",)
        steps.count(bad, step=step, first=first, last=last, has_loss=letter != "n")
    return steps.total


@pytest.mark.parametrize(
    ("outcomes", "first", "last", "message"),
    [
        ("n", 1, 100, "the loss of step 1 is not a number, and no weight"),
        ("sn", 1, 100, "the loss of step 2 is not a number, and no weight"),
        ("n", 7, 100, "the loss of step 7 is not a number, and no weight"),
        ("tn", 1, 2, "the loss of the last step, 2,"),
        ("s" * MOST_SKIPPED, 1, 100, f"of {MOST_SKIPPED} steps in a row"),
        ("t" + "s" * MOST_SKIPPED, 5, 100, f"of {MOST_SKIPPED} steps in a row"),
        ("sss", 1, 3, "of 3 steps in a row"),
    ],
)
def test_a_run_ends(outcomes, first, last, message):
    with pytest.raises(ValueError, match=message):
        run(outcomes, first=first, last=last)
    if len(outcomes) > 1:
        run(outcomes[:-1], first=first, last=last)


@pytest.mark.parametrize(
    ("outcomes", "first", "last"),
    [("tns", 1, 100), ("s", 8, 8), ("ssst", 1, 4), ("tss", 1, 3), ("s" * 9 + "t" + "s" * 9, 1, 50)],
)
def test_a_run_goes_on(outcomes, first, last):
    assert run(outcomes, first=first, last=last) == len(outcomes) - outcomes.count("t")
