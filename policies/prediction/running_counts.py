"""Running counts: the experts that this very sequence has visited so far."""

import numpy as np

from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.popularity import Popularity

PRIOR_TOKENS = 8.0
"""How many tokens of the sequence weigh as much as everything recorded before."""


class RunningCounts(Popularity):
    """Share of the sequence's own tokens that visited an expert, starting from popularity.

    The request-level activation matrix of MoE-Infinity (arXiv 2401.14361) used as it is, without
    looking for a similar one.
    """

    name = "running-counts"

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """Counts of each row's sequence, smoothed."""
        total = contexts.num_tokens[:, None].astype(np.float32) + np.float32(PRIOR_TOKENS)
        return (contexts.counts[:, layer] + PRIOR_TOKENS * self.share_LE[layer]) / total
