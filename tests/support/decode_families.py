"""Synthetic decode traces: requests of latent groups, with router noise that lingers or not."""

import numpy as np

from moe_runtime.policies.prediction import Routes, Shape

SHAPE = Shape(num_layers=12, num_experts=32, top_k=2)


def make_family(
    *,
    num_groups: int,
    concentration: float,
    persistence: float,
    num_requests: int,
    length: int = 40,
    seed: int = 0,
) -> Routes:
    """Requests one after the other; each draws a group with fixed logits.

    Args:
        num_groups: groups of requests.
        concentration: standard deviation of a group's logits.
        persistence: correlation of the noise from token to token.
        num_requests: number of requests.
        length: tokens of a request.
        seed: of the generator.
    """
    rng = np.random.default_rng(seed)
    sizes = (SHAPE.num_layers, SHAPE.num_experts)
    base = rng.normal(0, concentration, size=(num_groups, *sizes))
    ids, weights = [], []
    for _ in range(num_requests):
        group = base[rng.integers(num_groups)]
        noise = rng.normal(size=sizes)
        for _ in range(length):
            logits = group + noise
            best = np.argsort(-logits, axis=1)[:, : SHAPE.top_k]
            scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            ids.append(best)
            weights.append(np.take_along_axis(scores, best, axis=1))
            fresh = rng.normal(size=sizes)
            noise = persistence * noise + np.sqrt(1 - persistence**2) * fresh
    return Routes(
        shape=SHAPE,
        expert_ids=np.array(ids),
        gate_weights=np.array(weights, dtype=np.float32),
        token_ids=np.full(len(ids), -1, dtype=np.int64),
        offsets=np.arange(num_requests + 1, dtype=np.int64) * length,
    )
