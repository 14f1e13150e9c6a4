"""Reads routing that other programs recorded; inconsistent files are a one-line error."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.config import format_bytes
from moe_runtime.errors import CheckpointError, blamed_on
from moe_runtime.files import open_regular
from moe_runtime.lab.traces.format import (
    TRACE_VERSION,
    Archive,
    Trace,
    absent_id,
    check_weights,
    expert_dtype,
    is_journal,
    read_trace,
)
from moe_runtime.lab.traces.routes import UNKNOWN_MODEL, same_model, shown_model
from moe_runtime.types import ModelSignature

_MAX_BYTES = 16 << 30
_MAX_LINE_BYTES = 64 << 20
_INTEGERS = tuple(
    np.dtype(code) for code in ("|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8")
)
_FLOATS = tuple(np.dtype(code) for code in ("<f2", "<f4", "<f8"))


def read_any_trace(path: str | os.PathLike[str], *, num_experts: int | None = None) -> Trace:
    """Reads a trace of ours, a plain ``.npz`` of expert ids, or Megatron's router trace."""
    if Path(path).suffix == ".jsonl":
        return read_megatron_trace(path, num_experts=num_experts)
    is_plain = False
    if not is_journal(path):
        # for other files `read_trace` also names the journal of an interrupted recording
        with contextlib.suppress(CheckpointError), Archive(path, max_bytes=_MAX_BYTES) as archive:
            is_plain = "ids" in archive and "header" not in archive
    if is_plain:
        return read_plain_ids(path, num_experts=num_experts)
    trace = read_trace(path)
    if num_experts not in (None, trace.signature.num_experts):
        raise ValueError(
            f"{path} says itself that layers have {trace.signature.num_experts} experts; leave out "
            f"the number of experts, {num_experts}"
        )
    return trace


def read_trace_of(
    path: str | os.PathLike[str],
    signature: ModelSignature,
    whose: str,
    *,
    num_experts: int | None = None,
) -> Trace:
    """As `read_any_trace`; refuses one that lacks choices, or is of another model than `whose`."""
    trace = read_any_trace(path, num_experts=num_experts)
    trace.require_choices(path)
    if not same_model(trace.signature, signature):
        raise CheckpointError(
            f"{path}: is a trace of {shown_model(trace.signature)}, but {whose} is of "
            f"{shown_model(signature)}"
        )
    return trace


def read_plain_ids(path: str | os.PathLike[str], *, num_experts: int | None = None) -> Trace:
    """Reads a plain ``.npz``: one decoded token after another."""
    with Archive(path, max_bytes=_MAX_BYTES) as archive:
        ids = _read_one_of(archive, "ids", _INTEGERS)
        if ids.ndim != 3 or 0 in ids.shape[1:]:
            raise CheckpointError(f"{archive.path}: ids must be [T, L, K], got shape {ids.shape}")
        num_tokens = len(ids)
        weights = _optional(archive, "probs", _FLOATS)
        token_ids = _optional(archive, "token_ids", _INTEGERS)
        offsets = _optional(archive, "offsets", _INTEGERS)
    if weights is None:
        weights = np.full(ids.shape, 1 / ids.shape[2])
    if token_ids is None:
        token_ids = np.full(num_tokens, -1)
    if offsets is None:
        offsets = np.array([0, num_tokens])
    if weights.shape != ids.shape or token_ids.shape != (num_tokens,):
        raise CheckpointError(
            f"{path}: probs must be {list(ids.shape)} and token_ids [{num_tokens}], got "
            f"{list(weights.shape)} and {list(token_ids.shape)}"
        )
    with np.errstate(over="ignore"):
        weights = weights.astype(np.float16)
    check_weights(weights, "probs", Path(path))
    starts = offsets.astype(np.int64)
    if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or starts[-1] != num_tokens:
        raise CheckpointError(f"{path}: offsets must run from 0 to {num_tokens}")
    if np.any(np.diff(starts) < 0) or np.any(token_ids < -1) or np.any(token_ids >= 2**31 - 1):
        raise CheckpointError(f"{path}: offsets must not fall and token_ids lie in [-1, 2**31 - 1)")
    requests = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return _decoded(
        Path(path), ids, weights, token_ids, requests, np.arange(num_tokens + 1), num_experts
    )


