"""What a call of `generate` leaves to the next one, and who may change a model in its midst."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_models import bring_all, emulated, experts_modules_of, load_on_emulated_device
from moe_families import Family
from tiny_checkpoints import PROMPT, tiny_model
from transformers import GenerationConfig, LogitsProcessor, StaticCache, StoppingCriteria

from moe_runtime.inference.device import decode_graphs
from moe_runtime.inference.device.decode_graphs import Structure
from moe_runtime.inference.device.static_caches import StaticCaches

pytest.importorskip("triton")
NUM_EXPERTS, NEW_TOKENS = 6, 4
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 2})
PROMPTS = [PROMPT.roll(shift, 1)[:, :length] for shift, length in ((0, 4), (1, 6), (2, 3))]


@contextmanager
def loaded(checkpoint: Path, slots: int = NUM_EXPERTS) -> Iterator[Any]:
    """A model of which all experts are in their slots, if there are as many."""
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots)
    model.generation_config.eos_token_id = None
    with model.moe:
        if slots == NUM_EXPERTS:
            bring_all(model)
        yield model


def generated(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of every step."""
    found = model.generate(
        prompt, do_sample=False, return_dict_in_generate=True, output_logits=True,
        **{"max_new_tokens": NEW_TOKENS, **options},
    )  # fmt: skip
    return torch.stack(found.logits)


