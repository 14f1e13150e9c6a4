"""Belady's rule on predictions: evicts the expert whose next use is expected furthest ahead."""

from moe_runtime.policies.prediction.base import Event, LayerRouted, Predictor, Shape

_LEAST_PROBABILITY = 1e-3


class PredictedUse:
    """Scores experts by the negative of the layers until their next use, as a predictor sees it.

    An expert visited with probability p in each of its layer's turns is next used ``1 / p`` turns
    ahead on average; the predictor is asked for one whole turn of the model.

    Args:
        shape: the sizes of the model.
        predictor: guesses the coming visits; it is told of every event here.
    """

    def __init__(self, shape: Shape, predictor: Predictor) -> None:
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

    def scores(self, layer: int) -> list[float]:
        """``[E]`` minus the expected number of layers until the next use."""
        if not self._scores:
            self._ask()
        return self._scores[layer]

    def _ask(self) -> None:
        num_layers, num_experts = self._shape.num_layers, self._shape.num_experts
        chance = [[_LEAST_PROBABILITY] * num_experts for _ in range(num_layers)]
        for key, probability in self._predictor.predict(self._routed, num_layers):
            chance[key.layer][key.expert] = max(probability, _LEAST_PROBABILITY)
        for layer in range(num_layers):
            ahead = (layer - self._routed - 1) % num_layers + 1
            self._scores[layer] = [-(ahead + num_layers * (1 / p - 1)) for p in chance[layer]]
