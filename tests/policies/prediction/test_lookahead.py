"""Looking ahead from hidden states: order from the scorer, probabilities from what came true."""

import numpy as np
import pytest

from moe_runtime.policies.prediction import (
    LayerRouted,
    LookaheadPredictor,
    NextGate,
    Shape,
    StepBegins,
)
from moe_runtime.policies.prediction.hidden import RankRecord

SHAPE = Shape(num_layers=4, num_experts=8, top_k=2)


def scored(wrong: bool = False) -> LookaheadPredictor:
    """The hidden state of a row holds, for each layer, the logits of its experts."""
    estimator = NextGate(SHAPE)

    def score(hidden: np.ndarray, distance: int, layer: int) -> np.ndarray:
        return -hidden[:, layer] if wrong else hidden[:, layer]

    estimator.scorer = score
    return LookaheadPredictor(estimator)


def run(predictor: LookaheadPredictor, num_rows: int, steps: int, seed: int = 0, horizon: int = 2):
    """Steps whose gates choose what the hidden states say; returns all guesses with the truth."""
    rng = np.random.default_rng(seed)
    outcomes = []
    for _ in range(steps):
        logits = rng.normal(size=(num_rows, SHAPE.num_layers, SHAPE.num_experts))
        ids = np.argsort(-logits, axis=2)[:, :, : SHAPE.top_k]
        rows = np.arange(num_rows)
        predictor.observe(StepBegins(sequences=rows, token_ids=np.full(num_rows, -1)))
        assert predictor.predict(-1, horizon) == []
        for layer in range(SHAPE.num_layers):
            gates = np.full((num_rows, SHAPE.top_k), 0.5, np.float32)
            predictor.observe(
                LayerRouted(
                    layer=layer, expert_ids=ids[:, layer], gate_weights=gates, hidden=logits
                )
            )
            for key, probability in predictor.predict(layer, horizon):
                assert layer < key.layer <= layer + horizon
                outcomes.append((probability, key.expert in ids[:, key.layer]))
    return outcomes


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_scorer_that_knows_is_believed(num_rows):
    last = run(scored(), num_rows, 30)[-40 * num_rows :]
    assert {truth for p, truth in last if p > 0.5} == {True}
    assert sum(p > 0.5 for p, _ in last) > 5


def test_a_scorer_that_is_wrong_is_found_out_within_a_few_tokens():
    predictor = scored(wrong=True)
    run(predictor, 1, 8)
    assert max(p for p, _ in run(predictor, 1, 1)) < 0.5


@pytest.mark.parametrize("num_rows", [1, 2])
def test_probabilities_are_frequencies(num_rows):
    predictor = scored()
    noisy = predictor.estimator.scorer
    assert noisy is not None
    rng = np.random.default_rng(1)
    predictor.estimator.scorer = lambda hidden, distance, layer: (
        noisy(hidden, distance, layer) + rng.normal(size=(num_rows, SHAPE.num_experts))
    )
    found = run(predictor, num_rows, 300)[2000:]
    chances, truths = np.array(found, dtype=np.float64).T
    # 2000 and more outcomes: the mean deviates by less than four standard errors
    assert abs(chances.mean() - truths.mean()) < 4 * 0.5 / np.sqrt(len(found)) + 0.01
    likely = chances > 0.5
    assert truths[likely].mean() > 0.5


def test_prompts_and_missing_hidden_states_are_met_with_silence():
    predictor = scored()
    hidden = np.zeros((2, SHAPE.num_layers, SHAPE.num_experts))
    routed = LayerRouted(
        layer=0, expert_ids=np.array([[0, 1], [0, 1]]), gate_weights=np.ones((2, 2)), hidden=hidden
    )
    predictor.observe(StepBegins(sequences=np.array([0, 0]), token_ids=np.array([1, 2])))
    predictor.observe(routed)
    assert predictor.predict(0, 2) == []
    predictor.observe(StepBegins(sequences=np.array([0, 1]), token_ids=np.array([1, 2])))
    assert predictor.predict(0, 2) == []
    predictor.observe(routed)
    assert len(predictor.predict(0, 1)) >= 4
    assert predictor.predict(3, 2) == []


def test_layers_that_said_little_borrow_from_the_others():
    record = RankRecord(num_layers=2, num_ranks=2, top_k=1)
    assert record.probabilities(0) == [1.0, 0.0]
    for _ in range(100):
        record.judge(0, [False, True])
    first, second = record.probabilities(1)
    assert first < 0.3
    assert second > 0.7
