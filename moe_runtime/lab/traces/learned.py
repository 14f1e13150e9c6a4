"""What policies and predictors learned from a model's requests, kept in the user's cache."""

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.files import make_folders
from moe_runtime.lab.traces.archive import Archive
from moe_runtime.lab.traces.format import parse_signature
from moe_runtime.lab.traces.recent import cached_path
from moe_runtime.lab.traces.routes import shown_model
from moe_runtime.lab.traces.state_file import (
    MAX_HEADER_BYTES,
    StateKind,
    read_arrays,
    read_header,
    write_state,
)
from moe_runtime.policies.prediction.base import Learner, most_learned_bytes, shape_of
from moe_runtime.types import ModelSignature

_KIND = StateKind(format="moe-runtime-learned", version=1, owner="learner", remedy="remove it")


def learned_path(name: str, signature: ModelSignature, checkpoint: Path) -> Path:
    """Where a learner's arrays lie, if any were kept.

    Args:
        name: of the policy or predictor.
        signature: the model.
        checkpoint: its folder or file.
    """
    return cached_path("learned", signature, checkpoint, f"-{name}")


def restore_learned(learner: Learner, signature: ModelSignature, path: Path) -> bool:
    """Restores what a learner learned in earlier processes, if anything was kept.

    A file that is damaged, or of another version or model, is left out with a warning
    (``MoERuntimeWarning``).

    Returns:
        Whether anything was restored.
    """
    if not os.path.exists(path):
        return False
    try:
        state = _read(path, learner.name, signature)
        try:
            learner.restore(state)
        except ValueError as error:
            raise CheckpointError(f"{path}: what was learned is damaged: {error}") from error
    except CheckpointError as error:
        warnings.warn(f"{learner.name} begins anew: {error}", MoERuntimeWarning, stacklevel=2)
        return False
    return True


def keep_learned(learner: Learner, signature: ModelSignature, path: Path) -> None:
    """Writes what a learner learned, if anything, for later runs.

    What cannot be kept is dropped: a cache that is missing or full must not fail a run.
    """
    state = learner.learned()
    if not state:
        return
    with contextlib.suppress(OSError, CheckpointError):
        make_folders(path.parent)
        write_state(path, _KIND, learner.name, signature, state)


def _read(path: Path, name: str, signature: ModelSignature) -> Mapping[str, np.ndarray]:
    most_bytes = most_learned_bytes(shape_of(signature)) + MAX_HEADER_BYTES
    with Archive(path, max_bytes=most_bytes) as archive:
        header = read_header(archive, _KIND)
        found = parse_signature(header.get("signature"), path)
        if header.get(_KIND.owner) != name or found != signature:
            raise CheckpointError(
                f"{path}: holds what {header.get(_KIND.owner)!r} learned of {shown_model(found)}, "
                f"expected {name!r} and {shown_model(signature)}; remove it"
            )
        return read_arrays(archive, header)
