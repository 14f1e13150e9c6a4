"""Static caches of `generate` that are used again, and with them recorded steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_models import bring_all, counted_recordings, emulated, load_on_emulated_device
from tiny_checkpoints import PROMPT
from transformers.generation.streamers import BaseStreamer

from moe_runtime.inference.device.static_caches import StaticCaches

pytest.importorskip("triton")
NUM_EXPERTS = 6
SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
SLOTS = pytest.mark.parametrize("slots", [2, NUM_EXPERTS])


@contextmanager
def loaded(checkpoint: Path, slots: int, *, is_recorded: bool = True) -> Iterator[Any]:
    """A model of which all experts are in their slots, if there are as many."""
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots)
    if not is_recorded:
        model.forward = model.forward.__wrapped__
    with model.moe:
        if slots == NUM_EXPERTS:
            bring_all(model)
        yield model
        model.moe.check()


def flip_logits(model: Any) -> None:
    flipped = model.lm_head.weight.flip(0)
    model.lm_head.weight = torch.nn.Parameter(flipped, requires_grad=False)


@emulated
def test_a_step_is_recorded_once_for_calls_of_one_length(checkpoint: Path) -> None:
    with loaded(checkpoint, 2) as model, counted_recordings() as made:
        first = model.generate(PROMPT, **SETTINGS)
        for length in (0, 1, 3, 0):
            found = model.generate(PROMPT[:, length:], **SETTINGS)
            assert length or torch.equal(found, first)
        assert len(made) == 1


@emulated
@SLOTS
def test_hooks_hear_of_every_step(checkpoint: Path, slots: int) -> None:
    """None is called by a replay: such a model is recorded at every call."""
    with loaded(checkpoint, slots) as model:
        model.generate(PROMPT, **SETTINGS)
        norm, calls = model.model.layers[1].input_layernorm, list[Any]()
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
@SLOTS
def test_what_changes_between_calls_is_seen(checkpoint: Path, slots: int) -> None:
    found = []
    for is_recorded in (True, False):
        with loaded(checkpoint, slots, is_recorded=is_recorded) as model:
            before = model.generate(PROMPT, **SETTINGS)
            flip_logits(model)
            found.append(model.generate(PROMPT, **SETTINGS))
    assert torch.equal(*found)
    assert not torch.equal(before, found[1])


@emulated
@SLOTS
def test_what_a_function_changes_that_a_processor_calls_is_seen(
    checkpoint: Path, slots: int
) -> None:
    found = []
    for is_recorded in (True, False):
        with loaded(checkpoint, slots, is_recorded=is_recorded) as model:
            calls = list[int]()

            def allowed(_: int, ids: torch.Tensor, model: Any = model, calls: Any = calls) -> Any:
                calls.append(len(ids))
                if len(calls) == 4:
                    flip_logits(model)
                return [*range(model.config.vocab_size)]

            found.append(model.generate(PROMPT, prefix_allowed_tokens_fn=allowed, **SETTINGS))
    assert torch.equal(*found)


@emulated
def test_guidance_that_calls_the_model_at_each_step_costs_no_recordings(checkpoint: Path) -> None:
    found, options = [], {"guidance_scale": 1.5, **SETTINGS}
    with loaded(checkpoint, 2) as model, counted_recordings() as made:
        found.append(model.generate(PROMPT, **options))
        assert len(made) == 1
    with loaded(checkpoint, 2, is_recorded=False) as model:
        found.append(model.generate(PROMPT, **options))
    assert torch.equal(*found)


@emulated
def test_calls_of_other_kinds_leave_nothing_in_the_cache(checkpoint: Path) -> None:
    with loaded(checkpoint, 2) as model:
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


class Failing(BaseStreamer):
    def __init__(self) -> None:
        self._left = 4

    def put(self, value: Any) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt

    def end(self) -> None:
        raise AssertionError("it fails before")


@emulated
def test_one_cache_is_kept_and_goes_with_the_model(checkpoint: Path) -> None:
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
                model.generate(PROMPT, streamer=Failing(), **SETTINGS)
            assert torch.equal(model.generate(PROMPT, **SETTINGS), expected)
            assert alive() == 1
            model(PROMPT)  # whose own cache is another one
            assert not alive()
            model.generate(PROMPT, **SETTINGS)
            assert alive() == 1
            with pytest.raises(KeyboardInterrupt):
                model.generate(PROMPT, streamer=Failing(), **SETTINGS)
            model.moe.close()
            assert not alive()


@emulated
def test_two_threads_never_take_one_cache(checkpoint: Path) -> None:
    with loaded(checkpoint, 2) as model:
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
