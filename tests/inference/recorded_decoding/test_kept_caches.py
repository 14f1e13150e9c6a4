"""Reused static caches and recorded steps: independent calls, and model changes in between."""

import functools
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
from emulated_models import (
    bring_all,
    counted_recordings,
    emulated,
    experts_modules_of,
    load_on_emulated_device,
)
from moe_families import Family
from tiny_checkpoints import PROMPT, save, tiny_model
from transformers import GenerationConfig, LogitsProcessor, StaticCache, StoppingCriteria

from moe_runtime.inference.device import decode_graphs
from moe_runtime.inference.device.static_caches import StaticCaches

pytest.importorskip("triton")
NUM_EXPERTS, NEW_TOKENS = 6, 4
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 1})
SETTINGS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
SLOTS = pytest.mark.parametrize("slots", [3, NUM_EXPERTS])
PROMPTS = [PROMPT.roll(shift, 1)[:, :length] for shift, length in ((0, 4), (1, 6), (2, 3))]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with experts: each call records its steps anew."""
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("one_layer"), sharded=True)


@contextmanager
def loaded(
    checkpoint: Path, slots: int = NUM_EXPERTS, *, is_recorded: bool = True
) -> Iterator[Any]:
    """A model with all experts in slots if they fit."""
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots)
    model.generation_config.eos_token_id = None
    if not is_recorded:
        model.forward = model.forward.__wrapped__
    with model.moe:
        if slots == NUM_EXPERTS:
            bring_all(model)
        yield model
        model.moe.check()


def generated(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of every step."""
    found = model.generate(
        prompt, do_sample=False, return_dict_in_generate=True, output_logits=True,
        **{"max_new_tokens": NEW_TOKENS, **options},
    )  # fmt: skip
    return torch.stack(found.logits)


@functools.cache
def alone(checkpoint: Path, prompt: torch.Tensor) -> torch.Tensor:
    """The same by a model that was asked nothing before."""
    with loaded(checkpoint) as model:
        return generated(model, prompt)


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
def test_a_failed_call_does_not_affect_the_next_one(checkpoint, at):
    expected = alone(checkpoint, PROMPTS[1])
    with loaded(checkpoint) as model:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                generated(model, PROMPTS[0], stopping_criteria=[Failing(at)])
            if (kept := recorded(model)) is not None:  # as a step that overflows leaves it
                kept._cache().layers[0].keys.fill_(torch.nan)
            assert torch.equal(generated(model, PROMPTS[1]), expected)


