"""Belady's rule on predictions: evicts the expert whose next use is expected furthest ahead."""

from functools import partial

import numpy as np

from moe_runtime.policies.eviction.scored import Scored
from moe_runtime.policies.eviction.setting import Maker, Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted, Shape
from moe_runtime.policies.prediction.estimator import State
from moe_runtime.policies.prediction.tracked import TrackedPredictor

_LEAST_PROBABILITY = 1e-3


class PredictedUse:
    """Scores experts by the negative of the layers until their next use, as a predictor sees it.

    An expert visited with probability p in each of its layer's turns is next used ``1 / p`` turns
    ahead on average. A layer is asked about only when one of its experts must go: with a share of
    the slots for every layer that is one estimate for each layer of a step.

    Args:
        shape: the sizes of the model.
        predictor: guesses the coming visits from routing alone; it is told of every event here.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Maker:
        """Makes what orders experts by these scores.

        Raises:
            ValueError: the setting has no predictor.
        """
        if setting.predictor is None:
            raise ValueError("policy 'predicted' needs a predictor; name one")
        return partial(Scored, cls(setting.shape, setting.predictor), may_decline=True)

    def __init__(self, shape: Shape, predictor: TrackedPredictor) -> None:
        self._shape = shape
        self._predictor = predictor
        self._routed = -1
        self._scores: dict[int, list[float]] = {}

    def observe(self, event: Event) -> None:
        """Passes the event on; guesses made before it are out of date."""
        self._predictor.observe(event)
        self._routed = event.layer if isinstance(event, LayerRouted) else -1
        self._scores.clear()

    def finish(self, sequence: int) -> None:
        """Ends a request."""
        self._predictor.finish(sequence)

    @property
    def name(self) -> str:
        """The predictor's."""
        return self._predictor.name

    def learned(self) -> State:
        """What the predictor learned from requests."""
        return self._predictor.learned()

    def restore(self, state: State) -> None:
        """Has the predictor take over what was learned."""
        self._predictor.restore(state)

    def scores(self, layer: int) -> list[float]:
        """``[E]`` minus the expected number of layers until the next use."""
        if layer not in self._scores:
            num_layers = self._shape.num_layers
            ahead = (layer - self._routed - 1) % num_layers + 1
            chance = self._predictor.chances(self._routed, layer)
            turns = 1.0 / np.maximum(chance, _LEAST_PROBABILITY) - 1.0
            self._scores[layer] = (-(ahead + num_layers * turns)).tolist()
        return self._scores[layer]
