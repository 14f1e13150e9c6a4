"""Caches that grow in place equal transformers' caches, and never write into other tensors."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from moe_runtime.inference.budget import ROOM_TOKENS, room_for
from moe_runtime.inference.kv_cache import grow_cache_in_place, take_place


class Caller(torch.nn.Module):
    """Hands its cache on, as a model does."""

    def forward(self, past_key_values=None, **_):
        return past_key_values


WINDOWS = GptOssConfig(sliding_window=9, layer_types=["sliding_attention"], num_hidden_layers=1)


def growing_cache(config: GptOssConfig | None = None) -> DynamicCache:
    model = Caller()
    grow_cache_in_place(model)
    return model(past_key_values=DynamicCache(config=config))


def tokens(count: int, *, batch: int = 2, start: float = 0.0):
    keys = torch.arange(batch * 3 * count * 4, dtype=torch.float32).view(batch, 3, count, 4) + start
    return keys, keys.repeat_interleave(2, dim=-1) + 0.5


def same(one: DynamicCache, other: DynamicCache) -> bool:
    return torch.equal(one.layers[0].keys, other.layers[0].keys) and torch.equal(
        one.layers[0].values, other.layers[0].values
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 90)),
        st.tuples(st.just("crop"), st.integers(1, 40)),
        st.tuples(st.just("reorder"), st.permutations([0, 1])),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("reset"), st.none()),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(steps=STEPS, config=st.sampled_from([None, WINDOWS]))
def test_random_operations_equal_transformers_cache(steps, config):
    ours, theirs = growing_cache(config), DynamicCache(config=config)
    for number, (step, value) in enumerate([("append", 3), *steps]):
        has_tokens = theirs.get_seq_length() > 0
        if step == "append":
            states = tokens(value, start=1000.0 * number)
            answers = [cache.update(*states, 0) for cache in (ours, theirs)]
            assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))
        elif step == "crop" and has_tokens and (config is None or theirs.get_seq_length() < 9):
            for cache in (ours, theirs):
                cache.crop(-min(value, theirs.get_seq_length() - 1))
        elif step == "reorder" and has_tokens:
            for cache in (ours, theirs):
                cache.reorder_cache(torch.tensor(value))
        elif step == "copy":
            ours = copy.deepcopy(ours)
        elif step == "reset":
            for cache in (ours, theirs):
                cache.reset()
            continue
        assert ours.get_seq_length() == theirs.get_seq_length()
        if theirs.get_seq_length() > 0:
            assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
            assert same(ours, theirs)


def test_a_window_moves_through_its_room():
    cache = growing_cache(WINDOWS)
    cache.update(*tokens(20), 0)
    cache.update(*tokens(1), 0)
    layer = cache.layers[0]
    assert layer.keys.shape[-2] == 8
    assert layer.keys.stride(1) == room_for(9, 2) * 4  # not that of the prompt any more
    view, held, place = layer.keys, layer.keys.clone(), layer.keys.data_ptr()
    for _ in range(ROOM_TOKENS // 2):
        cache.update(*tokens(1, start=7.0), 0)
    assert layer.keys.data_ptr() == place + ROOM_TOKENS // 2 * 4 * layer.keys.element_size()
    assert torch.equal(view, held)
    cache.update(*tokens(1, start=7.0), 0)
    assert layer.keys.shape[-2] == 8


def test_a_window_that_can_be_rolled_back_is_transformers_own():
    ours, theirs = growing_cache(WINDOWS), DynamicCache(config=WINDOWS)
    for cache in (ours, theirs):
        cache.update(*tokens(12), 0)
        cache.layers[0].activate_past_recording()
        cache.update(*tokens(4, start=70.0), 0)
        cache.crop(-2)
        cache.update(*tokens(1, start=90.0), 0)
    assert same(ours, theirs)
    assert take_place(ours, 0, torch.float32) is None


def test_tokens_are_written_into_the_room():
    cache = growing_cache()
    cache.update(*tokens(10), 0)
    cache.update(*tokens(1), 0)
    first = cache.layers[0].keys.data_ptr()
    for _ in range(ROOM_TOKENS // 2 - 1):
        cache.update(*tokens(1), 0)
    assert cache.layers[0].keys.data_ptr() == first
    assert cache.layers[0].keys.stride(1) == room_for(11, 2) * 4


def test_branches_of_one_cache_do_not_write_into_each_other():
    cache = growing_cache()
    cache.update(*tokens(5), 0)
    cache.update(*tokens(1), 0)
    branch = copy.copy(cache.layers[0])
    held = cache.layers[0].keys.clone()
    branch.update(*tokens(1, start=50.0))
    after = branch.keys.clone()
    cache.update(*tokens(1, start=99.0), 0)
    assert torch.equal(branch.keys, after)
    assert torch.equal(cache.layers[0].keys[:, :, :6], held)


def test_a_cache_of_inference_mode_can_be_continued_outside():
    ours, theirs = growing_cache(), DynamicCache()
    for cache in (ours, theirs):
        with torch.inference_mode():
            cache.update(*tokens(5), 0)
            cache.update(*tokens(1), 0)
        cache.update(*tokens(2), 0)
    assert same(ours, theirs)


def test_a_gradient_flows_as_through_transformers_cache():
    cache = growing_cache()
    cache.update(*tokens(2), 0)
    keys, values = (tensor.requires_grad_() for tensor in tokens(1))
    cache.update(keys, values, 0)
    cache.layers[0].keys.sum().backward()
    assert keys.grad is not None


@pytest.mark.parametrize("filled", [False, True])
def test_a_filled_cache_is_converted(filled):
    cache = DynamicCache()
    if filled:
        cache.update(*tokens(4), 0)
    model = Caller()
    grow_cache_in_place(model)
    model(past_key_values=cache)
    cache.update(*tokens(1), 0)
    assert type(cache.layers[0]) is not DynamicLayer
    assert cache.get_seq_length() == (5 if filled else 1)
