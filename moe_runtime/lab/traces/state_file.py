"""Learned arrays in a file: one ``.npz`` with a JSON header, and nothing that is unpickled."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_runtime.errors import CheckpointError, named_failure
from moe_runtime.files import write_atomically
from moe_runtime.lab.traces.archive import Archive
from moe_runtime.types import ModelSignature

MAX_HEADER_BYTES = 1 << 16
_DTYPES = {"|u1", "<u2", "<i8", "<f4", "<f8"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateKind:
    """One kind of such files.

    Attributes:
        format: what the header calls it.
        version: of its arrays; other versions are refused.
        owner: for what people call it and for the header's entry that names who learned.
        remedy: what to do about a file of another version.
    """

    format: str
    version: int
    owner: str
    remedy: str


def write_state(
    path: str | os.PathLike[str],
    kind: StateKind,
    name: str,
    signature: ModelSignature,
    state: Mapping[str, np.ndarray],
) -> None:
    """Writes arrays; the file appears under its name when it is complete.

    Args:
        path: the file.
        kind: of file.
        name: who learned them.
        signature: the model that they are about.
        state: the arrays.

    Raises:
        CheckpointError: the file cannot be written.
    """
    arrays = {each: np.ascontiguousarray(array) for each, array in state.items()}
    header = {
        "format": kind.format,
        "version": kind.version,
        kind.owner: name,
        "signature": dataclasses.asdict(signature),
        "arrays": {each: array.dtype.str for each, array in arrays.items()},
    }
    header_bytes = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with named_failure(path, kind.owner), write_atomically(path) as file:
        np.savez_compressed(file, allow_pickle=False, header=header_bytes, **arrays)


def read_header(archive: Archive, kind: StateKind) -> dict[str, Any]:
    """The header of a file of this kind.

    Raises:
        CheckpointError: it is none, of another version, or announces arrays of unknown types.
    """
    raw = archive.read("header", np.dtype("|u1"), max_bytes=MAX_HEADER_BYTES)
    try:
        header = json.loads(raw.tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{archive.path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict) or header.get("format") != kind.format:
        raise CheckpointError(f"{archive.path}: not a {kind.owner} of moe-runtime")
    if header.get("version") != kind.version:
        raise CheckpointError(
            f"{archive.path}: {kind.owner} version {header.get('version')!r} is not known, "
            f"expected {kind.version}; {kind.remedy}"
        )
    arrays = header.get("arrays")
    if not isinstance(arrays, dict) or not set(map(str, arrays.values())) <= _DTYPES:
        raise CheckpointError(f"{archive.path}: the header announces arrays of unknown types")
    return header


def read_arrays(archive: Archive, header: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that a header announces.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    return {name: archive.read(name, np.dtype(dtype)) for name, dtype in header["arrays"].items()}