@emulated
def test_a_returned_cache_does_not_change(checkpoint):
    with loaded(checkpoint) as model:
        options = {"return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}
        found = model.generate(PROMPTS[0], do_sample=False, **options)
        keys = found.past_key_values.layers[0].keys
        before = keys.clone()
        generated(model, PROMPTS[0].flip(1))
        assert torch.equal(keys, before)
        assert keys.shape[2] == PROMPTS[0].shape[1] + NEW_TOKENS - 1


@emulated
def test_a_call_with_another_cache_frees_the_kept_one(checkpoint):
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
            assert kept() is not None
            with torch.no_grad():
                call()
            assert kept() is None  # without the garbage collector: there is no cycle


@emulated
def test_threads_have_caches_of_their_own(checkpoint):
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
    for number, logits in found.items():
        assert len(logits) == 3
        assert all(torch.equal(each, expected[number]) for each in logits)


def test_cache_lengths_are_rounded_up_within_the_reserve():
    config, caches = tiny_model(FAMILY).config, StaticCaches()
    lengths = {1: 64, 64: 64, 65: 128, 500: 512, 600: 640, 1025: 1152, 4000: 4000, 4100: 4100}
    for asked, expected in lengths.items():
        cache = caches.take(config, 1, asked, 4000)
        assert {layer.max_cache_len for layer in cache.layers} == {expected}
        caches.give_back(cache)


def flip_logits(model: Any) -> None:
    flipped = model.lm_head.weight.flip(0)
    model.lm_head.weight = torch.nn.Parameter(flipped, requires_grad=False)


def change_at(model: Any, where: str, step: int) -> dict[str, Any]:
    """Options of `generate` with which foreign code changes the model at a step."""
    left = [step]

    def act(*given: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            flip_logits(model)
        return given[-1] if where == "processor" else None

    if where == "hook":
        model.register_forward_pre_hook(act)
        return {}
    if where == "processor":
        kind = type("Steering", (LogitsProcessor,), {"__call__": lambda _, *given: act(*given)})
        return {"logits_processor": [kind()]}
    every = [*range(model.config.vocab_size)]
    return {"prefix_allowed_tokens_fn": lambda *given: act(*given) or every}


@emulated
@pytest.mark.parametrize(
    ("where", "slots"),
    [("hook", NUM_EXPERTS), ("processor", 3), ("function", NUM_EXPERTS), ("between calls", 3)],
)
def test_foreign_code_may_change_the_model_between_steps(checkpoint, where, slots):
    found = []
    for is_recorded in (True, False):
        with loaded(checkpoint, slots, is_recorded=is_recorded) as model:
            before = generated(model, PROMPTS[0], max_new_tokens=8)
            options: dict[str, Any] = {}
            if where == "between calls":
                flip_logits(model)
            else:
                options = change_at(model, where, 4)
            found.append(generated(model, PROMPTS[0], max_new_tokens=8, **options))
    # steps without a recording have a cache that grows: other sums
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert torch.equal(*(logits.argmax(-1) for logits in found))
    assert not torch.equal(before, found[1])


@emulated
@pytest.mark.parametrize("by", ["option", "configuration"])
def test_a_requested_static_cache_is_kept(checkpoint, by):
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
def test_recordings_live_as_long_as_their_caches(checkpoint):
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
def test_a_recording_without_its_cache_is_freed(checkpoint):
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


@emulated
@SLOTS
def test_hooks_are_called_in_every_step(checkpoint, slots):
    """None is called by a replay: such a model is recorded at every call."""
    with loaded(checkpoint, slots) as model:
        model.generate(PROMPT, **SETTINGS)
        norm, calls = model.model.layers[0].input_layernorm, list[Any]()
        for register in (
            norm.register_forward_hook,
            norm.register_forward_pre_hook,
            torch.nn.modules.module.register_module_forward_hook,
        ):
            calls.clear()
            handle = register(lambda module, *_: calls.append(module) if module is norm else None)
            model.generate(PROMPT, **SETTINGS)
            handle.remove()
            assert len(calls) == SETTINGS["max_new_tokens"]


@emulated
def test_guidance_that_calls_the_model_at_each_step_costs_no_recordings(checkpoint):
    found, options = [], {"guidance_scale": 1.5, **SETTINGS}
    with loaded(checkpoint, 3) as model, counted_recordings() as made:
        found.append(model.generate(PROMPT, **options))
        assert len(made) == 1
    with loaded(checkpoint, 3, is_recorded=False) as model:
        found.append(model.generate(PROMPT, **options))
    assert torch.equal(*found)


@emulated
def test_other_calls_do_not_affect_the_kept_cache(checkpoint):
    with loaded(checkpoint, 3) as model:
        prompt = PROMPT.to(model.device)
        expected = model.generate(prompt, **SETTINGS)
        new = expected[:, prompt.shape[1] :]
        embedded = model.get_input_embeddings()(prompt)
        padded, mask = torch.cat([prompt[:, :1], prompt], 1), torch.ones(1, prompt.shape[1] + 1)
        mask[0, 0] = 0
        weight = model.model.embed_tokens.weight
        kept = weight.detach().clone()
        for _ in range(2):
            assert torch.equal(model.generate(inputs_embeds=embedded, **SETTINGS), new)
            found = model.generate(padded, attention_mask=mask.long(), **SETTINGS)
            assert torch.equal(found[:, padded.shape[1] :], new)
            with torch.inference_mode():
                assert torch.equal(model.generate(prompt, **SETTINGS), expected)
            model.generate(prompt[:, :1], **SETTINGS)
            model.generate(prompt.repeat(3, 1), **SETTINGS)
            weight.data.fill_(torch.nan)
            model.generate(prompt, **SETTINGS)
            weight.data.copy_(kept)
            assert torch.equal(model.generate(prompt, **SETTINGS), expected)
        with torch.autocast(model.device.type, torch.bfloat16):  # whose values are no fp32 keys
            assert model.generate(prompt, **SETTINGS).shape == expected.shape


@emulated
def test_one_cache_is_kept_and_goes_with_the_model(checkpoint):
    with loaded(checkpoint, NUM_EXPERTS) as model:
        made, take = list[Any](), StaticCaches.take

        def noted(*args: Any) -> Any:
            made.append(weakref.ref(cache := take(*args)))
            return cache

        def alive() -> int:  # without the garbage collector: there is no cycle
            return len({ref() for ref in made} - {None})

        def forward(*args: Any, **kwargs: Any) -> Any:
            most.append(alive())
            return compute(*args, **kwargs)

        graphs, most = model.forward, list[int]()
        compute, graphs._forward = graphs._forward, forward
        with patch.object(StaticCaches, "take", noted):
            expected = model.generate(PROMPT, **SETTINGS)
            model.generate(PROMPT.repeat(2, 1), **SETTINGS)
            assert alive() == max(most) == 1  # the first one went before the second one came
            with pytest.raises(KeyboardInterrupt):
                model.generate(PROMPT, stopping_criteria=[Failing(4)], **SETTINGS)
            assert torch.equal(model.generate(PROMPT, **SETTINGS), expected)
            assert alive() == 1
            model(PROMPT)  # whose own cache is another one
            assert not alive()
            model.generate(PROMPT, **SETTINGS)
            assert alive() == 1
            with pytest.raises(KeyboardInterrupt):
                model.generate(PROMPT, stopping_criteria=[Failing(4)], **SETTINGS)
            model.moe.close()
            assert not alive()


@emulated
def test_two_threads_never_take_one_cache(checkpoint):
    with loaded(checkpoint, 3) as model:
        caches = model._caches
        model.generate(PROMPT, **SETTINGS)
        found, free = list[Any](), caches._free

        def take() -> None:
            found.append(caches.take(model.config, 1, PROMPT.shape[1] + 6, 64))

        class Slow(weakref.ref[Any]):
            def __call__(self) -> Any:
                other = threading.Thread(target=take)
                other.start()
                other.join()
                return super().__call__()

        caches._free = [Slow(free[0]())] if isinstance(free, list) else Slow(free())
        take()
        assert found[0] is not found[1]
