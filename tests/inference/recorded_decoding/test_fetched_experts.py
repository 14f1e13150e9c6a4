"""Steps that read missing experts in host memory by themselves, with an emulated device."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import quantized_checkpoints
import torch
from emulated_device import EmulatedDevice
from emulated_models import emulated, experts_modules_of
from fetched_models import (
    ENOUGH,
    EVERY,
    LAYERS,
    MOST_REFUSED,
    NUM_EXPERTS,
    SLOTS,
    THREE,
    Request,
    assert_expected,
    in_both,
    is_fetched,
    store_of,
    warmed,
)
from moe_families import Family
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save, tiny_model

import moe_runtime
from moe_runtime.config import PrefetchMode
from moe_runtime.errors import CapacityError, MoERuntimeError
from moe_runtime.inference.steps import Listener
from moe_runtime.memory.device import host_tables

pytest.importorskip("triton")
TWO = {"num_hidden_layers": LAYERS}
FAMILIES = [
    pytest.param(
        Family("mixtral", "MixtralForCausalLM", TWO | {"sliding_window": None}),
        marks=pytest.mark.long,
    ),
    # gate and up in turn, with biases
    Family("gpt_oss", "GptOssForCausalLM", TWO | {"layer_types": ["full_attention"] * LAYERS}),
]


@emulated
@pytest.mark.parametrize(
    ("num_sequences", "host_slots", "margin"),
    [pytest.param(1, ENOUGH, 2.0, marks=pytest.mark.long), (3, EVERY, -1.0)],
)
def test_one_graph_gives_the_bits_of_resident_experts(
    checkpoint, num_sequences, host_slots, margin, monkeypatch
):
    """Also if every missing expert becomes resident."""
    monkeypatch.setattr(host_tables, "MARGIN", margin)
    with warmed(checkpoint, host_slots=host_slots) as model:
        request = Request(model, THREE[:num_sequences]).until_fetched()
        model.moe.reset_stats()
        for _ in range(4):
            request.steps(1)
            model.moe.stats()  # counts the choices
        assert is_fetched(model)
        assert model.forward.is_one_graph
        above, below = in_both(model)
        assert len(above | below) == EVERY
        assert len(above) <= LAYERS * SLOTS - 2
        model.moe.check()
        stats = model.moe.stats()
        assert stats.hits + stats.misses >= 4 * LAYERS * 2
        assert stats.misses > 0
    assert_expected(checkpoint, request)


@emulated
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_other_families(family, tmp_path):
    checkpoint = save(tiny_model(family).bfloat16(), tmp_path, sharded=True)
    with warmed(checkpoint) as model:
        request = Request(model).until_fetched()
        model.moe.reset_stats()
        request.steps(3)
        assert is_fetched(model)
        assert model.moe.stats().misses > 0
    assert_expected(checkpoint, request)


@emulated
def test_experts_in_two_files_are_fetched(tmp_path):
    """As of published checkpoints: such an expert comes in more parts than the others."""
    save(tiny_model(Family("qwen3_moe", "Qwen3MoeForCausalLM", TWO)), tmp_path, sharded=False)
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    names = {name: int(".experts.2.up_proj." in name) for name in tensors}
    whole.unlink()
    for file in range(2):
        save_file(
            {n: tensors[n] for n in names if names[n] == file}, tmp_path / f"{file}.safetensors"
        )
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with warmed(tmp_path) as model:
        request = Request(model).until_fetched()
        request.steps(3)
        store = store_of(model)
        moves, slot = store.fetcher.moves_of, store._slab.slot(0)
        for module in experts_modules_of(model):
            assert {len(moves(key, slot)) for key in module._keys} == {1, 2}
    assert_expected(tmp_path, request)


@emulated
def test_tables_that_were_made_in_inference_mode_serve_other_calls(checkpoint):
    """Warming up makes such tables."""
    with warmed(checkpoint) as model:
        with torch.inference_mode():
            Request(model, THREE[1:2]).until_fetched()
        request = Request(model).until_fetched()
        request.steps(3)
        assert model.moe.stats().misses > 0
    assert_expected(checkpoint, request)


@emulated
def test_quantised_experts_are_fetched_packed(tmp_path):
    sample = next(s for s in quantized_checkpoints.SAMPLES if s.name == "deepseek_v3-int4")
    family = replace(sample.family, config=sample.family.config | {"num_hidden_layers": 3})
    checkpoint = quantized_checkpoints.write(replace(sample, family=family), tmp_path).folder
    with warmed(checkpoint, host_slots=EVERY, dtype="float32") as model:
        request = Request(model).until_fetched()
        request.steps(1)
    assert_expected(checkpoint, request, dtype="float32")


@emulated
def test_used_experts_become_resident(checkpoint):
    """With one repeated prompt, its experts become resident."""
    misses, requests = [], []
    with warmed(checkpoint, host_slots=ENOUGH) as model:
        Request(model, THREE[1:2]).until_fetched()
        for _ in range(5):
            model.moe.reset_stats()
            requests.append(Request(model))
            requests[-1].steps(8)
            misses.append(model.moe.stats().misses)
            assert is_fetched(model)
            model.moe.check()
    assert misses[-1] < misses[0]
    for request in requests:
        assert_expected(checkpoint, request)


@emulated
def test_steps_are_cut_while_an_expert_is_in_no_memory(checkpoint):
    with warmed(checkpoint) as model:
        request, refused = Request(model).until_fetched(), 0
        with patch.object(store_of(model).host_tables, "_list", return_value=False):
            while is_fetched(model):
                request.steps(1)  # by the way without graphs
                refused += 1
                model.moe.check()
            assert MOST_REFUSED <= refused <= MOST_REFUSED + 1
            request.steps(2 * MOST_REFUSED)
            assert not is_fetched(model)
            assert not model.forward.is_one_graph
        request.until_fetched()
        model.moe.check()
    assert_expected(checkpoint, request)


@emulated
@pytest.mark.parametrize(
    "mode",
    [None, pytest.param(PrefetchMode.OBSERVE, marks=pytest.mark.long), PrefetchMode.AUTO],
)
def test_evicted_experts_are_read_ahead_if_prefetch_is_on(checkpoint, mode):
    with warmed(checkpoint, host_slots=ENOUGH) as model:
        model.moe.prefetcher = mode and Mock(mode=mode)
        store = store_of(model)
        lower = store.fetcher.lower
        with lower._monitor:
            for key in [key for key in lower._entries if not store.has(key)]:
                lower._drop(key)
        request = Request(model)
        with patch.object(lower, "read_spare", wraps=lower.read_spare) as read:
            request.steps(MOST_REFUSED)
        assert read.called == (mode is PrefetchMode.AUTO)
        if mode is PrefetchMode.AUTO:
            request.until_fetched()
        model.moe.check()
    assert_expected(checkpoint, request)


class Heard(Listener):
    """Hears of every layer while it is computed."""

    wants_routing = True

    def __init__(self) -> None:
        self.num_layers = 0

    def routed(self, routing: object) -> None:
        self.num_layers += 1


@emulated
def test_listeners_within_a_step_cut_it(checkpoint):
    with warmed(checkpoint) as model:
        request, heard = Request(model).until_fetched(), Heard()
        with experts_modules_of(model)[0].listeners.also(heard):
            request.steps(3)
            assert not is_fetched(model)
        assert heard.num_layers == 3 * LAYERS
        request.until_fetched()
    assert_expected(checkpoint, request)
    with warmed(checkpoint, misses="all-on-cpu") as model:
        request = Request(model)
        request.steps(2 * MOST_REFUSED)
        assert store_of(model).recorded is not None
        assert not is_fetched(model)
        assert store_of(model).host_tables is None


@emulated
@pytest.mark.parametrize("slots", [3, NUM_EXPERTS])
def test_too_few_slots_and_full_residency_fetch_nothing(checkpoint, slots):
    """A quarter of six slots is less than two; where all are resident there is nothing to fetch."""
    with warmed(checkpoint, slots=slots) as model:
        request = Request(model)
        request.steps(2 * MOST_REFUSED)
        assert store_of(model).recorded is not None
        assert not is_fetched(model)
        assert model.forward.is_one_graph == (slots == NUM_EXPERTS)
        assert store_of(model).host_tables is None
    assert_expected(checkpoint, request)


@emulated
def test_a_device_without_host_access_fetches_nothing(checkpoint):
    with patch.object(EmulatedDevice, "reads_host", lambda *_: False), warmed(checkpoint) as model:
        request = Request(model)
        request.steps(2 * MOST_REFUSED)
        assert not is_fetched(model)
    assert_expected(checkpoint, request)


@emulated
@pytest.mark.parametrize(("slower", "is_slow"), [(1.5, False), (3.0, True)])
def test_a_link_that_kernels_read_slowly_is_left_to_copies(checkpoint, slower, is_slow):
    """As it was measured, in steps that are cut, with the same bits."""
    with warmed(checkpoint) as model:
        store = store_of(model)
        store.fetcher.speed.seconds_per_byte = 1e-6

        def time(device: Any, queue: Any) -> Any:
            queue()
            tables = store.host_tables
            landing = next(iter(tables.layers.values()))
            absent = (next(iter(tables._listed.values())).slots < 0).sum()
            count = min(absent, len(landing.tables.landing_L))
            return lambda: count * landing.expert_bytes * 1e-6 * slower

        def shares() -> list[int]:
            return [store.slots_of(layer) for layer in range(LAYERS)]

        before = store.num_slots, sum(shares())
        with patch.object(EmulatedDevice, "time", time):
            request = Request(model)
            request.steps(3 * MOST_REFUSED)
        taken = 0 if is_slow else 2  # landing slots
        assert (store.num_slots, sum(shares())) == (before[0] - taken, before[1] - taken)
        assert is_fetched(model) == (not is_slow)
        assert store.host_tables.is_slow == is_slow
        assert (model.moe.stats().cut_steps > 0) >= is_slow
        store.device.replayed_s = 99.0  # on another stream
        with store.device.stream(3):
            request.steps(1)
        assert store.device._streams_s[3] >= 99.0
        model.moe.check()
    assert_expected(checkpoint, request)


def decode_and_count(model: Any) -> None:
    """No expert is in both memories."""
    request = Request(model).until_fetched()
    store = store_of(model)
    with store._monitor:
        for key in set.intersection(*in_both(model)):
            store._drop(key)
    request.steps(4)
    model.moe.stats()


@emulated
@pytest.mark.parametrize("kind", [KeyboardInterrupt, pytest.param(OSError, marks=pytest.mark.long)])
def test_a_step_that_fails_leaves_the_next_request_right(checkpoint, kind, monkeypatch):
    error = kind("unplugged")
    monkeypatch.setattr(host_tables, "MARGIN", -1.0)
    with warmed(checkpoint) as model:
        Request(model).until_fetched()
        store = store_of(model)
        for name in ("_list", "count", "_admit"):
            failing = patch.object(store.host_tables, name, side_effect=error)
            with failing, pytest.raises((type(error), MoERuntimeError)):
                decode_and_count(model)
            request = Request(model)
            request.steps(4)
            model.moe.check()
            assert_expected(checkpoint, request)
        for faults in (store.device.faults, store.device.late_faults):
            faults.append(error)
            with suppress(type(error), MoERuntimeError):
                Request(model).steps(2 * MOST_REFUSED)
            faults.clear()  # no expert may have become resident
            with suppress(MoERuntimeError):
                Request(model)
            request = Request(model).until_fetched()
            model.moe.check()
            assert_expected(checkpoint, request)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_gpu_reads_experts_in_host_memory(checkpoint, num_sequences):
    prompt, found = THREE[:num_sequences].to("cuda"), []
    for num_slots in (EVERY, LAYERS * SLOTS):
        model = load_with_slots(checkpoint, num_slots)
        with model.moe:
            request = Request(model, prompt)
            request.steps(3 * MOST_REFUSED)
            assert is_fetched(model) == (num_slots < EVERY)
            model.moe.reset_stats()
            found.append(request.steps(8))
            assert (model.moe.stats().misses > 0) == (num_slots < EVERY)
            model.moe.check()
    assert all(map(torch.equal, *found))


def load_with_slots(checkpoint: Path, num_slots: int) -> Any:
    """On the GPU, with the least memory that gives so many slots."""
    budget = 1
    while True:
        try:
            model: Any = moe_runtime.load(
                checkpoint, device="cuda", max_tokens=256, device_memory=budget, warm_up=True,
                policy="auto", prefetch="auto",
            )  # fmt: skip
        except CapacityError as refused:
            budget = refused.smallest_bytes or 0
            continue
        missing = num_slots - model.moe.facts.device_plan.num_slots
        if missing <= 0:
            return model
        budget += missing * model.moe.facts.device_plan.slot_bytes
        model.moe.close()
