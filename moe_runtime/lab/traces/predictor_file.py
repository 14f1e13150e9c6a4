"""The file of a trained predictor: one ``.npz`` of plain arrays and a JSON header, no pickles."""

import os
from typing import Any

from moe_runtime.errors import CheckpointError
from moe_runtime.lab.traces.archive import Archive
from moe_runtime.lab.traces.format import parse_signature
from moe_runtime.lab.traces.routes import same_model, shown_model
from moe_runtime.lab.traces.state_file import StateKind, read_arrays, read_header, write_state
from moe_runtime.policies.prediction import PREDICTORS, Estimator
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.types import ModelSignature

PREDICTOR_FORMAT = "moe-runtime-predictor"
PREDICTOR_VERSION = 1
_KIND = StateKind(
    format=PREDICTOR_FORMAT, version=PREDICTOR_VERSION, owner="predictor", remedy="train it again"
)
_DEFAULT_MAX_BYTES = 2 << 30


def write_predictor(
    path: str | os.PathLike[str], estimator: Estimator, signature: ModelSignature
) -> None:
    """Writes what an estimator learned; the file appears under its name when it is complete.

    Raises:
        CheckpointError: the file cannot be written.
    """
    write_state(path, _KIND, estimator.name, signature, estimator.state())


def read_predictor(
    path: str | os.PathLike[str],
    signature: ModelSignature | None = None,
    *,
    max_bytes: int = _DEFAULT_MAX_BYTES,
) -> Estimator:
    """Reads and verifies a trained predictor.

    Args:
        path: a file that ``write_predictor`` wrote.
        signature: the model that it is wanted for; not compared when omitted.
        max_bytes: largest size of all arrays together, unpacked, that is accepted.

    Raises:
        CheckpointError: the file is missing, damaged, too large, of another version, or was trained
            for another model.
    """
    with Archive(path, max_bytes=max_bytes) as archive:
        header = _read_header(archive)
        found = parse_signature(header.get("signature"), archive.path)
        if signature is not None and not same_model(found, signature):
            raise CheckpointError(
                f"{archive.path}: was trained for {shown_model(found)}, but the model is "
                f"{shown_model(signature)}; train one from a trace of this model"
            )
        state = read_arrays(archive, header)
    try:
        return PREDICTORS[header["predictor"]].from_state(shape_of(found), state)
    except ValueError as error:
        raise CheckpointError(f"{archive.path}: the predictor is damaged: {error}") from error


def read_predictor_signature(path: str | os.PathLike[str]) -> ModelSignature:
    """The model that a predictor was trained for.

    Raises:
        CheckpointError: the file is not a predictor.
    """
    with Archive(path, max_bytes=_DEFAULT_MAX_BYTES) as archive:
        return parse_signature(_read_header(archive).get("signature"), archive.path)


def _read_header(archive: Archive) -> dict[str, Any]:
    header = read_header(archive, _KIND)
    if header.get("predictor") not in PREDICTORS:
        raise CheckpointError(
            f"{archive.path}: predictor {header.get('predictor')!r} is not known, expected one of "
            f"{', '.join(sorted(PREDICTORS))}"
        )
    return header
