"""What policies and predictors learn from requests, kept from one process to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_runtime.inference import options
from moe_runtime.inference.predictors import is_file_name
from moe_runtime.policies.prediction import PREDICTORS
from moe_runtime.policies.prediction.base import Learner
from moe_runtime.types import ModelSignature


class KeptLearning:
    """The learners of a loaded model: each begins with what earlier processes learned.

    Args:
        model: the model; one that has not come to the end of a step keeps nothing.
        signature: what it is.
        predictor: name of the predictor, or the file of a trained one, which says what it begins
            with.
        writes: whether this process writes what is learned, as one of a group does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        signature: ModelSignature,
        predictor: str | Path,
        *,
        writes: bool,
    ) -> None:
        self._signature = signature
        self._writes = writes
        self._has_trained = is_file_name(predictor)
        self._has_step = False
        self._learners: dict[str, Learner] = {}
        self._hook = model.register_forward_hook(self._note_step)

    def keep(self, *watchers: object) -> None:
        """Restores those of the watchers that learn from requests, and keeps them in the end."""
        for watcher in watchers:
            if not isinstance(watcher, Learner):
                continue
            if self._has_trained and watcher.name in PREDICTORS:
                continue
            options.restore_learned(watcher, self._signature)
            self._learners.setdefault(watcher.name, watcher)

    def close(self) -> None:
        """Writes what was learned, requests that still run included."""
        if self._has_step and self._writes:
            for learner in self._learners.values():
                options.keep_learned(learner, self._signature)

    def _note_step(self, *_: Any) -> None:
        self._has_step = True
        self._hook.remove()
