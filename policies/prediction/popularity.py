"""Global popularity: the experts that recorded tokens visited most."""

import numpy as np

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.context import Contexts
from moe_runtime.policies.prediction.estimator import Estimator, State, popularity_of, take_chances


class Popularity(Estimator):
    """The share of all recorded tokens that visited an expert, whatever the token is.

    The floor that every other predictor has to beat, and what they fall back to.
    """

    name = "popularity"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        even = shape.top_k / shape.num_experts
        self.share_LE = np.full((shape.num_layers, shape.num_experts), even, dtype=np.float32)

    def fit(self, routes: Routes) -> None:
        """Counts visits."""
        self.share_LE = popularity_of(routes)

    def estimate(self, contexts: Contexts, now: int, layer: int) -> np.ndarray:
        """The same for every row."""
        return np.broadcast_to(self.share_LE[layer], (len(contexts), self.shape.num_experts))

    def state(self) -> State:
        """``share``: ``[L, E]``."""
        return {"share": self.share_LE}

    def restore(self, state: State) -> None:
        """Takes over ``share``."""
        sizes = (self.shape.num_layers, self.shape.num_experts)
        self.share_LE = take_chances(state, "share", sizes)
