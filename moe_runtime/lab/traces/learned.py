"""What predictors and policies learned, as ``.npz`` files of plain arrays with a JSON header."""

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.errors import CheckpointError, MoERuntimeWarning, named_failure
from moe_runtime.files import make_folders, write_atomically
from moe_runtime.lab.traces.format import Archive, parse_signature
from moe_runtime.lab.traces.recent import cached_path
from moe_runtime.lab.traces.routes import same_model, shown_model
from moe_runtime.policies.prediction import PREDICTORS, Estimator, check_name, is_file_name
from moe_runtime.policies.prediction.base import Learner, most_learned_bytes, shape_of
from moe_runtime.types import ModelSignature

_MAX_HEADER_BYTES = 1 << 16
_DEFAULT_MAX_BYTES = 2 << 30
_DTYPES = {"|u1", "<u2", "<i8", "<f4", "<f8"}
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    format: str
    owner: str
    remedy: str


_TRAINED = _Kind(format="moe-runtime-predictor", owner="predictor", remedy="train it again")
_CACHED = _Kind(format="moe-runtime-learned", owner="learner", remedy="remove it")
_LESSON = _Kind(format="moe-runtime-lesson", owner="lesson", remedy="remove it")
_LESSON_ARRAYS = {"capacities": "<f8", "misses": "<i8", "last_marks": "<i8", "facts": "<f8"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Lesson:
    """Result of teaching the policy ``reuse``, on tokens that it did not learn from."""

    tokens: int  # that it saw, those held out included
    last_marks: np.ndarray  # ``[N]`` int64 by which the last of them are found
    capacities: np.ndarray  # ``[C]`` shares of the experts in memory, ascending
    misses: np.ndarray  # ``[3, C]`` of LRU, of ``reuse`` without a network and with it
    is_kept: bool  # whether runs begin with the network
    policy_s: float  # seconds that the policy takes of a layer of a step
    recall: float  # recall@K of the predictor that was trained along; 0 where none was kept

    def share_of_lru(self, capacity: float) -> float:
        """Misses of the policy for each miss of LRU."""
        shares = self.misses[1 + self.is_kept] / np.maximum(self.misses[0], 1)
        return float(np.interp(capacity, self.capacities, shares))


def write_predictor(
    path: str | os.PathLike[str], estimator: Estimator, signature: ModelSignature
) -> None:
    """Writes a trained estimator; the file appears under its name when it is complete."""
    _write(path, _TRAINED, estimator.name, signature, estimator.state())


def read_predictor(
    path: str | os.PathLike[str],
    signature: ModelSignature | None = None,
    *,
    max_bytes: int = _DEFAULT_MAX_BYTES,
) -> Estimator:
    """Reads and verifies a trained predictor."""
    name, found, state = _read(path, _TRAINED, max_bytes)
    if signature is not None and not same_model(found, signature):
        raise CheckpointError(
            f"{path}: was trained for {shown_model(found)}, but the model is "
            f"{shown_model(signature)}; train one from a trace of this model"
        )
    try:
        return PREDICTORS[name].from_state(shape_of(found), state)
    except ValueError as error:
        raise CheckpointError(f"{path}: the predictor is damaged: {error}") from error


def check_predictor(predictor: str | Path) -> None:
    """Refuses a predictor that loading would refuse minutes later."""
    if is_file_name(predictor):
        read_predictor_signature(predictor)
    else:
        check_name(str(predictor))


def read_predictor_signature(path: str | os.PathLike[str]) -> ModelSignature:
    """The model that a predictor was trained for."""
    with Archive(path, max_bytes=_DEFAULT_MAX_BYTES) as archive:
        return _read_header(archive, _TRAINED)[1]


def learned_path(name: str, signature: ModelSignature, checkpoint: Path) -> Path:
    """The file of a learner's arrays, there or not."""
    return cached_path("learned", signature, checkpoint, f"-{name}")


def restore_learned(learner: Learner, signature: ModelSignature, path: Path) -> bool:
    """Restores a learner's arrays of earlier processes, if any were kept."""
    if not os.path.exists(path):
        return False
    try:
        name, found, state = _read(path, _CACHED, _most_cached_bytes(signature))
        if name != learner.name or found != signature:
            raise CheckpointError(
                f"{path}: holds what {name!r} learned of {shown_model(found)}, expected "
                f"{learner.name!r} and {shown_model(signature)}; remove it"
            )
        try:
            learner.restore(state)
        except ValueError as error:
            raise CheckpointError(f"{path}: what was learned is damaged: {error}") from error
    except CheckpointError as error:
        warnings.warn(f"{learner.name} begins anew: {error}", MoERuntimeWarning, stacklevel=2)
        return False
    return True


def keep_learned(learner: Learner, signature: ModelSignature, path: Path) -> None:
    """Writes a learner's arrays, if any, for later runs.

    A file that holds more or another network, which was trained meanwhile, is left as it is.
    """
    state = learner.learned()
    if not state:
        return
    found: Mapping[str, np.ndarray] = {}
    with contextlib.suppress(OSError, CheckpointError):
        found = _read(path, _CACHED, _most_cached_bytes(signature))[2]
    networks = [name for name in found if name.startswith("network_")]
    if found.keys() > state.keys() or any(
        not np.array_equal(found[name], state[name]) for name in networks
    ):
        return
    with contextlib.suppress(OSError, CheckpointError):
        write_learned(learner, signature, path)


def write_learned(learner: Learner, signature: ModelSignature, path: Path) -> None:
    """Writes a learner's arrays."""
    make_folders(path.parent)
    _write(path, _CACHED, learner.name, signature, learner.learned())


def write_lesson(lesson: Lesson, signature: ModelSignature, checkpoint: Path) -> None:
    """Writes a lesson, in the place of the one before."""
    facts = np.array([lesson.tokens, lesson.is_kept, lesson.policy_s, lesson.recall])
    arrays = [lesson.capacities, lesson.misses, lesson.last_marks, facts]
    path = learned_path(_LESSON.owner, signature, checkpoint)
    make_folders(path.parent)
    _write(path, _LESSON, "reuse", signature, dict(zip(_LESSON_ARRAYS, arrays, strict=True)))


def read_lesson(signature: ModelSignature, checkpoint: Path) -> Lesson | None:
    """The last lesson; None if there is none, or, with a warning, if it cannot be read."""
    path = learned_path(_LESSON.owner, signature, checkpoint)
    if not os.path.exists(path):
        return None
    try:
        _, found, arrays = _read(path, _LESSON, _MAX_HEADER_BYTES)
        types = {name: array.dtype.str for name, array in arrays.items()}
        if found != signature or types != _LESSON_ARRAYS:
            raise CheckpointError(f"{path}: is of another model or form; remove it")
        capacities, misses, last_marks, facts = (arrays[name] for name in _LESSON_ARRAYS)
        fits = capacities.ndim == 1 <= capacities.size and misses.shape == (3, len(capacities))
        fits = fits and last_marks.ndim == 1 and facts.shape == (4,)
        if not fits or not np.isfinite(facts).all():
            raise CheckpointError(f"{path}: the lesson is damaged; remove it")
    except CheckpointError as error:
        text = f"what was taught before is not used: {error}"
        # the same place for all callers: several in a process say it once
        warnings.warn(text, MoERuntimeWarning, stacklevel=1)
        return None
    return Lesson(
        tokens=int(facts[0]),
        last_marks=last_marks,
        capacities=capacities,
        misses=misses,
        is_kept=bool(facts[1]),
        policy_s=float(facts[2]),
        recall=float(facts[3]),
    )


def _most_cached_bytes(signature: ModelSignature) -> int:
    return most_learned_bytes(shape_of(signature)) + _MAX_HEADER_BYTES


def _write(
    path: str | os.PathLike[str],
    kind: _Kind,
    name: str,
    signature: ModelSignature,
    state: Mapping[str, np.ndarray],
) -> None:
    arrays = {each: np.ascontiguousarray(array) for each, array in state.items()}
    header = {
        "format": kind.format,
        "version": _VERSION,
        kind.owner: name,
        "signature": dataclasses.asdict(signature),
        "arrays": {each: array.dtype.str for each, array in arrays.items()},
    }
    header_bytes = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with named_failure(path, kind.owner), write_atomically(path) as file:
        np.savez_compressed(file, allow_pickle=False, header=header_bytes, **arrays)


def _read(
    path: str | os.PathLike[str], kind: _Kind, max_bytes: int
) -> tuple[str, ModelSignature, dict[str, np.ndarray]]:
    """The name of the file's writer, the model, and the arrays."""
    with Archive(path, max_bytes=max_bytes) as archive:
        header, signature = _read_header(archive, kind)
        types = header["arrays"].items()
        arrays = {name: archive.read(name, np.dtype(dtype)) for name, dtype in types}
    return str(header.get(kind.owner)), signature, arrays


def _read_header(archive: Archive, kind: _Kind) -> tuple[dict[str, Any], ModelSignature]:
    """The header of a file of this kind, and the model that it names."""
    header = archive.read_json("header", max_bytes=_MAX_HEADER_BYTES, what="the header")
    if not isinstance(header, dict) or header.get("format") != kind.format:
        raise CheckpointError(f"{archive.path}: not a {kind.owner} of moe-runtime")
    if header.get("version") != _VERSION:
        raise CheckpointError(
            f"{archive.path}: {kind.owner} version {header.get('version')!r} is not known, "
            f"expected {_VERSION}; {kind.remedy}"
        )
    arrays = header.get("arrays")
    if not isinstance(arrays, dict) or not set(map(str, arrays.values())) <= _DTYPES:
        raise CheckpointError(f"{archive.path}: the header announces arrays of unknown types")
    if kind is _TRAINED and header.get("predictor") not in list(PREDICTORS):
        raise CheckpointError(
            f"{archive.path}: predictor {header.get('predictor')!r} is not known, expected one of "
            f"{', '.join(sorted(PREDICTORS))}"
        )
    return header, parse_signature(header.get("signature"), archive.path)
