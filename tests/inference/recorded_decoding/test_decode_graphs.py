"""Decode steps that are recorded and replayed, with experts in slots of an emulated device."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_models import bring_all, emulated, experts_modules_of, load_on_emulated_device
from fetched_models import THREE, Request, store_of
from moe_families import Family
from tiny_checkpoints import PROMPT, save, tiny_model
from transformers import DynamicCache, GenerationConfig

import moe_runtime
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.errors import CapacityError, MoERuntimeError
from moe_runtime.inference.device import decode_graphs
from moe_runtime.inference.kv_cache import cache_of
from moe_runtime.types import ExpertKey

pytest.importorskip("triton")
NUM_EXPERTS, NEW_TOKENS = 6, 4
ONE = THREE[:1]


@contextmanager
def loaded(checkpoint: Path, slots: int, misses: str = "device") -> Iterator[Any]:
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots, misses=misses, max_tokens=256)
    with model.moe:
        yield model


def recorded(model: Any) -> Any:
    return store_of(model).recorded


class Waiting(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if x.sum().item() < 1e9 else x


def without_graphs(model: Any) -> Any:
    model.forward = model.forward.__wrapped__
    return model


@emulated
@pytest.mark.parametrize(
    ("num_sequences", "slots", "misses"),
    [(1, NUM_EXPERTS, "device"), (3, 2, "device"), (3, 3, "all-on-cpu")],
)
def test_the_same_bits_as_without_graphs(checkpoint, num_sequences, slots, misses):
    prompt, found, counts = THREE[:num_sequences], [], []
    for is_recorded in (True, False):
        with loaded(checkpoint, slots, misses) as model:
            if not is_recorded:
                without_graphs(model)
            found.append(Request(model, prompt).steps(NEW_TOKENS))
            assert (recorded(model) is not None) == is_recorded
            model.moe.check()
            stats = model.moe.stats()
            counts.append((stats.hits + stats.late_hits, stats.misses))
    assert all(map(torch.equal, *found))
    assert counts[0] == counts[1]


@emulated
def test_a_fully_resident_step_is_one_graph_until_an_eviction(checkpoint):
    found, counts = [], []
    for is_recorded in (True, False):
        with loaded(checkpoint, NUM_EXPERTS) as model:
            store: Any = experts_modules_of(model)[0].store
            bring_all(model)
            if not is_recorded:
                without_graphs(model)
            request = Request(model)
            request.steps(3)
            assert not is_recorded or recorded(model).is_one_graph
            with store._monitor:
                store._drop(ExpertKey(1, 0))
                store._drop(ExpertKey(1, 5))
            found.append(request.steps(2))
            assert not is_recorded or not recorded(model).is_one_graph
            stats = model.moe.stats()
            counts.append((stats.hits + stats.late_hits, stats.misses))
            model.moe.check()
    assert all(map(torch.equal, *found))
    assert counts[0] == counts[1]


@emulated
@pytest.mark.parametrize("length", [pytest.param(2, marks=pytest.mark.long), 7])
def test_layers_of_a_window_are_recorded_with_a_cache_of_all_tokens(tmp_path, length):
    """The window is left behind while tokens are generated, or by the prompt."""
    compare_windows(tmp_path, length, lambda folder: loaded(folder, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [2, 7])
def test_a_gpu_records_layers_of_a_window(tmp_path, length):
    @contextmanager
    def on_gpu(folder: Path) -> Iterator[Any]:
        model: Any = moe_runtime.load(folder, device="cuda", max_tokens=64)
        with model.moe:
            yield model

    compare_windows(tmp_path, length, on_gpu)


def compare_windows(folder: Path, length: int, load: Any) -> None:
    """Generates with and without a static cache, with a window of four tokens in one layer."""
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    family = Family("gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 2, **windows})
    checkpoint = save(tiny_model(family), folder, sharded=True)
    found = []
    for settings in ({}, {"cache_implementation": "dynamic"}):
        with load(checkpoint) as model:
            prompt = torch.arange(3, 3 + length, device=model.device)[None].repeat(2, 1)
            mask = torch.ones_like(prompt)
            mask[1, 0] = 0
            one = model.generate(
                prompt, attention_mask=mask, max_new_tokens=6, do_sample=False,
                output_logits=True, return_dict_in_generate=True, **settings,
            )  # fmt: skip
            assert (recorded(model) is not None) == (not settings)
            found.append((one.sequences, torch.stack(one.logits)))
            model.moe.check()
    assert torch.equal(found[0][0], found[1][0])
    # sums over the same tokens, among masked ones: fp32 rounding of some hundred terms
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


@emulated
def test_options_of_generate_decide_the_kind_of_cache(checkpoint):
    with loaded(checkpoint, 2) as model:
        settings = {"max_new_tokens": 2, "do_sample": False}
        found = model.generate(PROMPT, return_dict_in_generate=True, **settings)
        cache = cache_of(found)
        assert type(cache) is DynamicCache  # others go on with it
        longer = torch.cat([found.sequences, PROMPT[:, :2]], 1)
        grown = model.generate(longer, **{cache_name(model.forward): cache}, **settings)
        assert torch.equal(grown, model.generate(longer, **settings))
        model.generate(PROMPT, max_new_tokens=30, eos_token_id=[*range(model.config.vocab_size)])
        model.generate(THREE, **settings)
        for name, value in (
            ("num_beams", 2),
            ("num_return_sequences", 2),
            ("prompt_lookup_num_tokens", 2),
            ("prefill_chunk_size", 2),
            ("use_cache", False),
            ("cache_implementation", "dynamic"),
        ):
            given = GenerationConfig(max_new_tokens=3, do_sample=True, **{name: value})
            assert not model._can_be_static(given, {})
            assert not model._can_be_static(None, {"max_new_tokens": 3, name: value})
        assert model._can_be_static(GenerationConfig(max_new_tokens=3), {})
        model.generation_config.num_beams = 2
        assert not model._can_be_static(None, settings)


@emulated
def test_only_plain_positions_are_left_to_the_cache(checkpoint):
    with loaded(checkpoint, 2) as model:
        cache, where = Request(model, PROMPT).cache, PROMPT.shape[1]

        def prepare(position: int) -> Any:
            return model.prepare_inputs_for_generation(
                PROMPT,
                next_sequence_length=1,
                **{cache_name(model.forward): cache},
                attention_mask=torch.ones_like(PROMPT),
                position_ids=torch.tensor([[position]]),
            )

        for position in (where + 3, where):  # a caller's position, and that of transformers
            prepare(position)
            assert ("position_ids" in prepare(position + 1)) == (position > where)
        with patch.object(cache.layers[0], "device", torch.device("meta")):
            assert prepare(where + 2)["input_ids"].device.type == "meta"
        model.set_attn_implementation("eager")  # CUDA records no copy of the numbers of its masks
        model._unpadded.clear()
        prepare(where)
        assert prepare(where + 1)["attention_mask"] is not None


@emulated
def test_changes_of_the_model_are_seen(checkpoint):
    called: list[Any] = []
    with loaded(checkpoint, 2) as model, loaded(checkpoint, 2) as other:
        ours = Request(model)
        theirs = Request(without_graphs(other))
        norms = [each.model.layers[1].input_layernorm for each in (model, other)]

        def step() -> None:
            assert torch.equal(ours.steps(1)[-1], theirs.steps(1)[-1])

        for _ in range(3):
            step()
        first = recorded(model)
        assert first is not None
        for norm in norms:
            norm.weight.data.mul_(1.5)  # where it is: a recording reads it there
        step()
        assert recorded(model) is first
        for norm in norms:
            norm.weight = torch.nn.Parameter(2 * norm.weight, requires_grad=False)
        step()
        assert recorded(model) is not first
        for norm in norms:
            norm.weight.data = norm.weight.data.clone()
        step()
        hook = norms[0].register_forward_hook(lambda *_: called.append(1))
        step()
        step()
        assert len(called) == 2
        hook.remove()
        step()
        step()
        assert recorded(model) is not None
        assert len(called) == 2
        for each in (model, other):
            each.model.layers[0].mlp.gate.top_k = 1
        step()
        for norm in norms:
            norm.forward = partial(twice, norm.forward)
        step()


@emulated
def test_a_moved_cache_is_seen_and_a_dropped_one_is_freed(checkpoint):
    with loaded(checkpoint, 2) as model, loaded(checkpoint, 2) as other:
        ours, theirs = Request(model, THREE), Request(without_graphs(other), THREE)
        for request in (ours, theirs):
            request.steps(2)
            request.cache.reorder_cache(torch.tensor([2, 0, 1]))
        assert all(map(torch.equal, ours.steps(1), theirs.steps(1)))
        assert recorded(model) is not None
        cache = weakref.ref(ours.cache)
        del ours, request
        gc.collect()
        assert cache() is None
        request = Request(model)
        for _ in range(3):
            with torch.no_grad():
                found = model(PROMPT[:, :1], past_key_values=request.cache, return_dict=False)
            assert isinstance(found, tuple)


def twice(forward: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * forward(x)


@emulated
def test_a_step_that_fails_leaves_the_next_request_right(checkpoint):
    with loaded(checkpoint, 2) as model, loaded(checkpoint, 2) as other:
        expected = Request(without_graphs(other)).steps(2)
        store: Any = experts_modules_of(model)[0].store
        begun, running = store.device.faults, store.device.late_faults
        for faults, error in ((begun, KeyboardInterrupt()), (running, OSError("unplugged"))):
            request = Request(model, THREE)
            request.steps(2)
            assert recorded(model) is not None
            faults.append(error)
            # an error during the copy is raised by the next step at the latest
            with pytest.raises((KeyboardInterrupt, MoERuntimeError)):
                request.steps(2)
            model.moe.check()
            assert not begun
            assert not running
            assert all(map(torch.equal, Request(model).steps(2), expected))


@emulated
def test_unsupported_operations_are_computed_without_recording(checkpoint):
    with loaded(checkpoint, 2) as model, loaded(checkpoint, 2) as other:
        model.model.norm = Waiting(model.model.norm)
        with pytest.warns(UserWarning, match="not recorded as CUDA graphs: aten._local_scalar"):
            found = Request(model).steps(NEW_TOKENS)
        assert recorded(model) is None
        assert all(map(torch.equal, found, Request(without_graphs(other)).steps(NEW_TOKENS)))


@emulated
def test_a_recording_that_finds_no_memory_is_tried_again(checkpoint, monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for the graph")

    monkeypatch.setattr(decode_graphs, "_STEPS_WITHOUT", 4)
    with loaded(checkpoint, 2) as model, loaded(checkpoint, 2) as other:
        request = Request(model)
        with monkeypatch.context() as patch:
            patch.setattr(decode_graphs, "RecordedStep", refuse)
            with pytest.warns(UserWarning, match="no memory"):
                found = request.steps(3)
        assert recorded(model) is None
        found += request.steps(6)
        assert recorded(model) is not None
        assert model.moe.stats().cut_steps > 0
        expected = Request(without_graphs(other))
        assert all(map(torch.equal, found, expected.steps(3) + expected.steps(6)))


def bytes_held(part: Any, made: dict[int, torch.Tensor]) -> set[int]:
    """Addresses of what a recording made and its object still holds."""
    if isinstance(part, torch.Tensor):
        return {part.untyped_storage().data_ptr()} & made.keys()
    inner = [*part.values()] if isinstance(part, dict) else part
    if not isinstance(inner, (list, tuple)):
        is_ours = type(part).__module__.startswith(("moe_runtime.kernels", decode_graphs.__name__))
        inner = [*vars(part).values()] if is_ours and hasattr(part, "__dict__") else ()
    return set[int]().union(*(bytes_held(each, made) for each in inner))


@emulated
@pytest.mark.parametrize("slots", [2, NUM_EXPERTS])
def test_the_memory_of_recordings_is_reserved_counted_and_bounded(checkpoint, slots):
    with loaded(checkpoint, slots) as model, loaded(checkpoint, slots) as other:
        if slots == NUM_EXPERTS:
            bring_all(model)
        kept = [Request(model, THREE) for _ in range(3)]
        assert model.moe.stats().recorded_bytes == 0
        for request in kept:
            request.steps(2)
        first = recorded(model)
        assert len(first.others) == 2
        device = store_of(model).device
        made = {place: one for graph in device.graphs for place, one in graph.made.items()}
        held = bytes_held([first._output, first._experts], made)
        assert held
        size = sum(made[place].untyped_storage().nbytes() for place in held)
        assert size <= first.num_bytes <= first.most_bytes
        stats = model.moe.stats()
        assert stats.recorded_bytes == device.recorded_bytes() > size
        assert stats.recorded_reserve_bytes > first.most_bytes
        del first
        with patch.object(decode_graphs, "most_recorded_bytes", lambda *_: 1):
            last = Request(model, THREE)
            last.steps(2)
        assert not recorded(model).others
        expected = Request(without_graphs(other), THREE).steps(4)
        for request in (*kept, last):
            found = request.steps(5 - len(request.logits))
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED"]
)
def test_every_library_says_in_its_words_that_memory_is_lacking(text):
    assert decode_graphs._is_lack_of_memory(RuntimeError(text))
    assert not decode_graphs._is_lack_of_memory(RuntimeError("out of resource: shared memory"))


@pytest.mark.gpu
@pytest.mark.parametrize("misses", ["device", "auto"])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_gpu_replays_the_bits_of_its_steps(checkpoint, misses, num_sequences):
    with pytest.raises(CapacityError) as refused:
        moe_runtime.load(checkpoint, device="cuda", max_tokens=256, device_memory=1)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    for budget in ("1GiB", smallest + 20_000, smallest):
        found = []
        for is_recorded in (True, False):
            model: Any = moe_runtime.load(
                checkpoint, device="cuda", max_tokens=256, device_memory=budget,
                misses=misses if is_recorded else "device",
            )  # fmt: skip
            with model.moe:
                if not is_recorded:
                    without_graphs(model)
                found.append(Request(model, THREE[:num_sequences].to("cuda")).steps(NEW_TOKENS))
                assert (recorded(model) is not None) == is_recorded
                stats = model.moe.stats()
                assert (stats.recorded_bytes > 0) == is_recorded
                assert stats.recorded_bytes <= stats.recorded_reserve_bytes
                model.moe.check()
        if misses == "auto":  # the clock decides the side; fp32 sums in another order
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        else:
            assert all(map(torch.equal, *found))


@pytest.mark.gpu
def test_a_gpu_computes_unsupported_operations(checkpoint):
    model: Any = moe_runtime.load(checkpoint, device="cuda", max_tokens=256)
    with model.moe:
        expected = Request(without_graphs(model), ONE.to("cuda")).steps(NEW_TOKENS)
    model = moe_runtime.load(checkpoint, device="cuda", max_tokens=256)
    with model.moe:
        model.model.norm = Waiting(model.model.norm)
        with pytest.warns(UserWarning, match="not recorded as CUDA graphs"):
            found = Request(model, ONE.to("cuda")).steps(NEW_TOKENS)
        assert all(map(torch.equal, found, expected))
        torch.randn(3, device="cuda")  # the generator is as it was
