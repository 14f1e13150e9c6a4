"""Models that share one budget of slots: who works has them, and no bit of a text changes."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from engine_events import ask, greedy, request_of
from text_checkpoint import NUM_EXPERTS, NUM_LAYERS, save_text_checkpoint

import moe_runtime
from moe_runtime.inference.budget import MIN_SLOTS
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.resizing import resize_cache
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.models import slot_sharing
from moe_runtime.serving.http.models.slot_sharing import SlotSharing
from moe_runtime.serving.turns import Turns

ALL = NUM_LAYERS * NUM_EXPERTS
FAIR = 12
"""Slots that each of the models is loaded with."""
PROMPTS = tuple(tuple(range(first, first + 9)) for first in (3, 40, 90, 200))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "model"
    save_text_checkpoint(folder)
    return folder


class Site:
    """Some models and their engines, at a time that the test says."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, policies: list[str]) -> None:
        self.now_s = 0.0
        self.sharing = SlotSharing(Turns(), idle_s=10.0, clock=lambda: self.now_s)
        least = inspect_checkpoint(folder, max_tokens=64)
        budget = least.smallest_budget_bytes + (FAIR - MIN_SLOTS) * least.slot_bytes
        self.models: list[Any] = []
        self.engines: list[Engine] = []
        for policy in policies:
            model: Any = moe_runtime.load(
                folder, device="cpu", host_memory=budget, max_tokens=64, policy=policy
            )
            stack.callback(model.moe.close)
            self.models.append(model)
            turns = self.sharing.add(model.moe)
            self.engines.append(stack.enter_context(Engine(model, turns=turns)))
        self.budget_bytes = budget * len(policies)

    def text(self, number: int, prompt: tuple[int, ...]) -> list[int]:
        """What a model answers."""
        return ask(self.engines[number], request_of(prompt, 4))[0].wait().ids

    def slots(self) -> list[int]:
        stats = [model.moe.stats() for model in self.models]
        assert sum(some.budget_bytes for some in stats) <= self.budget_bytes
        self.sharing.check()
        return [some.expert_slots for some in stats]


@pytest.fixture
def stack() -> Any:
    with contextlib.ExitStack() as found:
        yield found


def test_a_model_that_works_takes_slots_of_one_that_does_not(
    checkpoint: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(stack, checkpoint, ["lru", "activation-aware"])
    moved: list[int] = []

    def watched(*asked: Any) -> int:
        found = resize_cache(*asked)
        plans = [model.moe.facts.host_plan for model in site.models]
        moved.append(sum(plan.budget_bytes for plan in plans))
        return found

    monkeypatch.setattr(slot_sharing, "resize_cache", watched)
    alone = [greedy(site.models[0], prompt, 4) for prompt in PROMPTS]
    assert site.slots() == [FAIR, FAIR]
    assert site.text(0, PROMPTS[0]) == alone[0]
    assert site.slots() == [FAIR, FAIR]  # the other may just have been asked
    taken = [2 * FAIR - MIN_SLOTS, MIN_SLOTS]
    for number, wanted in ((0, taken), (1, taken[::-1]), (0, taken)):
        site.now_s += 10
        for prompt, text in zip(PROMPTS, alone, strict=True):
            assert site.text(number, prompt) == text
        assert site.slots() == wanted
    site.now_s += 9
    assert site.text(1, PROMPTS[1]) == alone[1]
    assert site.slots() == [FAIR, FAIR]  # both work
    assert len(moved) == 8  # four times, one after the other
    assert max(moved) <= site.budget_bytes


def test_what_no_working_model_has_use_for_stays_with_the_others(
    checkpoint: Path, stack: contextlib.ExitStack
) -> None:
    number = -(-ALL // FAIR) + 1
    site = Site(stack, checkpoint, ["lru"] * number)
    site.now_s += 10
    site.text(0, PROMPTS[0])
    found = site.slots()
    assert found[0] == ALL
    assert sum(found) >= number * FAIR - number  # less than a slot of each is too little for one
    assert min(found) >= MIN_SLOTS
