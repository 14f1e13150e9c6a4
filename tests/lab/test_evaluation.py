"""The measurement itself, against counts by hand, and the split of sequences."""

import numpy as np
import pytest
from synthetic_routes import make_routes

from moe_runtime.lab.replay.evaluation import evaluate
from moe_runtime.lab.traces.routes import join_routes, split_numbers, unrepeated
from moe_runtime.policies.prediction import Routes, Shape, make_estimator

SHAPE = Shape(num_layers=4, num_experts=9, top_k=2)


def brute_force(routes: Routes, share_LE: np.ndarray, width: int) -> float:
    """Recall of popularity, one token, layer and expert at a time; mean over layers."""
    per_layer = []
    for layer in range(routes.shape.num_layers):
        chosen = set(sorted(range(9), key=lambda e: (-share_LE[layer, e], e))[:width])
        found = [int(e) in chosen for ids in routes.expert_ids[:, layer] for e in ids]
        per_layer.append(sum(found) / len(found))
    return sum(per_layer) / len(per_layer)


def test_recall_is_what_counting_by_hand_gives():
    routes = make_routes(SHAPE)
    train, test = map(routes.select, split_numbers(routes.num_sequences, test_share=0.5))
    popularity = make_estimator("popularity", SHAPE)
    popularity.fit(train)
    control, measured = evaluate([popularity], test, distances=(1, 3))
    share = popularity.state()["share"]
    assert measured.at(1).mean_at_k == pytest.approx(brute_force(test, share, 2))
    assert measured.at(1).mean_at_2k == pytest.approx(brute_force(test, share, 4))
    assert measured.num_tokens == test.num_tokens
    assert measured.call_s > 0
    assert control.name == "control"


def test_control_finds_everything_that_was_recorded():
    routes = make_routes(SHAPE)
    control = evaluate([], routes, distances=(1, 2))[0]
    for recall in control.recalls:
        assert recall.at_k.tolist() == [1.0] * 4
        assert recall.at_2k.tolist() == [1.0] * 4
        np.testing.assert_allclose(recall.mass_at_2k, 1.0, rtol=1e-6)
    assert control.calibration_error == 0.0
    routes.expert_ids[:, 2] = SHAPE.num_experts
    routes.gate_weights[:, 2] = 0
    control = evaluate([], routes)[0]
    assert np.isnan(control.at(1).at_k[2])
    assert control.at(1).mean_at_k == 1.0


def test_popularity_is_calibrated_on_its_own_training_set():
    routes = make_routes(SHAPE, num_sequences=30)
    popularity = make_estimator("popularity", SHAPE)
    popularity.fit(routes)
    measured = evaluate([popularity], routes)[1]
    assert measured.calibration_error < 0.002
    for chance, share, _ in measured.calibration:
        assert chance == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("with_token_ids", [True, False])
def test_repeated_sequences_are_left_out(with_token_ids):
    routes = make_routes(SHAPE, num_sequences=4, vocabulary=1000)
    if not with_token_ids:
        routes.token_ids[:] = -1
    doubled = join_routes([routes, routes.select([2, 0])])
    assert unrepeated(doubled) == [0, 1, 2, 3]


def test_split_keeps_sequences_whole_and_apart():
    train, test = split_numbers(10, test_share=0.3, seed=5)
    assert (len(train), len(test)) == (7, 3)
    assert sorted(train + test) == list(range(10))
    with pytest.raises(ValueError, match="leaves nothing"):
        split_numbers(10, test_share=0.01)
