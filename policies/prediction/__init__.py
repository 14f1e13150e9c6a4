"""Predictors by name: which experts the coming layers will visit.

Each is imported when it is asked for; most processes ask for one, or none.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moe_runtime.config import nearest
from moe_runtime.lazy import LazyTable, lazy_names
from moe_runtime.policies.prediction.base import (
    Event,
    Guess,
    LayerRouted,
    Predictor,
    Routes,
    Shape,
    StepBegins,
)

if TYPE_CHECKING:
    from moe_runtime.policies.prediction.context import Contexts, contexts_of
    from moe_runtime.policies.prediction.eam import EamCollection
    from moe_runtime.policies.prediction.estimator import Estimator
    from moe_runtime.policies.prediction.hidden_lookahead import HiddenLookahead
    from moe_runtime.policies.prediction.lookahead import LookaheadPredictor, make_predictor
    from moe_runtime.policies.prediction.next_gate import NextGate
    from moe_runtime.policies.prediction.popularity import Popularity
    from moe_runtime.policies.prediction.previous_token import PreviousToken
    from moe_runtime.policies.prediction.running_counts import RunningCounts
    from moe_runtime.policies.prediction.tracked import TrackedPredictor
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".context": "Contexts contexts_of",
            ".eam": "EamCollection",
            ".estimator": "Estimator",
            ".hidden_lookahead": "HiddenLookahead",
            ".lookahead": "LookaheadPredictor make_predictor",
            ".next_gate": "NextGate",
            ".popularity": "Popularity",
            ".previous_token": "PreviousToken",
            ".running_counts": "RunningCounts",
            ".tracked": "TrackedPredictor",
        },
    )

__all__ = [
    "NEED_TRAINING",
    "PREDICTORS",
    "Contexts",
    "EamCollection",
    "Estimator",
    "Event",
    "Guess",
    "HiddenLookahead",
    "LayerRouted",
    "LookaheadPredictor",
    "NextGate",
    "Popularity",
    "Predictor",
    "PreviousToken",
    "Routes",
    "RunningCounts",
    "Shape",
    "StepBegins",
    "TrackedPredictor",
    "contexts_of",
    "make_estimator",
    "make_predictor",
]

PREDICTORS: Mapping[str, "type[Estimator]"] = LazyTable(
    {
        "popularity": f"{__name__}.popularity:Popularity",
        "running-counts": f"{__name__}.running_counts:RunningCounts",
        "previous-token": f"{__name__}.previous_token:PreviousToken",
        "token-markov": f"{__name__}.transitions:TokenMarkov",
        "layer-affinity": f"{__name__}.transitions:LayerAffinity",
        "naive-bayes": f"{__name__}.transitions:NaiveBayes",
        "token-identity": f"{__name__}.token_identity:TokenIdentity",
        "eam": f"{__name__}.eam:EamCollection",
        "expert-map": f"{__name__}.expert_map:ExpertMapSearch",
        "combined": f"{__name__}.combination:Combination",
        "path-network": f"{__name__}.path_network:PathNetwork",
        "next-gate": f"{__name__}.next_gate:NextGate",
        "hidden-lookahead": f"{__name__}.hidden_lookahead:HiddenLookahead",
    }
)

NEED_TRAINING = PREDICTORS.keys() - {"eam", "next-gate", "previous-token", "running-counts"}
"""Those of `PREDICTORS` that guess nothing before they are trained on recorded routing."""


def make_estimator(name: str, shape: Shape) -> "Estimator":
    """Builds the named estimator, which has learned nothing yet.

    Raises:
        ValueError: no predictor has this name; the message suggests the nearest one.
    """
    if name not in PREDICTORS:
        raise ValueError(f"unknown predictor {name!r}: {nearest(name, PREDICTORS)}")
    return PREDICTORS[name](shape)
