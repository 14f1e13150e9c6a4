"""The file of a trained predictor: one ``.npz`` of plain arrays and a JSON header, no pickles."""

import dataclasses
import json
import os
from typing import Any

import numpy as np

from moe_runtime.errors import CheckpointError
from moe_runtime.files import named_failure, write_atomically
from moe_runtime.lab.traces.archive import Archive
from moe_runtime.lab.traces.format import parse_signature
from moe_runtime.lab.traces.routes import same_model, shape_of
from moe_runtime.policies.prediction import PREDICTORS, Estimator
from moe_runtime.types import ModelSignature

PREDICTOR_FORMAT = "moe-runtime-predictor"
PREDICTOR_VERSION = 1
_MAX_HEADER_BYTES = 1 << 16
_DEFAULT_MAX_BYTES = 2 << 30
_DTYPES = {"|u1", "<u2", "<i8", "<f4"}


def write_predictor(
    path: str | os.PathLike[str], estimator: Estimator, signature: ModelSignature
) -> None:
    """Writes what an estimator learned; the file appears under its name when it is complete.

    Raises:
        CheckpointError: the file cannot be written.
    """
    state = {name: np.ascontiguousarray(array) for name, array in estimator.state().items()}
    header = {
        "format": PREDICTOR_FORMAT,
        "version": PREDICTOR_VERSION,
        "predictor": estimator.name,
        "signature": dataclasses.asdict(signature),
        "arrays": {name: array.dtype.str for name, array in state.items()},
    }
    header_bytes = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with named_failure(path, "predictor"), write_atomically(path) as file:
        np.savez_compressed(file, allow_pickle=False, header=header_bytes, **state)


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
                f"{archive.path}: was trained for {found}, but the model is {signature}; train one "
                "from a trace of this model"
            )
        state = {
            name: archive.read(name, np.dtype(dtype)) for name, dtype in header["arrays"].items()
        }
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
    raw = archive.read("header", np.dtype("|u1"), max_bytes=_MAX_HEADER_BYTES)
    try:
        header = json.loads(raw.tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{archive.path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict) or header.get("format") != PREDICTOR_FORMAT:
        raise CheckpointError(f"{archive.path}: not a predictor of moe-runtime")
    if header.get("version") != PREDICTOR_VERSION:
        raise CheckpointError(
            f"{archive.path}: predictor version {header.get('version')!r} is not known, expected "
            f"{PREDICTOR_VERSION}; train it again"
        )
    arrays = header.get("arrays")
    if header.get("predictor") not in PREDICTORS or not isinstance(arrays, dict):
        raise CheckpointError(
            f"{archive.path}: predictor {header.get('predictor')!r} is not known, expected one of "
            f"{', '.join(sorted(PREDICTORS))}"
        )
    if not set(map(str, arrays.values())) <= _DTYPES:
        raise CheckpointError(f"{archive.path}: the header announces arrays of unknown types")
    return header
