"""The token scheduler: cheaper batches of the same sizes, and generation that does not change."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from moe_runtime.models.pocket import pocket_path
from moe_runtime.planning.regroup import regroup, regroup_cache


def random_paths(seed: int, sequences: int, *, groups: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    paths = np.zeros((sequences, 4, 12), dtype=bool)
    for row in range(sequences):
        for layer in range(4):
            experts = rng.permutation(6)[:2] + 6 * (row % 2) if groups else rng.permutation(12)[:2]
            paths[row, layer, experts] = True
    return paths


def brute_force(paths: np.ndarray) -> int:
    n = len(paths)
    best = paths.size
    for chosen in itertools.combinations(range(n), (n + 1) // 2):
        side = np.isin(np.arange(n), chosen)
        touched = paths[side].any(axis=0).sum() + paths[~side].any(axis=0).sum()
        best = min(best, int(touched))
    return best


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 9))
def test_sizes_hold_nothing_is_lost_and_the_cost_never_rises(seed: int, sequences: int) -> None:
    paths = random_paths(seed, sequences)
    plan = regroup(paths)
    assert len(plan.first) == (sequences + 1) // 2
    assert sorted(plan.order.tolist()) == list(range(sequences))
    np.testing.assert_array_equal(plan.order[plan.inverse], np.arange(sequences))
    touched = paths[plan.first].any(axis=0).sum() + paths[plan.second].any(axis=0).sum()
    assert plan.cost == touched
    assert brute_force(paths) <= plan.cost <= plan.cost_before


def test_on_random_paths_it_is_close_to_the_optimum() -> None:
    plans = [
        (regroup(random_paths(seed, 8)).cost, brute_force(random_paths(seed, 8)))
        for seed in range(25)
    ]
    found, best = np.array(plans).sum(axis=0)
    assert found <= 1.02 * best


def test_two_planted_routes_are_separated() -> None:
    paths = random_paths(3, 16, groups=2)
    plan = regroup(paths)
    assert {int(row) % 2 for row in plan.first} == {int(plan.first[0]) % 2}
    whole = [paths[start::2].any(axis=0).sum() for start in (0, 1)]
    assert plan.cost == sum(whole)
    assert plan.cost < plan.cost_before


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="two or more"):
        regroup(np.zeros((1, 2, 3), dtype=bool))


def test_generation_is_the_same_after_regrouping_the_cache() -> None:
    """Greedy decoding, reordered between any two steps, writes what it writes in order."""
    model = AutoModelForCausalLM.from_pretrained(
        pocket_path(), dtype="float64", experts_implementation="eager"
    ).eval()
    rng = np.random.default_rng(1)
    prompts = torch.from_numpy(rng.integers(2, 4096, size=(6, 9)))
    expected = decode(model, prompts, steps=8, seed=None)
    assert torch.equal(decode(model, prompts, steps=8, seed=4), expected)


@torch.no_grad()
def decode(model, prompts: torch.Tensor, *, steps: int, seed: int | None) -> torch.Tensor:
    """Decodes two batches of three; with a seed, sequences change batches before every step."""
    out = model(input_ids=prompts, use_cache=True)
    cache = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
    tokens = out.logits[:, -1].argmax(-1)
    written = [tokens]
    for step in range(steps):
        order = inverse = np.arange(len(prompts))
        if seed is not None:
            plan = regroup(random_paths(seed + step, len(prompts)))
            order, inverse = plan.order, plan.inverse
            cache = regroup_cache(cache, plan)
        halves = []
        for rows in (slice(0, 3), slice(3, 6)):
            past = DynamicCache([(keys[rows], values[rows]) for keys, values in cache])
            out = model(input_ids=tokens[order][rows, None], past_key_values=past, use_cache=True)
            layers = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
            halves.append((out.logits[:, -1].argmax(-1), layers))
        tokens = torch.cat([half[0] for half in halves])[inverse]
        pairs = zip(halves[0][1], halves[1][1], strict=True)
        joined = [tuple(torch.cat(part) for part in zip(*pair, strict=True)) for pair in pairs]
        cache = [(keys[inverse], values[inverse]) for keys, values in joined]
        written.append(tokens)
    return torch.stack(written)