def alone(checkpoint: Path, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """The same by a model that was asked nothing before."""
    with loaded(checkpoint) as model:
        return generated(model, prompt, **options)


def recorded(model: Any) -> Any:
    return experts_modules_of(model)[0].store.recorded


class Failing(StoppingCriteria):
    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


@emulated
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_call_that_fails_leaves_nothing_to_the_next_one(checkpoint: Path, at: int) -> None:
    expected = alone(checkpoint, PROMPTS[1])
    with loaded(checkpoint) as model:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                generated(model, PROMPTS[0], stopping_criteria=[Failing(at)])
            if (kept := recorded(model)) is not None:  # as a step that overflows leaves it
                kept._cache().layers[0].keys.fill_(torch.nan)
            assert torch.equal(generated(model, PROMPTS[1]), expected)


@emulated
def test_what_a_call_returns_stays_as_it_was(checkpoint: Path) -> None:
    with loaded(checkpoint) as model:
        options = {"return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}
        found = model.generate(PROMPTS[0], do_sample=False, **options)
        keys = found.past_key_values.layers[0].keys
        before = keys.clone()
        generated(model, PROMPTS[0].flip(1))
        assert torch.equal(keys, before)
        assert keys.shape[2] == PROMPTS[0].shape[1] + NEW_TOKENS - 1


@emulated
def test_a_cache_goes_with_the_first_call_that_has_another_one(checkpoint: Path) -> None:
    with loaded(checkpoint) as model:
        other = StaticCache(model.config, max_cache_len=20)
        calls = (
            lambda: model(PROMPTS[0], use_cache=True),
            lambda: model(PROMPTS[0], past_key_values=other, use_cache=True),
            lambda: model.generate(PROMPTS[0], max_new_tokens=2, cache_implementation="dynamic"),
            model.moe.close,
        )
        for call in calls:
            generated(model, PROMPTS[0])
            kept = weakref.ref(recorded(model)._cache())
            gc.collect()
            assert kept() is not None
            with torch.no_grad():
                call()
            gc.collect()
            assert kept() is None


@emulated
def test_threads_have_caches_of_their_own(checkpoint: Path) -> None:
    expected = [alone(checkpoint, prompt) for prompt in PROMPTS]
    found: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(PROMPTS))}
    with loaded(checkpoint) as model:

        def generate(number: int) -> None:
            for _ in range(3):
                found[number].append(generated(model, PROMPTS[number]))

        threads = [threading.Thread(target=generate, args=(number,)) for number in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model.moe.check()
    for number, logits in found.items():
        assert len(logits) == 3
        assert all(torch.equal(each, expected[number]) for each in logits)


def test_room_is_rounded_up_within_what_memory_was_set_aside_for() -> None:
    config, caches = tiny_model(FAMILY).config, StaticCaches()
    lengths = {1: 64, 64: 64, 65: 128, 500: 512, 600: 640, 1025: 1152, 4000: 4000, 4100: 4100}
    for asked, expected in lengths.items():
        cache = caches.take(config, 1, asked, 4000)
        assert {layer.max_cache_len for layer in cache.layers} == {expected}
        caches.give_back(cache)


class Steering(LogitsProcessor):
    """Changes a weight of the model at a step."""

    def __init__(self, model: Any, at: int) -> None:
        self._weight, self._left = model.model.norm.weight, at

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._left -= 1
        if not self._left:
            self._weight.data = -self._weight.data
        return scores


@emulated
def test_who_runs_code_of_his_own_may_change_the_model_between_steps(checkpoint: Path) -> None:
    found = []
    for is_recorded in (True, False):
        with loaded(checkpoint) as model:
            if not is_recorded:
                model.forward = model.forward.__wrapped__
            steering = Steering(model, 4)
            found.append(
                generated(model, PROMPTS[0], max_new_tokens=8, logits_processor=[steering])
            )
    # whoever is not called step by step computes with a cache that grows: other sums
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert torch.equal(*(logits.argmax(-1) for logits in found))


@emulated
def test_a_hook_of_the_model_may_change_it_between_steps(checkpoint: Path) -> None:
    found = []
    for is_recorded in (True, False):
        with loaded(checkpoint) as model:
            if not is_recorded:
                model.forward = model.forward.__wrapped__
            steering = Steering(model, 5)
            model.register_forward_pre_hook(lambda *_, act=steering: act(None, None))
            found.append(generated(model, PROMPTS[0], max_new_tokens=8))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@emulated
def test_a_call_without_foreign_code_looks_at_the_model_once(checkpoint: Path) -> None:
    looks, holds = [], Structure.holds

    def look(self: Structure) -> bool:
        looks.append(self)
        return holds(self)

    with loaded(checkpoint) as model, patch.object(Structure, "holds", look):
        for number in (1, 2, 3):
            model.generate(PROMPTS[1], do_sample=True, top_k=3, max_new_tokens=9)
            assert len(looks) == number


@emulated
@pytest.mark.parametrize("by", ["option", "configuration"])
def test_a_static_cache_that_is_asked_for_is_kept_too(checkpoint: Path, by: str) -> None:
    """Unless the model's own settings ask for it."""
    with loaded(checkpoint) as model:
        given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        asked: dict[str, Any] = {"cache_implementation": "static", **given}
        if by == "configuration":
            asked = {"generation_config": GenerationConfig(**asked)}
        found, recordings = [], []
        for _ in range(3):
            found.append(model.generate(PROMPTS[0], **asked))
            recordings.append(recorded(model))
        assert recordings[0] is recordings[1] is recordings[2] is not None
        model.generation_config.cache_implementation = "static"
        found.append(model.generate(PROMPTS[0], **given))
        assert recorded(model) is not recordings[0]
    expected = alone(checkpoint, PROMPTS[0]).argmax(-1).T
    assert all(torch.equal(one[:, PROMPTS[0].shape[1] :], expected) for one in found)


@emulated
def test_recordings_of_several_caches_stay_until_their_caches_or_an_expert_goes(
    checkpoint: Path,
) -> None:
    """As a server has them, one for each number of sequences; `generate` between their steps."""
    made: list[Any] = []
    replay = decode_graphs.RecordedStep.replay

    def watch(self: Any, call: Any) -> Any:
        made.extend([self] if self not in made else ())
        return replay(self, call)

    with loaded(checkpoint) as model, patch.object(decode_graphs.RecordedStep, "replay", watch):
        caches = [StaticCache(model.config, max_cache_len=40) for _ in range(2)]

        def step(number: int, num_tokens: int = 1) -> None:
            with torch.no_grad():
                model(PROMPTS[0][:, :num_tokens], past_key_values=caches[number], use_cache=True)

        for number in (0, 1):
            step(number, 2)
        for number in (0, 1, 0, 1, 1, 0):
            step(number)
        assert len(made) == 2
        assert {recorded(model), *recorded(model).others.values()} == {*made}
        generated(model, PROMPTS[0])
        assert len(made) == 3
        for number in (1, 0):
            step(number)
        assert len(made) == 3
        assert made[2] not in {recorded(model), *recorded(model).others.values()}
        gone = weakref.ref(caches.pop())
        gc.collect()
        assert gone() is None
        assert not recorded(model).others
        store: Any = experts_modules_of(model)[0].store
        store.recorded = None  # as where an expert leaves
        step(0)
        assert recorded(model) is made[3]


@emulated
def test_a_recording_whose_cache_is_gone_is_let_go_beside_others(checkpoint: Path) -> None:
    with loaded(checkpoint) as model, torch.no_grad():
        (own,) = model.new_cache(1, 20, {}).values()
        caches = [own, *(StaticCache(model.config, max_cache_len=20) for _ in range(2))]
        for cache in caches:  # the first one is in use meanwhile
            model(PROMPTS[0], past_key_values=cache, use_cache=True)
            for _ in range(2):
                model(PROMPT[:, :1], past_key_values=cache, use_cache=True)
        step = recorded(model)
        assert len(step.others) == 2
        model._caches.give_back(own)
        gone = weakref.ref(step)
        del caches[2], cache, step
        gc.collect()
        assert gone() is not None
        model(PROMPT[:, :1], past_key_values=caches[1], use_cache=True)
        assert gone() is None
        assert recorded(model).cache is caches[1]
