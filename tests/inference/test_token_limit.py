"""``max_tokens`` is a promise: calls that need more memory are refused before computing."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moe_families import FAMILIES
from tiny_checkpoints import save, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3MoeConfig, StaticCache
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from moe_runtime import load
from moe_runtime.checkpoints.transformers_private import page_size_name
from moe_runtime.errors import CapacityError
from moe_runtime.inference.budget import room_for, tokens_to_plan_for
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path

PAGE = page_size_name(ContinuousBatchingConfig())
LIMIT = 24


def prompt(num_sequences: int, length: int) -> torch.Tensor:
    return torch.arange(num_sequences * length).reshape(num_sequences, length) + 7


@pytest.fixture(scope="module")
def pocket() -> Iterator[Any]:
    model: Any = load(pocket_path(), device="cpu", max_tokens=LIMIT)
    with model.moe:
        yield model


@pytest.fixture(scope="module")
def unlimited() -> Iterator[Any]:
    model: Any = load(pocket_path(), device="cpu")
    with model.moe:
        yield model


def requests(model: Any) -> int:
    stats = model.moe.stats()
    return stats.hits + stats.late_hits + stats.misses


# Each asks for room for this many tokens.
GENERATED = {
    "one": lambda n: {"max_new_tokens": n - 4},
    "to a length": lambda n: {"max_length": n},
    "by a configuration": lambda n: {"generation_config": GenerationConfig(max_new_tokens=n - 4)},
    "two sequences": lambda n: {"inputs": prompt(2, 4), "max_new_tokens": n // 2 - 4},
    "beams": lambda n: {"num_beams": 2, "max_new_tokens": n // 2 - 4},
    "several of each": lambda n: {
        "do_sample": True, "num_return_sequences": 2, "max_new_tokens": n // 2 - 4,
    },
    "assisted": lambda n: {"prompt_lookup_num_tokens": 3, "max_new_tokens": n - 4},
    "static cache": lambda n: {"cache_implementation": "static", "max_new_tokens": n - 4},
}  # fmt: skip


@pytest.mark.parametrize("case", GENERATED)
def test_generation_beyond_the_limit_does_not_begin(pocket, case):
    before = requests(pocket)
    with pytest.raises(CapacityError, match=f"memory is set aside for {LIMIT}; load the model"):
        pocket.generate(**{"inputs": prompt(1, 4)} | GENERATED[case](LIMIT + 2))
    assert requests(pocket) == before
    pocket.generate(**{"inputs": prompt(1, 4)} | GENERATED[case](LIMIT))
    assert requests(pocket) > before


def test_generation_of_unsaid_length_ends_at_the_limit(pocket):
    pocket.generation_config.max_new_tokens = 2 * LIMIT
    with pytest.raises(CapacityError, match=f"{LIMIT + 1} tokens need room for {LIMIT + 1}"):
        pocket.generate(prompt(1, 4), eos_token_id=None, do_sample=False)
    pocket.generation_config.max_new_tokens = None
    pocket.moe.check()


def continued(model: Any, first: int, more: int) -> Any:
    cache = model(prompt(2, first)).past_key_values
    return model(prompt(2, more), past_key_values=cache)


def continued_by_position(model: Any, first: int, more: int) -> Any:
    cache = model(prompt(2, first)).past_key_values
    return model(prompt(2, more), None, None, cache)


def embedded(model: Any, length: int) -> Any:
    return model(inputs_embeds=model.get_input_embeddings()(prompt(1, length)))


def static(model: Any, places: int) -> Any:
    cache = StaticCache(config=model.config, max_cache_len=places)
    return model(prompt(2, 3), past_key_values=cache)


@pytest.mark.parametrize(
    ("call", "fits", "too_long"),
    [
        (lambda model, n: model(prompt(1, n)), LIMIT, LIMIT + 1),
        (lambda model, n: model(input_ids=prompt(n, 2)), LIMIT // 2, LIMIT // 2 + 1),
        (lambda model, n: model(prompt(1, n), use_cache=False), LIMIT, LIMIT + 1),
        (embedded, LIMIT, LIMIT + 1),
        (lambda model, n: continued(model, 8, n), LIMIT // 2 - 8, LIMIT // 2 - 7),
        (lambda model, n: continued_by_position(model, 8, n), LIMIT // 2 - 8, LIMIT // 2 - 7),
        (static, LIMIT // 2, LIMIT // 2 + 1),
    ],
    ids=["one", "several", "no cache", "embeddings", "continued", "by position", "static cache"],
)
def test_a_step_beyond_the_limit_is_refused(pocket, unlimited, call, fits, too_long):
    with torch.inference_mode():
        assert torch.equal(call(pocket, fits).logits, call(unlimited, fits).logits)
        with pytest.raises(CapacityError, match=f"memory is set aside for {LIMIT}"):
            call(pocket, too_long)
    pocket.moe.check()


@pytest.mark.parametrize("num_sequences", [1, 3, 5, 70])
@pytest.mark.parametrize("num_tokens", [1, 15, 200])
def test_several_sequences_take_no_more_room_than_one(num_sequences, num_tokens):
    together = num_sequences * num_tokens
    assert num_sequences * room_for(num_tokens, num_sequences) <= room_for(together)


def test_a_cache_of_several_sequences_keeps_to_the_reserve(unlimited):
    with torch.inference_mode():
        cache = unlimited(prompt(3, 5)).past_key_values
        for _ in range(11):
            unlimited(prompt(3, 1), past_key_values=cache)
    keys = cache.layers[0].keys
    token_bytes = keys.shape[1] * keys.shape[3] * keys.element_size()
    assert keys.untyped_storage().nbytes() <= room_for(3 * 16) * token_bytes


def test_the_default_context_is_what_the_model_knows():
    assert tokens_to_plan_for(Qwen3MoeConfig(max_position_embeddings=512), None) == 512
    assert tokens_to_plan_for(Qwen3MoeConfig(max_position_embeddings=40960), None) == 4096
    assert tokens_to_plan_for(Qwen3MoeConfig(max_position_embeddings=512), 700) == 700
    summary = inspect_checkpoint(pocket_path())
    assert summary.max_tokens == 512
    # inspect agrees with load
    smallest = summary.smallest_budget_bytes
    load(pocket_path(), device="cpu", host_memory=smallest).moe.close()
    with pytest.raises(CapacityError, match="activations of 512 tokens"):
        load(pocket_path(), device="cpu", host_memory=smallest - 1)


def test_a_larger_context_uses_memory_that_experts_leave(tmp_path):
    """All memory that experts leave, or a sixteenth of theirs; inspect agrees."""
    (family,) = (one for one in FAMILIES if str(one) == "OlmoeForCausalLM")
    sizes = {**family.config, "max_position_embeddings": 20_000, "num_experts": 64}
    folder = save(tiny_model(dataclasses.replace(family, config=sizes)), tmp_path, sharded=False)
    summary = inspect_checkpoint(folder)
    given = inspect_checkpoint(folder, max_tokens=4096)
    smallest, experts = summary.smallest_budget_bytes, 3 * 64 * summary.slot_bytes
    assert summary.max_tokens == 4096
    contexts = []
    step = summary.context_step_bytes
    for more in (0, experts // 2, experts, experts + 2 * step, experts + 60 * step):
        budget = smallest + more
        context = summary.context_for(budget)
        with load(folder, device="cpu", host_memory=budget).moe as moe:
            assert moe.facts.context == context
            assert moe.stats().expert_slots == summary.slots_for(budget)
        fewer = given.slots_for(budget) - summary.slots_for(budget)
        assert fewer <= 1 + given.slots_for(budget) / 16
        contexts.append(context.max_tokens)
    assert contexts[0] == 4096
    assert contexts[3] == 4096 + 2 * 1024
    assert contexts[4] == 20_000
    with load(folder, device="cpu", host_memory=smallest + experts, max_tokens=99).moe as moe:
        assert moe.facts.context.max_tokens == 99


def test_inspect_names_the_tokens_that_a_small_budget_suffices_for():
    summary = inspect_checkpoint(pocket_path())
    budget = summary.smallest_budget_bytes - summary.max_tokens // 2 * summary.token_bytes
    enough = summary.tokens_for(budget)
    assert 0 < enough < summary.max_tokens
    load(pocket_path(), device="cpu", host_memory=budget, max_tokens=enough).moe.close()
    # a sixteenth of a cache is room to grow, which is counted in whole steps of 16 tokens
    with pytest.raises(CapacityError):
        load(pocket_path(), device="cpu", host_memory=budget, max_tokens=enough + 16)
    assert summary.tokens_for(1000) == 0
    assert summary.tokens_for(2**40) == summary.max_tokens


def batched(model: Any, settings: Any = None, *, length: int = 6, new: int = 4) -> Any:
    return model.generate_batch(
        [list(range(7, 7 + length)), list(range(40, 40 + length))],
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1),
        continuous_batching_config=settings,
        progress_bar=False,
    )


@pytest.mark.skipif(PAGE != "page_size", reason="the paged cache was made otherwise then")
def test_continuous_batching_keeps_its_cache_and_steps_within_the_limit(pocket):
    tokens = [found.generated_tokens for found in batched(pocket).values()]
    first = prompt(1, 6)
    alone = pocket.generate(first, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert alone[0, 6:].tolist() in tokens
    settings = ContinuousBatchingConfig(**{PAGE: 4})
    manager = pocket.init_continuous_batching(
        GenerationConfig(eos_token_id=-1), continuous_batching_config=settings
    )
    try:
        cache = PagedAttentionCache(
            pocket.config,
            manager.continuous_batching_config,
            torch.device("cpu"),
            manager.distributed_helper,
            pocket.dtype,
        )
        assert cache.num_blocks * 4 <= LIMIT
        assert cache.max_batch_tokens <= LIMIT // 2
        token_bytes = 2 * 2 * 64 * 2 * pocket.config.num_hidden_layers  # keys and values of 2 heads
        assert cache.cache_tensor.nbytes <= room_for(LIMIT) * token_bytes
    finally:
        manager.destroy()
    assert settings.num_blocks is None  # the caller's own


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({PAGE: 4, "num_blocks": LIMIT // 4 + 1}, f"num_blocks of at most {LIMIT // 4} of"),
        ({PAGE: 256}, "num_blocks of at most 0 of 256 tokens"),
        ({PAGE: 4, "max_batch_tokens": LIMIT}, f"max_batch_tokens of at most {LIMIT // 2}"),
        ({PAGE: 4, "max_requests_per_batch": 64}, "max_requests_per_batch of at most 4,"),
        ({PAGE: 4, "cpu_offload_space": 0.1}, "cpu_offload_space of at most 0,"),
    ],
)
def test_continuous_batching_beyond_the_limit_does_not_begin(pocket, settings, named):
    before = requests(pocket)
    with pytest.raises(CapacityError, match=f"{named}.* set aside for {LIMIT} tokens"):
        batched(pocket, ContinuousBatchingConfig(**settings))
    with pytest.raises(CapacityError, match=f"{LIMIT + 1} tokens need room"):
        batched(pocket, length=LIMIT - 3)
    assert requests(pocket) == before
