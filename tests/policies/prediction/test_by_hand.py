"""Each table and each match against the same thing counted by plain loops."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from synthetic_routes import make_routes

from moe_runtime.policies.prediction import (
    Contexts,
    EamCollection,
    Estimator,
    Routes,
    Shape,
    contexts_of,
    make_estimator,
)
from moe_runtime.policies.prediction.base import COLLECTED_MATRICES
from moe_runtime.policies.prediction.estimator import popularity_of, visits
from moe_runtime.policies.prediction.matched import NEIGHBOURS, PRIOR_MAPS
from moe_runtime.policies.prediction.tables import PRIOR_TOKENS, PRIOR_VISITS
from moe_runtime.policies.prediction.trained import PRIOR_OCCURRENCES

SHAPE = Shape(num_layers=3, num_experts=6, top_k=2)
ROUTES = make_routes(SHAPE, num_sequences=5, length=12, vocabulary=6)
SHARE_LE = popularity_of(ROUTES)


def test_a_share_of_tokens_counts_a_token_once_wherever_its_expert_stands():
    """Choices of no expert come first, in between and last, and one expert is chosen twice."""
    nobody = SHAPE.num_experts
    ids = np.array([[nobody, 1], [1, nobody], [1, 1], [2, 1], [nobody, nobody]])
    tokens = np.arange(len(ids))
    routes = Routes(
        shape=SHAPE,
        expert_ids=np.repeat(ids[:, None], SHAPE.num_layers, axis=1),
        gate_weights=np.ones((len(ids), SHAPE.num_layers, 2), np.float32),
        token_ids=tokens,
        offsets=np.array([0, len(ids)]),
    )
    expected = np.array([0, 4, 1, 0, 0, 0]) / 4
    assert np.allclose(popularity_of(routes, prior=0.0), expected)


def fitted(name: str, routes: Routes = ROUTES) -> Estimator:
    estimator = make_estimator(name, routes.shape)
    estimator.fit(routes)
    return estimator


def contexts(routes: Routes = ROUTES) -> Contexts:
    return next(contexts_of(routes))


def tokens() -> Iterator[tuple[int, int, int]]:
    """The row of each token, and where its sequence begins and ends."""
    for start, stop in itertools.pairwise(ROUTES.offsets.tolist()):
        for row in range(start, stop):
            yield row, start, stop


def pairs(layer: int, e: int, distance: int, *, in_time: bool) -> tuple[np.ndarray, float]:
    """How often each expert followed ``e``, which stood so many layers or one token before."""
    after, seen = np.zeros(SHAPE.num_experts), 0.0
    for row, _, stop in tokens():
        source = ROUTES.expert_ids[row, layer - distance]
        if in_time:
            if row + 1 == stop:
                continue
            target = ROUTES.expert_ids[row + 1, layer]
        else:
            target = ROUTES.expert_ids[row, layer]
        if e in source:
            after[target] += 1
            seen += 1
    return after, seen


@pytest.mark.parametrize(("name", "distance"), [("token-markov", 0), ("layer-affinity", 1)])
def test_transitions_are_counted_pairs(name, distance):
    some, layer = contexts(), 2
    chance = fitted(name).estimate(some, layer - 1, layer)
    for row, start, _ in tokens():
        if name == "token-markov":
            known = ROUTES.expert_ids[row - 1, layer] if row > start else None
        else:
            known = ROUTES.expert_ids[row, layer - 1]
        expected = SHARE_LE[layer]
        if known is not None:
            counted = [pairs(layer, e, distance, in_time=name == "token-markov") for e in known]
            expected = np.mean(
                [
                    (after + PRIOR_VISITS * SHARE_LE[layer]) / (seen + PRIOR_VISITS)
                    for after, seen in counted
                ],
                axis=0,
            )
        np.testing.assert_allclose(chance[row], expected, rtol=1e-5)


def test_running_counts_and_token_identity_are_shares():
    some, layer = contexts(), 1
    counts = fitted("running-counts").estimate(some, -1, layer)
    identity = fitted("token-identity").estimate(some, -1, layer)
    for row, start, _ in tokens():
        before = ROUTES.expert_ids[start:row, layer].ravel()
        own = np.bincount(before, minlength=SHAPE.num_experts)
        expected = (own + PRIOR_TOKENS * SHARE_LE[layer]) / (row - start + PRIOR_TOKENS)
        np.testing.assert_allclose(counts[row], expected, rtol=1e-5)
        alike = ROUTES.token_ids == ROUTES.token_ids[row]
        went = np.bincount(ROUTES.expert_ids[alike, layer].ravel(), minlength=SHAPE.num_experts)
        total = alike.sum() + PRIOR_OCCURRENCES
        expected = (went + PRIOR_OCCURRENCES * SHARE_LE[layer]) / total
        np.testing.assert_allclose(identity[row], expected, rtol=1e-5)


def test_naive_bayes_multiplies_likelihood_ratios():
    """The order of the experts is that of the posterior odds, computed literally."""
    estimator, some, layer = fitted("naive-bayes"), contexts(), 1
    chance = estimator.estimate(some, 0, layer)
    ids, num_tokens = ROUTES.expert_ids, ROUTES.num_tokens
    for row in range(0, num_tokens, 7):
        odds = []
        for e in range(SHAPE.num_experts):
            visited = (ids[:, layer] == e).any(axis=1)
            p = np.clip(SHARE_LE[layer, e], 1e-4, 1 - 1e-4)
            ratio = p / (1 - p)
            for source in ids[row, 0]:
                said = (ids[:, 0] == source).any(axis=1)
                prior = PRIOR_VISITS * said.sum() / num_tokens
                given = ((said & visited).sum() + prior) / (visited.sum() + PRIOR_VISITS)
                without = ((said & ~visited).sum() + prior) / ((~visited).sum() + PRIOR_VISITS)
                ratio *= max(given, 1e-6) / max(without, 1e-6)
            odds.append(ratio)
        odds = np.array(odds)
        posterior = odds / (1 + odds)
        expected = np.minimum(posterior * SHAPE.top_k / posterior.sum(), 1.0)
        np.testing.assert_allclose(chance[row], expected, rtol=1e-3, atol=1e-5)


def test_expert_maps_are_matched_by_cosine_along_the_known_layers():
    estimator, some = fitted("expert-map"), contexts()
    now, layer = 1, 2
    chance = estimator.estimate(some, now, layer)
    maps = np.zeros((ROUTES.num_tokens, SHAPE.num_layers, SHAPE.num_experts))
    np.put_along_axis(maps, ROUTES.expert_ids, ROUTES.gate_weights, axis=2)
    known = maps[:, : now + 1].reshape(ROUTES.num_tokens, -1)
    cosine = known @ known.T / np.outer(*2 * (np.linalg.norm(known, axis=1),))
    visited = visits(ROUTES.expert_ids[:, layer], SHAPE.num_experts)
    for row in range(ROUTES.num_tokens):
        ranked = np.sort(cosine[row])[::-1]
        if ranked[NEIGHBOURS - 1] - ranked[NEIGHBOURS] < 1e-5:
            continue  # which of the equals are taken is open
        near = np.flatnonzero(cosine[row] >= ranked[NEIGHBOURS - 1] - 1e-6)
        worth = cosine[row, near, None]
        expected = (visited[near] * worth).sum(axis=0) + PRIOR_MAPS * SHARE_LE[layer]
        np.testing.assert_allclose(chance[row], expected / (worth.sum() + PRIOR_MAPS), rtol=1e-4)


class TestActivationMatrices:
    def test_the_nearest_by_cosine_says_what_comes(self):
        collection, some = EamCollection(SHAPE), contexts()
        collection.fit(ROUTES.select([0, 1, 2]))
        stored = [ROUTES.expert_ids[ROUTES.tokens_of(s)] for s in range(3)]
        counted = np.array([visits(ids, SHAPE.num_experts).sum(axis=0) for ids in stored])
        np.testing.assert_array_equal(collection.collection.matrices, counted)
        assert (collection.collection.matrices.sum(axis=2) == 12 * SHAPE.top_k).all()
        now, layer = 0, 2
        chance = collection.estimate(some, now, layer)
        for row, start, _ in tokens():
            running = visits(ROUTES.expert_ids[start:row], SHAPE.num_experts).sum(axis=0)
            running[: now + 1] += visits(ROUTES.expert_ids[row, : now + 1], SHAPE.num_experts)
            dots = (counted * running).sum(axis=(1, 2))
            cosines = dots / np.linalg.norm(counted.reshape(3, -1), axis=1)
            nearest = counted[int(cosines.argmax()), layer]
            expected = np.minimum(SHAPE.top_k * nearest / nearest.sum(), 1.0)
            np.testing.assert_allclose(chance[row], expected, atol=1e-5)

    def test_a_full_collection_replaces_the_twin_of_a_newcomer(self):
        collection = EamCollection(SHAPE)
        rng = np.random.default_rng(0)
        matrices = rng.integers(0, 9, size=(COLLECTED_MATRICES, 3, 6)).astype(np.float32)
        for matrix in matrices:
            collection.finish(matrix)
        collection.finish(3 * matrices[17])
        assert len(collection.collection) == COLLECTED_MATRICES
        np.testing.assert_array_equal(collection.collection.matrices[17], 3 * matrices[17])
        np.testing.assert_array_equal(
            np.delete(collection.collection.matrices, 17, 0), np.delete(matrices, 17, 0)
        )

    def test_requests_like_those_collected_are_covered(self):
        collection = EamCollection(SHAPE)
        collection.fit(ROUTES.select([0]))
        assert collection.coverage(ROUTES.select([0])) == 1.0
        elsewhere = Routes(
            shape=SHAPE,
            expert_ids=(ROUTES.expert_ids[:1] + np.array([[[3]]])) % 6,
            gate_weights=ROUTES.gate_weights[:1],
            token_ids=ROUTES.token_ids[:1],
            offsets=np.array([0, 1]),
        )
        assert collection.coverage(elsewhere) == 0.0


def test_the_path_is_foretold_better_than_by_the_last_token_or_the_last_layer():
    """ExpertFlow's order: the path predictor above its baselines, on a noisy router."""
    shape = Shape(num_layers=4, num_experts=8, top_k=2)
    routes = make_routes(shape, num_sequences=40, length=30, vocabulary=12, noise=0.3, seed=2)
    train, some = routes.select(range(30)), contexts(routes.select(range(30, 40)))

    def accuracy(name: str, now: int) -> float:
        estimator, found = fitted(name, train), []
        for layer in range(1, shape.num_layers):
            chance = estimator.estimate(some, min(now, layer - 1), layer)
            guessed = visits(np.argsort(-chance, axis=1)[:, : shape.top_k], shape.num_experts)
            found.append((guessed * visits(some.path[:, layer], shape.num_experts)).sum())
        return float(np.sum(found) / some.path[:, 1:].size)

    assert accuracy("path-network", -1) > accuracy("previous-token", -1) + 0.1
