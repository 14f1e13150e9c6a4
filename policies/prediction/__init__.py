"""Predictors by name, imported on first use: they guess the experts that coming layers visit."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moe_runtime.config import nearest
from moe_runtime.lazy import LazyTable, is_code_file, lazy_names
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
    from moe_runtime.policies.prediction.estimator import (
        Contexts,
        Estimator,
        Popularity,
        contexts_of,
    )
    from moe_runtime.policies.prediction.hidden import (
        HiddenLookahead,
        LookaheadPredictor,
        NextGate,
        make_predictor,
    )
    from moe_runtime.policies.prediction.matched import EamCollection
    from moe_runtime.policies.prediction.tables import PreviousToken, RunningCounts
    from moe_runtime.policies.prediction.tracked import TrackedPredictor
else:
    __getattr__ = lazy_names(
        __name__,
        {
            ".estimator": "Contexts Estimator Popularity contexts_of",
            ".hidden": "HiddenLookahead LookaheadPredictor NextGate make_predictor",
            ".matched": "EamCollection",
            ".tables": "PreviousToken RunningCounts",
            ".tracked": "TrackedPredictor",
        },
    )

__all__ = [
    "LIVE_PREDICTORS",
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
    "check_name",
    "contexts_of",
    "is_file_name",
    "make_estimator",
    "make_predictor",
]

PREDICTORS: Mapping[str, "type[Estimator]"] = LazyTable(
    {
        "popularity": f"{__name__}.estimator:Popularity",
        "running-counts": f"{__name__}.tables:RunningCounts",
        "previous-token": f"{__name__}.tables:PreviousToken",
        "token-markov": f"{__name__}.tables:TokenMarkov",
        "layer-affinity": f"{__name__}.tables:LayerAffinity",
        "naive-bayes": f"{__name__}.tables:NaiveBayes",
        "token-identity": f"{__name__}.trained:TokenIdentity",
        "eam": f"{__name__}.matched:EamCollection",
        "expert-map": f"{__name__}.matched:ExpertMapSearch",
        "combined": f"{__name__}.trained:Combination",
        "path-network": f"{__name__}.trained:PathNetwork",
        "next-gate": f"{__name__}.hidden:NextGate",
        "hidden-lookahead": f"{__name__}.hidden:HiddenLookahead",
    },
    own=f"{__name__}.estimator:Estimator",
    arguments=("shape",),
)

LIVE_PREDICTORS = ("next-gate", "running-counts", "eam")
"""Predictors that serve a model without training; others need the file of a trained one."""


def is_file_name(predictor: str | Path) -> bool:
    """Whether this is the file of a trained predictor, not a predictor's name."""
    if is_code_file(predictor):
        return False
    return isinstance(predictor, Path) or predictor.endswith(".npz") or "/" in predictor


def check_name(predictor: str) -> None:
    """Refuses unknown names, and names of predictors that need training."""
    if is_code_file(predictor):
        PREDICTORS[predictor]
    if predictor not in PREDICTORS:
        raise ValueError(
            f"unknown predictor {predictor!r}: {nearest(predictor, PREDICTORS)}; "
            "or the file of a trained one, which ends in .npz"
        )
    if predictor in PREDICTORS.keys() - set(LIVE_PREDICTORS):
        raise ValueError(
            f"{predictor} serves a model only once it is trained: give the .npz file that "
            f"`moe-runtime predictor fit --model MODEL --text FILE --predictor {predictor}` writes"
        )


def make_estimator(name: str, shape: Shape) -> "Estimator":
    """Makes the named estimator, untrained; ValueError for an unknown name."""
    if name not in PREDICTORS:
        raise ValueError(f"unknown predictor {name!r}: {nearest(name, PREDICTORS)}")
    return PREDICTORS[name](shape)
