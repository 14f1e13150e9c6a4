"""Which tiers are exchanged, and what a replay says they would have found."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.lab.record_tiers import (
    TIER_CHANGE_MARGIN,
    TIER_CHANGE_STEPS,
    UseCounts,
    replay_tiers,
    spread,
)
from moe_runtime.lab.report.findings import training_reuse
from moe_runtime.lab.traces import Trace
from moe_runtime.types import ExpertKey, ModelSignature

KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]
USES = st.lists(
    st.sets(st.sampled_from(KEYS)), min_size=TIER_CHANGE_STEPS, max_size=TIER_CHANGE_STEPS
)


def test_tiers_are_spread_at_equal_distances():
    assert spread(KEYS, 0) == []
    assert spread(KEYS, 2) == [KEYS[3], KEYS[7]]
    assert spread(KEYS, len(KEYS)) == KEYS


@settings(max_examples=30)
@given(steps=USES, count=st.integers(0, len(KEYS)))
def test_exchanges_bring_in_what_was_used_more(steps, count):
    """By brute force: while any pair differs by the margin, the widest one is exchanged."""
    tiers = set(spread(KEYS, count))
    counts = UseCounts(KEYS)
    for used in steps[:-1]:
        assert counts.after_step(used, tiers.__contains__) == []
    found = counts.after_step(steps[-1], tiers.__contains__)
    use = Counter(key for used in steps for key in used)
    for arriving, leaving in found:
        assert leaving in tiers
        assert arriving not in tiers
        gain = max(use[a] for a in KEYS if a not in tiers) - min(use[key] for key in tiers)
        assert use[arriving] - use[leaving] == gain >= TIER_CHANGE_MARGIN * TIER_CHANGE_STEPS
        tiers.remove(leaving)
        tiers.add(arriving)
    pairs = [use[a] - use[b] for a in KEYS for b in KEYS if a not in tiers and b in tiers]
    assert max(pairs, default=0) < TIER_CHANGE_MARGIN * TIER_CHANGE_STEPS


def test_a_replay_follows_the_use():
    """Two of eight experts are ever asked for, none of them in memory first."""
    steps = [[KEYS[0], KEYS[1]]] * (TIER_CHANGE_STEPS + 10)
    found = replay_tiers(steps, KEYS, 2)
    assert (found.uses, found.spread, found.by_use, found.best) == (120, 0, 20, 120)
    assert found.exchanges == 2


def test_reuse_between_micro_batches_and_steps():
    """One layer: a step of {0, 1} and {1, 2}, then one of {2} and {2, 3}."""
    asked = [(0, 1), (1, 2), (2, 2), (2, 3)]
    trace = Trace(
        version=2,
        signature=ModelSignature(
            model_type="x", num_layers=1, num_experts=8, top_k=2, vocab_size=9
        ),
        step_phase=np.full(4, 2, np.uint8),
        step_start=np.arange(5),
        token_request=np.arange(4, dtype=np.int32),
        token_id=np.zeros(4, np.int32),
        token_position=np.zeros(4, np.int32),
        expert_ids=np.array(asked, np.uint8)[:, None],
        gate_weights=np.ones((4, 1, 2), np.float16),
        step_update=np.array([1, 1, 2, 2], np.int32),
    )
    found = training_reuse(trace, shares=[0.25])
    assert found is not None
    assert (found.num_steps, found.num_passes) == (2, 4)
    assert (found.asked, found.fetched) == (7, 5)
    assert (found.pass_share, found.step_share) == (7 / 32, 5 / 16)
    assert found.returning == 1 / 2
    assert found.use.tolist() == [[0.5, 0.5, 1, 0.5, 0, 0, 0, 0]]
    tiers = found.tiers[0.25]
    assert (tiers.uses, tiers.spread, tiers.best) == (5, 1, 3)
