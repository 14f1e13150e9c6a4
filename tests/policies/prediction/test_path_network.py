"""The learned path predictor: right gradients, and paths that only the tokens decide."""

import numpy as np
import pytest

from moe_runtime.policies.prediction import Routes, Shape, contexts_of
from moe_runtime.policies.prediction.estimator import visits
from moe_runtime.policies.prediction.trained import PathNetwork

SHAPE = Shape(num_layers=3, num_experts=6, top_k=2)


def routes_by_pairs(num_sequences: int, seed: int, length: int = 40) -> Routes:
    """The whole path is a function of a token and the one before it; ids are drawn at random."""
    of_token = np.random.default_rng(0).permuted(np.tile(np.arange(6), (8, 3, 1)), axis=2)
    tokens = np.random.default_rng(seed).integers(0, 8, size=(num_sequences, length))
    before = np.concatenate([np.zeros((num_sequences, 1), np.int64), tokens[:, :-1]], axis=1)
    first, second = of_token[tokens, :, 0], of_token[before, :, 1]
    clash = np.where(first == second, of_token[before, :, 2], second)
    ids = np.stack((first, clash), axis=-1).reshape(-1, 3, 2)
    return Routes(
        shape=SHAPE,
        expert_ids=ids,
        gate_weights=np.full(ids.shape, 0.5, np.float32),
        token_ids=tokens.ravel(),
        offsets=np.arange(num_sequences + 1) * length,
    )


def test_gradients_are_those_of_finite_differences():
    network = PathNetwork(SHAPE)
    network.fit(routes_by_pairs(3, seed=1, length=10))
    rng = np.random.default_rng(2)
    network.parameters = {
        name: value.astype(np.float64) + 0.1 * rng.standard_normal(value.shape)
        for name, value in network.parameters.items()
    }
    features = rng.standard_normal((5, 7, 3, 6))
    token, before = np.array([0, 3, -1, 2, 3]), np.array([-1, 1, 1, 4, 0])
    path = rng.permuted(np.tile(np.arange(6), (5, 3, 1)), axis=2)[:, :, :2]
    path[4, 1] = 6  # nothing was recorded

    def loss() -> float:
        hidden, _ = network._hidden(features[:, 5:7] - network.share_LE, token, before)
        own = network.parameters
        logits = (hidden @ own["outer"] + own["outer_bias"]).reshape(5, 3, 6)
        logits = logits + np.einsum("bfle,fl->ble", features, own["mix"])
        known = path[:, :, :1] < 6
        entropy = np.logaddexp(0.0, logits) - logits * visits(path, 6)
        return float((entropy * known).sum() / 5)

    gradients = network._gradients(features, token, before, path)
    for parameter, gradient in zip(network.parameters.values(), gradients, strict=True):
        assert parameter.shape == gradient.shape
        for place in rng.integers(parameter.size, size=6).tolist():
            at, step = np.unravel_index(place, parameter.shape), 1e-5
            kept = parameter[at]
            parameter[at] = kept + step
            above = loss()
            parameter[at] = kept - step
            below = loss()
            parameter[at] = kept
            # the error is rounded to float32 by the sigmoid
            assert gradient[at] == pytest.approx((above - below) / (2 * step), rel=1e-3, abs=1e-5)


def test_whole_paths_are_foretold_before_the_first_layer():
    network = PathNetwork(SHAPE)
    network.fit(routes_by_pairs(60, seed=3))
    (contexts,) = contexts_of(routes_by_pairs(6, seed=4))
    later = contexts.rows(np.flatnonzero(contexts.num_tokens > 0))
    for layer in range(3):
        chance = network.estimate(later, -1, layer)
        found = np.take_along_axis(chance, later.path[:, layer], axis=1)
        # both experts of every token are the likeliest two; each alone needs one of the two ids
        ranks = (chance[:, None, :] > found[:, :, None]).sum(axis=2)
        assert (ranks < 2).mean() > 0.9
