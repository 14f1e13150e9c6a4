"""Minus-recent-score: keeps the experts whose router scores were high lately.

The cache of HybriMoE (arXiv 2504.05897): a moving average of the router's scores, of which only the
highest of each step count.
"""

from functools import partial

import numpy as np

from moe_runtime.policies.eviction.base import ReplayRule
from moe_runtime.policies.eviction.scored import Scored
from moe_runtime.policies.eviction.setting import Maker, Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted, Shape


class RecentScores:
    """``S = alpha * top(s) + (1 - alpha) * S`` for every layer and expert.

    The routing tells the scores of the chosen experts only, so those are the highest that count;
    for several tokens their mean is taken.

    Args:
        shape: the sizes of the model.
        alpha: weight of the present step, in (0, 1].
    """

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        """Makes what orders experts by these scores."""
        scores = cls(setting.shape)
        return partial(Scored, scores, rule=scores.rule)

    def __init__(self, shape: Shape, *, alpha: float = 0.5) -> None:
        # a subclass may score otherwise
        self.rule = ReplayRule("mrs", parameter=alpha) if type(self) is RecentScores else None
        self._alpha = alpha
        self._scores = np.zeros((shape.num_layers, shape.num_experts + 1))

    def observe(self, event: Event) -> None:
        """Averages a layer's scores into those before."""
        if isinstance(event, LayerRouted):
            scores = self._scores[event.layer]
            scores *= 1 - self._alpha
            ids, gates = event.expert_ids.ravel(), event.gate_weights.ravel()
            sums = np.bincount(ids, weights=gates, minlength=len(scores))
            scores += self._alpha * (sums / len(event.expert_ids))

    def finish(self, sequence: int) -> None:
        """The scores outlive a request."""

    def scores(self, layer: int) -> list[float]:
        """``[E]`` the averages of a layer."""
        return self._scores[layer, :-1].tolist()
