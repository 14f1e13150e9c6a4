"""Steps queued before the last token is known, compared with the loop of transformers."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_device import EmulatedDevice, EmulatedEvent
from emulated_models import bring_all, emulated, experts_modules_of, load_on_emulated_device
from injection import Site, raise_on
from tiny_checkpoints import PROMPT
from transformers import LogitsProcessor, LogitsProcessorList, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from waiting_calls import Asked

import moe_runtime
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.device import decoding_model
from moe_runtime.inference.device.decode_graphs import DecodeGraphs, RecordedStep
from moe_runtime.inference.generation import FiniteLogits
from moe_runtime.inference.kv_cache import cache_of

pytest.importorskip("triton")
NUM_EXPERTS, NEW_TOKENS = 6, 6
FETCHED = 4
"""Slots of a layer with which a step reads missing experts in host memory."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
anywhere = pytest.mark.gpu if DEVICE == "cuda" else emulated
THREE = torch.cat([PROMPT.roll(shift, 1) for shift in range(3)])[:, :3].to(DEVICE)


@contextmanager
def loaded(checkpoint: Path, slots: int = NUM_EXPERTS) -> Iterator[Any]:
    """A model with all experts in slots if they fit, else in host memory."""
    if DEVICE == "cpu":
        model: Any = load_on_emulated_device(checkpoint, slots_a_layer=slots, host_slots=12)
    else:
        model = moe_runtime.load(checkpoint, device="cuda", max_tokens=64)
    with model.moe:
        if slots >= FETCHED:
            bring_all(model)
        yield model


class Witness(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Records the arguments of a loop's parts."""

    def __init__(self, ends_at: int | None = None) -> None:
        self.seen: list[Any] = []
        self._ends_at = ends_at

    def __call__(self, input_ids: Any, scores: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen.append((type(scores), input_ids.tolist()))
        if isinstance(scores, torch.Tensor):
            return scores
        is_end = input_ids.shape[1] == self._ends_at
        return torch.full((len(input_ids),), is_end, device=input_ids.device)

    def put(self, value: Any) -> None:
        self.seen.append(("token", value.tolist()))

    def end(self) -> None:
        self.seen.append("end")


def compare(model: Any, **options: Any) -> Any:
    """The results of `generate` here and in transformers' loop, and the calls of its parts."""
    found, calls = [], []
    for is_ahead in (True, False):
        parts = [Witness(), Witness(options.get("ends_at")), Witness()]
        given = {name: value for name, value in options.items() if name != "ends_at"}
        if "ends_at" in options:  # else transformers' own criteria, which the host knows
            given["stopping_criteria"] = [parts[1]]
        if len(given.get("inputs", THREE)) == 1:  # as transformers has it
            given["streamer"] = parts[2]
        kind = decoding_model.RecordedDecoding
        can_be_ahead = kind._can_be_ahead if is_ahead else lambda *_: False
        torch.manual_seed(3)
        with patch.object(kind, "_can_be_ahead", can_be_ahead):
            found.append(
                model.generate(
                    logits_processor=LogitsProcessorList([parts[0]]),
                    return_dict_in_generate=True, output_logits=True, output_scores=True,
                    max_new_tokens=NEW_TOKENS, **given,
                )
            )  # fmt: skip
        found[-1]["after"] = torch.rand(2, device=DEVICE)
        calls.append([part.seen for part in parts])
    ours, theirs = found
    assert calls[0] == calls[1]
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours["after"], theirs["after"])
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name])
        assert all(map(torch.equal, ours[name], theirs[name]))
    caches = [cache_of(each) for each in found]
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(layers[0].keys, layers[1].keys)
        assert torch.equal(layers[0].values, layers[1].values)
    return ours


