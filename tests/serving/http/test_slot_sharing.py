"""Models that share one budget of slots: who works has them, and no bit of a text changes."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from engine_events import ask, greedy, request_of
from text_checkpoint import NUM_EXPERTS, NUM_LAYERS, save_text_checkpoint

import moe_runtime
from moe_runtime.inference.budget import MIN_SLOTS
from moe_runtime.inference.hugging_face.loaded_model import resize_cache
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.serving.engine import Engine, Turns
from moe_runtime.serving.http import dividing
from moe_runtime.serving.http.dividing import SlotSharing
from moe_runtime.serving.http.model_loader import ModelLoader

ALL = NUM_LAYERS * NUM_EXPERTS
FAIR = 12
"""Slots that each of the models is loaded with."""
PROMPTS = tuple(tuple(range(first, first + 9)) for first in (3, 40, 90, 200))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "model"
    save_text_checkpoint(folder)
    return folder


class Queue(Turns):
    """Whoever asks gets its turn behind what the test has others do first."""

    def __init__(self) -> None:
        super().__init__()
        self.others: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        others, self.others = self.others, lambda: None
        others()
        yield


class Site:
    """Some models and their engines, at a time that the test says."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        policies: list[str],
        turns: Turns | None = None,
    ) -> None:
        self.now_s = 0.0
        self.shared = turns or Turns()
        self.sharing = SlotSharing(self.shared, idle_s=10.0, clock=lambda: self.now_s)
        least = inspect_checkpoint(folder, max_tokens=64)
        budget = least.smallest_budget_bytes + (FAIR - MIN_SLOTS) * least.slot_bytes
        self.models: list[Any] = []
        self.engines: list[Engine] = []
        self.turns: list[Turns] = []
        for policy in policies:
            model: Any = moe_runtime.load(
                folder, device="cpu", host_memory=budget, max_tokens=64, policy=policy
            )
            stack.callback(model.moe.close)
            self.models.append(model)
            self.turns.append(self.sharing.add(model.moe))
            engine = Engine(model, turns=self.turns[-1])
            self.engines.append(stack.enter_context(engine))
        self.budget_bytes = budget * len(policies)

    def text(self, number: int, prompt: tuple[int, ...]) -> list[int]:
        found = ask(self.engines[number], request_of(prompt, 4))[0].wait().ids
        with self.shared.turn():
            return found

    def step(self, number: int, seconds: float) -> None:
        with self.turns[number].turn():
            self.now_s += seconds

    def slots(self) -> list[int]:
        stats = [model.moe.stats() for model in self.models]
        assert sum(some.budget_bytes for some in stats) <= self.budget_bytes
        self.sharing.check()
        return [some.expert_slots for some in stats]


@pytest.fixture
def stack() -> Any:
    with contextlib.ExitStack() as found:
        yield found


def test_a_model_that_works_takes_slots_of_one_that_does_not(checkpoint, stack, monkeypatch):
    site = Site(stack, checkpoint, ["lru", "activation-aware"])
    moved: list[int] = []

    def watched(*asked: Any) -> int:
        found = resize_cache(*asked)
        plans = [model.moe.facts.host_plan for model in site.models]
        moved.append(sum(plan.budget_bytes for plan in plans))
        return found

    monkeypatch.setattr(dividing, "resize_cache", watched)
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


def test_what_a_closed_model_took_is_for_others_when_it_is_back(checkpoint, stack):
    site = Site(stack, checkpoint, ["lru"] * 2)
    site.sharing.remove(site.models[1].moe)
    found = []
    for is_back in (False, True):
        if is_back:
            site.sharing.leave_room()
        site.step(0, 10)
        found.append(site.models[0].moe.stats().expert_slots)
    assert found == [FAIR, ALL]


def test_models_whose_steps_take_long_keep_their_slots(checkpoint, stack):
    """Longer than the time after which a model is idle: all work that wait for their turn."""
    queue = Queue()
    site = Site(stack, checkpoint, ["lru"] * 3, queue)
    for number in range(3):
        site.step(number, 12)

    def others() -> None:
        for number, seconds in ((1, 12), (2, 6)):
            site.step(number, seconds)
            assert site.slots() == [FAIR] * 3

    queue.others = others
    site.step(0, 12)
    assert site.slots() == [FAIR] * 3
    site.now_s += 10
    site.step(2, 12)  # nobody else asked for long
    assert site.slots() == [(3 * FAIR - ALL) // 2] * 2 + [ALL]


def test_what_no_working_model_has_use_for_stays_with_the_others(checkpoint, stack):
    number = -(-ALL // FAIR) + 1
    site = Site(stack, checkpoint, ["lru"] * number)
    site.now_s += 10
    site.text(0, PROMPTS[0])
    found = site.slots()
    assert found[0] == ALL
    assert sum(found) >= number * FAIR - number  # less than a slot of each is too little for one
    assert min(found) >= MIN_SLOTS


def test_others_get_the_room_of_a_model_whose_end_fails():
    loader = ModelLoader.__new__(ModelLoader)
    sharing = Mock()
    vars(loader).update(_sharing=sharing, _open={"a": (None, stack := contextlib.ExitStack())})
    stack.callback(Mock(side_effect=OSError("broken")))
    with pytest.raises(OSError, match="broken"):
        loader.unload("a")
    sharing.leave_room.assert_called_once_with()
    assert not loader.loaded()
