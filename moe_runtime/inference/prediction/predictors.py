"""The predictor that a caller named, whether by its name or by the file of a trained one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moe_runtime.config import nearest
from moe_runtime.inference import options
from moe_runtime.policies.prediction import NEED_TRAINING, PREDICTORS, make_estimator
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.types import ModelSignature

if TYPE_CHECKING:
    from moe_runtime.policies.prediction import Estimator


def is_file_name(predictor: str | Path) -> bool:
    """Whether a caller means the file of a trained predictor rather than a predictor's name."""
    return isinstance(predictor, Path) or predictor.endswith(".npz") or "/" in predictor


def check_predictor(predictor: str | Path) -> None:
    """Refuses a predictor that loading would refuse minutes later.

    Raises:
        CheckpointError: the file is missing, or is not a predictor.
        ValueError: no predictor has this name, or the one that has it must be trained first.
    """
    if is_file_name(predictor):
        options.read_predictor_signature(predictor)
    elif predictor not in PREDICTORS:
        raise ValueError(
            f"unknown predictor {predictor!r}: {nearest(str(predictor), PREDICTORS)}; "
            "or the file of a trained one, which ends in .npz"
        )
    elif predictor in NEED_TRAINING:
        raise ValueError(
            f"{predictor} guesses nothing before it is trained: give the .npz file that "
            f"`moe-runtime predictor fit --model MODEL --text FILE --predictor {predictor}` writes"
        )


def make_live_estimator(predictor: str | Path, signature: ModelSignature) -> Estimator:
    """The estimator that a caller named: trained, from a file, or one that needs no training.

    Args:
        predictor: a predictor's name, or the file of a trained one.
        signature: what a trained predictor must have been trained for.

    Raises:
        CheckpointError: the file cannot be used, or belongs to another model.
        ValueError: no predictor has this name.
    """
    if is_file_name(predictor):
        return options.read_predictor(predictor, signature)
    return make_estimator(str(predictor), shape_of(signature))


def learned_bytes(predictor: str | Path, estimator: Estimator) -> int:
    """Memory that a trained estimator's tables take: part of the budget.

    Without training there are only counts of a few kilobytes; they are in the fixed reserve.
    """
    if not is_file_name(predictor):
        return 0
    return sum(array.nbytes for array in estimator.state().values())