def read_megatron_trace(path: str | os.PathLike[str], *, num_experts: int | None = None) -> Trace:
    """Reads the JSON lines of Megatron-LM's router tracer."""
    steps: dict[int, dict[int, np.ndarray]] = {}
    layers: set[int] = set()
    for number, record in _json_lines(Path(path)):
        step, layer, chosen = _megatron_record(record, f"{path}, line {number}")
        if layer in steps.setdefault(step, {}):
            raise CheckpointError(f"{path}, line {number}: step {step} has layer {layer} twice")
        steps[step][layer] = chosen
        layers.add(layer)
    if not steps:
        raise CheckpointError(f"{path}: holds no records")
    order = sorted(layers)
    top_k = max(chosen.shape[1] for step in steps.values() for chosen in step.values())
    blocks = []
    for step in sorted(steps):
        sizes = {len(chosen) for chosen in steps[step].values()}
        if len(sizes) != 1:
            raise CheckpointError(
                f"{path}: the layers of step {step} have {sorted(sizes)} tokens; expected equally "
                "many in each"
            )
        block = np.full((sizes.pop(), len(order), top_k), -1, np.int64)
        for layer, chosen in steps[step].items():
            block[:, order.index(layer), : chosen.shape[1]] = chosen
        blocks.append(block)
    ids = np.concatenate(blocks)
    requests = np.concatenate([np.arange(len(block)) for block in blocks])
    starts = np.cumsum([0, *map(len, blocks)])
    weights = np.full(ids.shape, 1 / top_k)
    return _decoded(Path(path), ids, weights, np.full(len(ids), -1), requests, starts, num_experts)


def _decoded(
    path: Path,
    ids: np.ndarray,
    weights: np.ndarray,
    token_ids: np.ndarray,
    requests: np.ndarray,
    step_start: np.ndarray,
    num_experts: int | None,
) -> Trace:
    """Puts columns together; ids below zero were not recorded."""
    highest = int(ids.max(initial=0))
    num_experts = highest + 1 if num_experts is None else num_experts
    if not highest < num_experts <= 0xFFFF or ids.shape[2] > num_experts:
        raise CheckpointError(
            f"{path}: ids up to {highest}, {ids.shape[2]} for a token, do not fit {num_experts} "
            f"experts (at most {0xFFFF}); say how many there are with --num-experts"
        )
    dtype = expert_dtype(num_experts)
    order = np.lexsort((np.arange(len(requests)), requests))
    counts = np.bincount(requests, minlength=1)
    position = np.empty(len(requests), np.int32)
    position[order] = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Trace(
        version=TRACE_VERSION,
        signature=ModelSignature(
            model_type=UNKNOWN_MODEL,
            num_layers=ids.shape[1],
            num_experts=num_experts,
            top_k=ids.shape[2],
            vocab_size=int(token_ids.max(initial=0)) + 1,
        ),
        step_phase=np.ones(len(step_start) - 1, np.uint8),
        step_start=step_start.astype(np.int64),
        token_request=requests.astype(np.int32),
        token_id=token_ids.astype(np.int32),
        token_position=position,
        expert_ids=np.where(ids < 0, absent_id(dtype), ids).astype(dtype),
        gate_weights=np.where(ids < 0, 0, weights).astype(np.float16),
    )


def _read_one_of(archive: Archive, name: str, dtypes: tuple[np.dtype[Any], ...]) -> np.ndarray:
    """Reads an array whose type is one of several."""
    try:
        return archive.read(name, *dtypes)
    except CheckpointError as error:
        raise CheckpointError(
            f"{archive.path}: array {name!r} is missing, damaged, or not of type "
            f"{', '.join(map(str, dtypes))}"
        ) from error


def _optional(archive: Archive, name: str, dtypes: tuple[np.dtype[Any], ...]) -> np.ndarray | None:
    return _read_one_of(archive, name, dtypes) if name in archive else None


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    raise CheckpointError(
                        f"{path}, line {number}: longer than {format_bytes(_MAX_LINE_BYTES)}"
                    )
                if line.strip():
                    yield number, _parse_line(line, f"{path}, line {number}")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    with blamed_on(f"{place}: not JSON"):
        record = json.loads(line)
    if not isinstance(record, dict):
        raise CheckpointError(f"{place}: expected an object, got {type(record).__name__}")
    return record


def _megatron_record(record: dict[str, Any], place: str) -> tuple[int, int, np.ndarray]:
    numbers = []
    for name in ("step", "layer", "num_tokens", "topk"):
        value = record.get(name)
        if type(value) is not int or not 0 <= value < 2**31:
            raise CheckpointError(f"{place}: expected a whole number {name!r}, got {value!r}")
        numbers.append(value)
    step, layer, num_tokens, top_k = numbers
    try:
        chosen = np.array(record.get("top_indices"))
    except ValueError:
        chosen = np.array(None)
    is_whole = chosen.dtype.kind == "i" and chosen.size == num_tokens * top_k and chosen.size > 0
    if not is_whole or chosen.min() < 0 or chosen.max() > 0xFFFF:
        raise CheckpointError(
            f"{place}: top_indices must be {num_tokens} lists of {top_k} expert numbers"
        )
    return step, layer, chosen.reshape(num_tokens, top_k)
