"""What holds for every predictor: no look into the future, probabilities, the same guesses again.

Whatever is registered is tested; a predictor that peeks at the layers it predicts fails here.
"""

from dataclasses import replace

import numpy as np
import pytest
from synthetic_routes import make_routes

from moe_runtime.policies.prediction import (
    PREDICTORS,
    Contexts,
    Estimator,
    LayerRouted,
    Routes,
    Shape,
    StepBegins,
    TrackedPredictor,
    contexts_of,
    make_estimator,
    trained,
)
from moe_runtime.policies.prediction.tracked import LEAST_CHANCE

SHAPE = Shape(num_layers=5, num_experts=11, top_k=3)
ROUTES = make_routes(SHAPE)
FITTED: dict[str, Estimator] = {}
FROM_ROUTING = sorted(name for name, kind in PREDICTORS.items() if not kind.needs_hidden)


def fitted(name: str) -> Estimator:
    if name not in FITTED:
        FITTED[name] = make_estimator(name, SHAPE)
        FITTED[name].fit(ROUTES.select(range(8)))
    return FITTED[name]


def held_out() -> Contexts:
    return next(contexts_of(ROUTES.select(range(8, 12))))


@pytest.mark.parametrize("name", FROM_ROUTING)
def test_estimates_are_probabilities_of_about_k_experts(name):
    contexts = held_out()
    for layer in range(SHAPE.num_layers):
        chance = fitted(name).estimate(contexts, layer - 1, layer)
        assert chance.shape == (len(contexts), SHAPE.num_experts)
        assert chance.min() >= 0.0
        assert chance.max() <= 1.0
        assert chance.sum(axis=1).mean() == pytest.approx(SHAPE.top_k, rel=0.25)


@pytest.mark.parametrize("name", FROM_ROUTING)
def test_the_future_does_not_matter(name):
    contexts = held_out()
    for now, layer in ((-1, 3), (1, 4), (3, 4)):
        path, weights = contexts.path.copy(), contexts.path_weights.copy()
        path[:, now + 1 :] = SHAPE.num_experts
        weights[:, now + 1 :] = 0.0
        blind = replace(contexts, path=path, path_weights=weights)
        expected = fitted(name).estimate(contexts, now, layer)
        np.testing.assert_array_equal(fitted(name).estimate(blind, now, layer), expected)


@pytest.mark.parametrize("name", FROM_ROUTING)
def test_rows_do_not_influence_each_other(name):
    contexts = held_out()
    together = fitted(name).estimate(contexts, 1, 2)
    for row in (0, 7, len(contexts) - 1):
        alone = fitted(name).estimate(contexts.rows(slice(row, row + 1)), 1, 2)
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(trained.library() is None, reason="combined.c was not built")
@pytest.mark.parametrize("rows", [slice(0, 1), slice(4, 5), slice(0, 8)])
def test_the_compiled_combination_guesses_what_its_numpy_form_does(monkeypatch, rows):
    """Also of tokens that no table knows, unused places of paths, and the next tokens."""
    estimator, known = fitted("combined"), held_out()
    known.path[3, 1, 2] = known.previous[5] = known.path[4, 2] = SHAPE.num_experts
    known.token_ids[[0, 7]] = known.previous_token_ids[[2, 7]] = 10**6
    known = known.rows(rows)
    known = replace(known, path=known.path.copy(), path_weights=known.path_weights.copy())
    blind = replace(known, token_ids=np.full(len(known), -1), memo={})
    asked = [(now, at) for at in range(SHAPE.num_layers) for now in range(-1, at)]
    asked = [
        (contexts, now, range(at, SHAPE.num_layers))
        for contexts in (known, blind)
        for now, at in asked
    ]
    compiled = [estimator.guess(*one, 7) for one in asked]
    monkeypatch.setattr(trained, "library", lambda: None)
    for one, (experts, chances) in zip(asked, compiled, strict=True):
        plain = dict(zip(*estimator.guess(*one, SHAPE.num_experts), strict=True))
        assert len({*experts}) == len(experts) == 7 * len(one[2])
        # some thirty float32 of a logit in another order; its slope is at most 1/4 for each token
        near = pytest.approx([plain[e] for e in experts], abs=len(known) * 2e-6)
        assert chances == near
        for place, layer in enumerate(one[2]):
            own = chances[7 * place : 7 * place + 7]
            assert own == sorted(own, reverse=True)
            others = [plain[layer * SHAPE.num_experts + e] for e in range(SHAPE.num_experts)]
            assert min(own) >= sorted(others)[-7] - len(known) * 2e-6


@pytest.mark.parametrize("name", FROM_ROUTING)
def test_state_restores_the_same_estimator(name):
    state = fitted(name).state()
    assert all(array.dtype.kind in "fiu" for array in state.values())
    again = PREDICTORS[name].from_state(SHAPE, state)
    contexts = held_out()
    for now, layer in ((-1, 0), (0, 3)):
        expected = fitted(name).estimate(contexts, now, layer)
        np.testing.assert_array_equal(again.estimate(contexts, now, layer), expected)


