"""Predictors by name: which experts the coming layers will visit."""

from moe_runtime.config import nearest
from moe_runtime.policies.prediction.base import (
    Event,
    Guess,
    LayerRouted,
    Predictor,
    Routes,
    Shape,
    StepBegins,
)
from moe_runtime.policies.prediction.combination import Combination
from moe_runtime.policies.prediction.context import Contexts, contexts_of
from moe_runtime.policies.prediction.eam import EamCollection
from moe_runtime.policies.prediction.estimator import Estimator
from moe_runtime.policies.prediction.expert_map import ExpertMap
from moe_runtime.policies.prediction.hidden_lookahead import HiddenLookahead
from moe_runtime.policies.prediction.lookahead import LookaheadPredictor
from moe_runtime.policies.prediction.next_gate import NextGate
from moe_runtime.policies.prediction.path_network import PathNetwork
from moe_runtime.policies.prediction.popularity import Popularity
from moe_runtime.policies.prediction.previous_token import PreviousToken
from moe_runtime.policies.prediction.running_counts import RunningCounts
from moe_runtime.policies.prediction.token_identity import TokenIdentity
from moe_runtime.policies.prediction.tracked import TrackedPredictor
from moe_runtime.policies.prediction.transitions import LayerAffinity, NaiveBayes, TokenMarkov

__all__ = [
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

PREDICTORS: dict[str, type[Estimator]] = {
    estimator.name: estimator
    for estimator in (
        Popularity,
        RunningCounts,
        PreviousToken,
        TokenMarkov,
        LayerAffinity,
        NaiveBayes,
        TokenIdentity,
        EamCollection,
        ExpertMap,
        Combination,
        PathNetwork,
        NextGate,
        HiddenLookahead,
    )
}


def make_estimator(name: str, shape: Shape) -> Estimator:
    """Builds the named estimator, which has learned nothing yet.

    Raises:
        ValueError: no predictor has this name; the message suggests the nearest one.
    """
    if name not in PREDICTORS:
        raise ValueError(f"unknown predictor {name!r}: {nearest(name, PREDICTORS)}")
    return PREDICTORS[name](shape)


def make_predictor(estimator: Estimator) -> Predictor:
    """The predictor that puts an estimator to work."""
    if isinstance(estimator, NextGate):
        return LookaheadPredictor(estimator)
    return TrackedPredictor(estimator)