class Calls(BaseStreamer):
    """Calls something with the number of each token, or of the prompt as 1."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call, self._number = call, 0

    def put(self, value: Any) -> None:
        self._number += 1
        self._call(self._number)

    def end(self) -> None:
        pass


CASES = {
    "greedy": {"inputs": THREE[:1], "do_sample": False},
    "several": {"inputs": THREE, "do_sample": False},
    "several, looked at": {"inputs": THREE, "do_sample": False, "ends_at": None},
    "sampled": {"inputs": THREE, "do_sample": True, "temperature": 1.5, "top_p": 0.9},
    "ended": {"inputs": THREE[:1], "do_sample": True, "ends_at": 6},
    "repeated": {"inputs": THREE, "do_sample": False, "repetition_penalty": 1.3},
    # arguments that a recorded step does not have, and outputs that none has
    "told of routers": {"inputs": THREE, "do_sample": False, "output_router_logits": False},
    "asked for routers": {"inputs": THREE[:1], "do_sample": False, "output_router_logits": True},
    "padded": {
        "inputs": THREE, "do_sample": False,
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]], device=DEVICE),
    },
}  # fmt: skip


@anywhere
@pytest.mark.parametrize(
    ("case", "slots"),
    [
        *((case, NUM_EXPERTS) for case in CASES if case not in ("several", "padded")),
        *(("several", FETCHED), ("sampled", 3), ("padded", 3)),
    ],
)
def test_generation_equals_the_loop_of_transformers(checkpoint, case, slots):
    with loaded(checkpoint, slots) as model:
        compare(model, **CASES[case])


@anywhere
def test_sequences_that_have_ended_are_padded(checkpoint):
    with loaded(checkpoint) as model:
        free = compare(model, inputs=THREE, do_sample=False).sequences[:, 3:].tolist()
        ends = [free[0][2], free[1][4]]
        settings: dict[str, Any] = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 1}
        assert compare(model, inputs=THREE[:1], **settings).sequences.shape[1] < 3 + NEW_TOKENS
        found = compare(model, inputs=THREE, **settings).sequences[:, 3:]
        assert found[0, 3:].tolist() == [1] * (found.shape[1] - 3)


@emulated
@pytest.mark.parametrize("slots", [NUM_EXPERTS, FETCHED, 3])
def test_a_step_that_is_one_graph_is_queued_before_the_token_is_known(checkpoint, slots):
    """And no expert is brought for a step that may be in vain."""
    order: list[str] = []

    class Order(Witness):
        def put(self, value: Any) -> None:
            order.append("token")

    with loaded(checkpoint, slots) as model:
        # a tokenizer, as for stop strings, is nothing that a step is called with
        model.generate(THREE[:1], max_new_tokens=NEW_TOKENS, do_sample=False, tokenizer=object())
        assert experts_modules_of(model)[0].store.recorded is not None
        forward = DecodeGraphs.__call__

        def noted(*args: Any, **kwargs: Any) -> Any:
            order.append("step")
            return forward(*args, **kwargs)

        with patch.object(DecodeGraphs, "__call__", noted):
            model.generate(THREE[:1], streamer=Order(), max_new_tokens=NEW_TOKENS, do_sample=False)
    text = "".join(name[0] for name in order)
    if slots < FETCHED:
        assert text == "t" + "st" * NEW_TOKENS
    else:
        assert "ss" in text
        assert text.endswith("stt")


@emulated
@pytest.mark.parametrize("slots", [NUM_EXPERTS, FETCHED])
def test_one_graph_waits_only_for_its_token(checkpoint, slots):
    """From the third step on, which replays: the model, its cache and the choice included."""
    waits, counts = list[str](), list[tuple[int, int, int]]()
    synchronize, download = EmulatedEvent.synchronize, EmulatedDevice.download

    def counted(event: EmulatedEvent) -> None:
        if not event.query() and threading.current_thread() is threading.main_thread():
            waits.append(sys._getframe(1).f_code.co_name)
        synchronize(event)

    def noted(device: EmulatedDevice, numbers: torch.Tensor, **options: Any) -> Any:
        found, event = download(device, numbers, **options)
        asked.on_host.append(found)
        return found, event

    with (
        loaded(checkpoint, slots) as model,
        patch.object(EmulatedEvent, "synchronize", counted),
        patch.object(EmulatedDevice, "download", noted),
        Asked() as asked,
    ):
        device = model.forward.store.device
        note = Calls(lambda _: counts.append((len(waits), device.num_drains, len(asked.calls))))
        given = {"max_new_tokens": 2 * NEW_TOKENS, "do_sample": False}
        model.generate(THREE[:1], streamer=note, **given)
        assert len(asked.on_host) > len(counts)  # uses are counted too
    first, last = counts[4], counts[-1]
    found, num_tokens = waits[first[0] : last[0]], len(counts) - 5
    assert {*found} == {"wait"}
    # where experts come to stay a thread waits for them, which takes the device's time further
    assert len(found) == num_tokens or (slots == FETCHED and len(found) < num_tokens)
    assert last[1:] == first[1:]


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for_in_a_step_that_is_one_graph(checkpoint):
    with loaded(checkpoint) as model, torch.no_grad():
        cache, ids = StaticCache(model.config, max_cache_len=20), THREE[:1]
        try:
            for number in range(6):
                torch.cuda.set_sync_debug_mode("error" if number > 3 else "default")
                ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert model.forward.is_one_graph


@anywhere
@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_that_are_not_finite_are_refused(checkpoint, *, do_sample):
    with loaded(checkpoint) as model:
        settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
        before = model.generate(THREE, max_new_tokens=2, do_sample=False)
        weight = model.model.norm.weight
        kept = weight.detach().clone()

        class Spoils(Witness):
            def put(self, value: Any) -> None:
                super().put(value)
                if len(self.seen) == 3:
                    weight.data.fill_(torch.nan)

        spoils = Spoils()
        with pytest.raises(CheckpointError, match="not finite"):
            model.generate(
                THREE[:1], streamer=spoils, logits_processor=LogitsProcessorList([FiniteLogits()]),
                **settings,
            )  # fmt: skip
        assert 3 <= len(spoils.seen) <= 4  # no token of logits that say nothing
        weight.data.copy_(kept)
        assert torch.equal(model.generate(THREE, max_new_tokens=2, do_sample=False), before)


@emulated
def test_a_wrapped_forward_is_called(checkpoint):
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with loaded(checkpoint) as model:
        expected, forward, calls = model.generate(THREE, **settings), model.forward, [0]

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return forward(*args, **kwargs)

        model.forward = wrapped
        assert torch.equal(model.generate(THREE, **settings), expected)
        assert calls == [NEW_TOKENS]


@emulated
def test_a_streamer_may_have_the_model_generate_something_else(checkpoint):
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with loaded(checkpoint) as model:
        ours, others = (model.generate(THREE[n : n + 1], **settings) for n in range(2))

        def other(number: int) -> None:
            if number in (3, 5):
                assert torch.equal(model.generate(THREE[1:2], **settings), others)

        assert torch.equal(model.generate(THREE[:1], streamer=Calls(other), **settings), ours)


@emulated
def test_a_cache_without_room_for_a_step_ahead_works(checkpoint):
    """Behind it is no room for a step that is queued in vain."""
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with loaded(checkpoint) as model:
        free = model.generate(THREE[:1], **settings)[0].tolist()
        last = next(n for n in range(6, len(free)) if free[n] not in free[3:n])
        cache = StaticCache(model.config, max_cache_len=last)
        settings |= {
            "eos_token_id": free[last],
            "pad_token_id": 1,
            cache_name(model.forward): cache,
        }
        assert model.generate(THREE[:1], **settings)[0].tolist() == free[: last + 1]
        assert cache.get_seq_length() == last


@emulated
def test_an_exception_removes_the_step_ahead_from_the_cache(checkpoint):
    def fail(number: int) -> None:
        if number == 6:
            raise KeyboardInterrupt

    with loaded(checkpoint) as model:
        cache = StaticCache(model.config, max_cache_len=20)
        settings = {"max_new_tokens": NEW_TOKENS, cache_name(model.forward): cache}
        with pytest.raises(KeyboardInterrupt):
            model.generate(THREE[:1], do_sample=False, streamer=Calls(fail), **settings)
        assert model.forward.is_one_graph
        assert cache.get_seq_length() == 3 + 4  # the fifth token was shown, not computed with


@emulated
def test_ctrl_c_at_the_end_of_a_recording_leaves_none_open(checkpoint):
    lines, first = inspect.getsourcelines(RecordedStep.__init__)
    number = first + next(n for n, line in enumerate(lines) if "recording = None" in line)
    with loaded(checkpoint) as model:
        generate = functools.partial(model.generate, THREE, max_new_tokens=4, do_sample=False)
        expected = generate()
        experts_modules_of(model)[0].store.recorded = None  # else it is good for the next call, too
        site = Site(RecordedStep.__init__.__code__, number)
        assert raise_on(site, 1, KeyboardInterrupt, generate)
        assert torch.equal(generate(), expected)
        model.moe.check()
