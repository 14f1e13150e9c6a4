"""Routing with the traits of real models: token-driven first layer, affinity, slow drift."""

import numpy as np

from moe_runtime.policies.prediction import Routes, Shape


def make_routes(
    shape: Shape,
    *,
    num_sequences: int = 12,
    length: int = 40,
    vocabulary: int = 30,
    noise: float = 0.7,
    seed: int = 0,
) -> Routes:
    """Random sequences whose experts follow the token, the layer before and the sequence.

    A token's logits in a layer are the sum of a fixed vector of its id (strong in layer 0), a fixed
    transition from its experts in the layer before, a vector of the sequence, and noise.
    """
    rng = np.random.default_rng(seed)
    layers, experts, top_k = shape.num_layers, shape.num_experts, shape.top_k
    of_token = rng.normal(size=(vocabulary, layers, experts))
    of_token[:, 0] *= 3.0
    transition = rng.normal(size=(layers, experts, experts)) * 2.0
    num_tokens = num_sequences * length
    ids = np.zeros((num_tokens, layers, top_k), dtype=np.int64)
    token_ids = np.minimum(rng.geometric(3.0 / vocabulary, size=num_tokens) - 1, vocabulary - 1)
    weights = np.zeros((num_tokens, layers, top_k), dtype=np.float32)
    for sequence in range(num_sequences):
        taste = rng.normal(size=(layers, experts))
        for token in range(sequence * length, (sequence + 1) * length):
            for layer in range(layers):
                logits = of_token[token_ids[token], layer] + taste[layer]
                logits = logits + noise * rng.normal(size=experts)
                if layer:
                    logits = logits + transition[layer, ids[token, layer - 1]].mean(axis=0)
                best = np.argsort(-logits)[:top_k]
                share = np.exp(logits[best] - logits[best[0]])
                ids[token, layer], weights[token, layer] = best, share / share.sum()
    return Routes(
        shape=shape,
        expert_ids=ids,
        gate_weights=weights,
        token_ids=token_ids.astype(np.int64),
        offsets=np.arange(num_sequences + 1, dtype=np.int64) * length,
    )