@pytest.mark.parametrize("name", FROM_ROUTING)
def test_damaged_state_is_refused(name):
    state = dict(fitted(name).state())
    for key in state:
        with pytest.raises(ValueError, match=key):
            PREDICTORS[name].from_state(SHAPE, {k: v for k, v in state.items() if k != key})
        wrong = [state[key][None]]
        if key in ("share", "reuse"):  # probabilities
            wrong += [state[key] - 0.99, state[key] + 1, state[key] * np.nan]
        for damaged in wrong:
            with pytest.raises(ValueError, match=key):
                PREDICTORS[name].from_state(SHAPE, {**state, key: damaged})


def guesses_along(predictor: TrackedPredictor, routes: Routes) -> list[list[tuple]]:
    """Feeds sequences token by token, as a model would, and collects all guesses."""
    made = []
    for sequence in range(routes.num_sequences):
        rows = routes.tokens_of(sequence)
        for token in range(rows.start, rows.stop):
            one = slice(token, token + 1)
            predictor.observe(
                StepBegins(sequences=np.array([sequence]), token_ids=routes.token_ids[one])
            )
            made.append(predictor.predict(-1, 2))
            for layer in range(routes.shape.num_layers):
                predictor.observe(
                    LayerRouted(
                        layer=layer,
                        expert_ids=routes.expert_ids[one, layer],
                        gate_weights=routes.gate_weights[one, layer],
                    )
                )
                made.append(predictor.predict(layer, 2))
        predictor.finish(sequence)
    return made


@pytest.mark.parametrize("name", FROM_ROUTING)
def test_live_guesses_are_those_of_the_recorded_contexts(name):
    routes = ROUTES.select([9])
    fresh = PREDICTORS[name].from_state(SHAPE, fitted(name).state())
    made = guesses_along(TrackedPredictor(fresh), routes)
    contexts = next(contexts_of(routes))
    steps = SHAPE.num_layers + 1
    for token in (0, 1, 20, 39):
        row = contexts.rows(slice(token, token + 1))
        for now in range(-1, SHAPE.num_layers - 1):
            guesses = [g for g in made[token * steps + now + 1] if g[0].layer == now + 1]
            expected = fitted(name).estimate(row, now, now + 1)[0]
            likely = np.sort(expected[expected >= LEAST_CHANCE])[-2 * SHAPE.top_k :]
            assert len(guesses) == len(likely)
            for key, probability in guesses:
                assert probability == pytest.approx(float(expected[key.expert]), rel=1e-4)
            chances = [probability for _, probability in guesses]
            assert chances == sorted(chances, reverse=True)
            assert chances[-1:] >= (likely[:1] - 1e-6).tolist()


def test_horizon_wraps_into_the_next_token():
    predictor = TrackedPredictor(fitted("popularity"))
    predictor.observe(StepBegins(sequences=np.array([0]), token_ids=np.array([1])))
    layers = [key.layer for key, _ in predictor.predict(3, 3)]
    assert sorted(set(layers), key=layers.index) == [4, 0, 1]


def test_prompts_are_remembered_and_not_guessed():
    routes = ROUTES.select([9])
    predictor = TrackedPredictor(fitted("running-counts"))
    predictor.observe(StepBegins(sequences=np.zeros(7, int), token_ids=routes.token_ids[:7]))
    for layer in range(SHAPE.num_layers):
        predictor.observe(
            LayerRouted(
                layer=layer,
                expert_ids=routes.expert_ids[:7, layer],
                gate_weights=routes.gate_weights[:7, layer],
            )
        )
        assert predictor.predict(layer, 1) == []
    predictor.observe(StepBegins(sequences=np.array([0]), token_ids=routes.token_ids[7:8]))
    row = next(contexts_of(routes)).rows(slice(7, 8))
    expected = fitted("running-counts").estimate(row, -1, 0)[0]
    for key, probability in predictor.predict(-1, 1):
        assert probability == pytest.approx(float(expected[key.expert]))


def test_batches_guess_the_union_of_their_sequences():
    routes = ROUTES.select([9, 10])
    predictor = TrackedPredictor(fitted("running-counts"))
    tokens = np.array([0, 40])
    order = np.array([5, 2])  # request numbers need not ascend
    predictor.observe(StepBegins(sequences=order, token_ids=routes.token_ids[tokens]))
    for layer in range(SHAPE.num_layers):
        predictor.observe(
            LayerRouted(
                layer=layer,
                expert_ids=routes.expert_ids[tokens, layer],
                gate_weights=routes.gate_weights[tokens, layer],
            )
        )
    predictor.observe(StepBegins(sequences=order, token_ids=routes.token_ids[tokens + 1]))
    rows = next(contexts_of(routes)).rows(tokens + 1)
    each = fitted("running-counts").estimate(rows, -1, 0)
    expected = 1.0 - (1.0 - each[0]) * (1.0 - each[1])
    guesses = predictor.predict(-1, 1)
    assert len(guesses) == SHAPE.num_experts
    for key, probability in guesses:
        assert probability == pytest.approx(float(expected[key.expert]), rel=1e-4)


def test_a_layer_that_does_not_fit_its_step_is_refused():
    predictor = TrackedPredictor(fitted("popularity"))
    predictor.observe(StepBegins(sequences=np.array([0]), token_ids=np.array([1])))
    two = np.zeros((2, SHAPE.top_k))
    with pytest.raises(ValueError, match="does not fit a step of 1 tokens"):
        predictor.observe(LayerRouted(layer=0, expert_ids=two.astype(int), gate_weights=two))
