"""Prefixes in memory: a conversation goes on from what it computed, in the room that there is."""

import gc
import weakref
from typing import Any

import pytest
from engine_events import ask, drained, greedy, hold, request_of

from moe_runtime.inference.cache_copies import BlockCopies
from moe_runtime.serving import prefixes
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import EngineOptions

CAPACITY = 256
NEW = 14


class Memory:
    """Tokens that blocks and the cache that is worked on have room for, at the most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._blocks: list[weakref.ref[Any]] = []
        self._cache: Any = None
        copy, append, set_room = BlockCopies.copy, BlockCopies.append, prefixes.set_room

        def copied(copies: BlockCopies, cache: Any, index: int) -> Any:
            block = copy(copies, cache, index)
            self._blocks.append(weakref.ref(block))
            self._look(cache)
            return block

        def appended(copies: BlockCopies, cache: Any, *block: Any) -> None:
            append(copies, cache, *block)
            self._look(cache)

        def given(cache: Any, num_tokens: int) -> None:
            set_room(cache, num_tokens)
            self._look(cache)

        monkeypatch.setattr(BlockCopies, "copy", copied)
        monkeypatch.setattr(BlockCopies, "append", appended)
        monkeypatch.setattr(prefixes, "set_room", given)

    def _look(self, cache: Any) -> None:
        room = cache.layers[-1].growing_keys.room
        blocks = sum(block() is not None for block in self._blocks)
        self.most = max(self.most, 16 * blocks + (0 if room is None else room.shape[-2]))


@pytest.mark.parametrize("exact", [False, True])
def test_a_conversation_is_found_again_as_long_as_it_fits(pocket, prompts, exact):
    options = EngineOptions(exact=exact, prompt_tokens=16 if exact else 256)
    conversation: tuple[int, ...] = ()
    asked, told = conversation, list[int]()
    with Engine(pocket, options, max_tokens=CAPACITY) as engine:
        known = 0
        while len(conversation) + 40 + NEW < CAPACITY:
            conversation += prompts[4]
            answer = ask(engine, request_of(conversation, NEW))[0].wait()
            assert answer.read.cached_tokens == known // 16 * 16
            asked, told = conversation, answer.ids
            # the last token of an answer goes through the model with the next turn
            known = len(conversation) + (0 if exact else NEW - 1)
            conversation += tuple(answer.ids)
        drained(engine)
        found = engine.statistics()
    assert told == greedy(pocket, asked, NEW)
    assert known > 0.75 * CAPACITY
    assert found.kv_tokens <= CAPACITY


@pytest.mark.long
def test_keys_and_values_are_never_there_twice(pocket, prompts, monkeypatch):
    """But for an eighth of them, which is on its way, and what is left of the beginning."""
    long = (prompts[4] * 11)[:420]
    memory = Memory(monkeypatch)
    gc.collect()
    with Engine(pocket) as engine:
        first = ask(engine, request_of(long, NEW))[0].wait()
        second = ask(engine, request_of((*long, *first.ids, 7), NEW))[0].wait()
        drained(engine)
    assert second.read.cached_tokens == 432
    assert second.ids == greedy(pocket, (*long, *first.ids, 7), NEW)
    assert 432 < memory.most <= 512 + 512 // 4


def test_what_is_computed_of_an_answer_that_is_given_up_is_found_again(pocket, prompts):
    with Engine(pocket) as engine:
        held, handle = hold(engine, request_of(prompts[4], 40))
        handle.cancel()
        held.release()
        assert held.wait().finished.reason == "cancelled"
        again = ask(engine, request_of(prompts[4], NEW))[0].wait()
    assert again.read.cached_tokens == 32
    assert again.ids == greedy(pocket, prompts[4], NEW)


@pytest.mark.parametrize("exact", [False, True])
def test_prompts_that_arrive_together_compute_what_they_share_once(pocket, prompts, exact):
    shared = (prompts[4] * 2)[:66]
    options = EngineOptions(exact=exact, prompt_tokens=16)
    with Engine(pocket, options) as engine:
        busy, _ = hold(engine, request_of(prompts[0], 2))
        asked = [ask(engine, request_of(shared, 4))[0] for _ in range(4)]
        other, _ = ask(engine, request_of(prompts[1], 1))
        busy.release()
        answers = [answer.wait() for answer in asked]
        assert other.wait().ids == greedy(pocket, prompts[1], 1)
        drained(engine)
        found = engine.statistics()
    assert [answer.read.cached_tokens for answer in answers] == [0, 64, 64, 64]
    assert found.prompt_tokens - found.prefix_hit_tokens == 66 + 3 * 2 + 5 + 23
    assert [answer.ids for answer in answers] == [greedy(pocket, shared, 4)] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_for_a_beginning_goes_on_when_it_is_given_up(pocket, prompts, monkeypatch, fails):
    shared = (prompts[4] * 3)[:100]
    real = ModelPasses.read

    def read(passes: ModelPasses, chosen: Any) -> Any:
        if chosen[0][0].number == 2 and chosen[0][0].num_computed:
            if fails:
                raise OSError(5, "Input/output error")
            handle.cancel()
        return real(passes, chosen)

    monkeypatch.setattr(ModelPasses, "read", read)
    with Engine(pocket, EngineOptions(prompt_tokens=16, exact=True)) as engine:
        busy, _ = hold(engine, request_of(prompts[0], 1))
        first, handle = ask(engine, request_of(shared, 4))
        asked = [ask(engine, request_of(shared, 4))[0] for _ in range(3)]
        busy.release()
        answers = [answer.wait() for answer in asked]
        drained(engine)
    assert first.finished.reason == ("error" if fails else "cancelled")
    kept = 0 if fails else 32
    assert [answer.read.cached_tokens for answer in answers] == [kept, 96, 96]
    assert [answer.ids for answer in answers] == [greedy(pocket, shared, 4)] * 3


def test_an_idle_engine_takes_as_many_as_may_run_beside_those_that_may_wait(pocket, prompts):
    options = EngineOptions(most_waiting=1, most_running=4)
    with Engine(pocket, options) as engine:
        answers = [ask(engine, request_of(prompts[2], 2))[0] for _ in range(5)]
        assert all(answer.wait().finished.reason == "length" for answer in answers)
