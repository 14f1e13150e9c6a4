"""The trace file: one ``.npz`` without pickles, described array by array in docs/trace-format.md.

The journal of a recording holds blocks of finished steps, so that a crash costs only the last one.
A block is a whole trace file with the steps since the block before. Its length (8 bytes) and its
CRC-32 (4 bytes), both little-endian, precede it.

Legend: S steps, T tokens over all steps, L Mixture-of-Experts layers, K experts a token visits.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from moe_runtime.config import format_bytes
from moe_runtime.digests import ZIP_DAMAGE
from moe_runtime.errors import CheckpointError, blamed_on, named_failure
from moe_runtime.files import OutputFile, draft_of, open_regular, write_atomically
from moe_runtime.types import ModelSignature

TRACE_FORMAT = "moe-runtime-trace"
TRACE_VERSION = 1
TRAINING_TRACE_VERSION = 2
"""Of traces of training, whose forward passes belong to optimizer steps."""
PHASES = ("prefill", "decode", "train")
"""Names of the phases; the file stores a phase as its index here. The last is of version 2."""

_MAX_HEADER_BYTES = 1 << 16
_DEFAULT_MAX_BYTES = 16 << 30
_MAGIC = b"MOETRACE"
_FRAME = struct.Struct("<QI")
_MAX_BLOCK_BYTES = 1 << 30
_MAX_NPY_HEADER_BYTES = 4096


class Archive:
    """One open ``.npz`` file, which may be damaged or hostile.

    ``numpy.load`` allocates any size that a member's header announces. Here the announced type must
    be the expected one, and the announced shape must account for every byte of the member, before
    anything is allocated; nothing is unpickled. ``content`` holds the bytes if ``path`` only names
    them.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int, content: BinaryIO | None = None
    ) -> None:
        self.path = Path(path)
        with contextlib.ExitStack() as opened:
            try:
                if content is None:
                    content = opened.enter_context(open_regular(self.path))
                self._zip = opened.enter_context(zipfile.ZipFile(content))
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            except ZIP_DAMAGE as error:
                raise CheckpointError(f"{self.path}: not an .npz file: {error}") from error
            total_bytes = sum(member.file_size for member in self._zip.infolist())
            if total_bytes > max_bytes:
                raise CheckpointError(
                    f"{self.path}: holds {format_bytes(total_bytes)} when unpacked, expected at "
                    f"most {format_bytes(max_bytes)}"
                )
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self._zip.namelist()

    def read(self, name: str, *dtypes: np.dtype[Any], max_bytes: int | None = None) -> np.ndarray:
        """Reads one array, which must be C-contiguous and exactly of a given type."""
        try:
            member = self._zip.getinfo(f"{name}.npy")
        except KeyError:
            raise CheckpointError(f"{self.path}: has no array named {name!r}") from None
        if max_bytes is not None and member.file_size > max_bytes:
            raise CheckpointError(
                f"{self.path}: array {name!r} has {member.file_size} bytes, "
                f"expected at most {max_bytes}"
            )
        try:
            return self._read_member(member, dtypes)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
        except ZIP_DAMAGE as error:
            raise CheckpointError(f"{self.path}: array {name!r} is damaged: {error}") from error

    def read_json(self, name: str, *, max_bytes: int, what: str) -> Any:
        """Reads an array of bytes that are JSON."""
        raw = self.read(name, np.dtype("|u1"), max_bytes=max_bytes)
        with blamed_on(f"{self.path}: {what} is not JSON"):
            return json.loads(raw.tobytes())

    def _read_member(
        self, member: zipfile.ZipInfo, dtypes: tuple[np.dtype[Any], ...]
    ) -> np.ndarray:
        with self._zip.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"npy version {version}, expected (1, 0)")
            shape, fortran_order, found = np.lib.format.read_array_header_1_0(
                file, max_header_size=_MAX_NPY_HEADER_BYTES
            )
            if found not in dtypes or (fortran_order and len(shape) > 1):
                expected = ", ".join(map(str, dtypes))
                raise ValueError(f"expected {expected} in C order, got {found}")
            if any(size < 0 for size in shape):
                raise ValueError(f"negative size in shape {shape}")
            num_bytes = math.prod(shape) * found.itemsize
            if num_bytes != member.file_size - file.tell():
                raise ValueError(
                    f"shape {shape} needs {num_bytes} bytes, "
                    f"the file has {member.file_size - file.tell()}"
                )
            # One byte more than announced makes zipfile verify the member's checksum.
            data = file.read(num_bytes + 1)
        if len(data) != num_bytes:
            raise ValueError(f"expected {num_bytes} bytes of data, got {len(data)}")
        return np.frombuffer(data, dtype=found).reshape(shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Every routing event of a recording, as columns.

    A step is one forward pass; its tokens are the rows ``step_start[s]:step_start[s + 1]`` of all
    token columns. An entry of ``expert_ids`` equal to ``absent`` was not recorded; its weight is 0.

    Attributes:
        version: version of the file format.
        step_phase: ``[S]`` uint8, index into ``PHASES``.
        step_start: ``[S + 1]`` int64, first token of each step, then T.
        token_request: ``[T]`` int32, number of the request (sequence) that the token belongs to.
        token_id: ``[T]`` int32, id in the vocabulary; -1 where the caller had none.
        token_position: ``[T]`` int32, position in its sequence.
        expert_ids: ``[T, L, K]`` uint8 or uint16, experts in the gate's order.
        gate_weights: ``[T, L, K]`` float16, what the experts' outputs were multiplied by.
        step_update: ``[S]`` int32, number of the optimizer step that a forward pass is part of, the
            first is 1; None where nothing is trained. Forward passes of the same number are the
            micro-batches of one step.
        expert_bytes: of the largest expert of the model; None where the file does not say.
    """

    version: int
    signature: ModelSignature
    step_phase: np.ndarray
    step_start: np.ndarray
    token_request: np.ndarray
    token_id: np.ndarray
    token_position: np.ndarray
    expert_ids: np.ndarray
    gate_weights: np.ndarray
    step_update: np.ndarray | None = None
    expert_bytes: int | None = None

    @property
    def num_steps(self) -> int:
        return len(self.step_phase)

    @property
    def num_tokens(self) -> int:
        return len(self.token_id)

    @property
    def absent(self) -> int:
        """The expert id that means "not recorded"."""
        return absent_id(self.expert_ids.dtype)

    def tokens_of(self, step: int) -> slice:
        """The rows of one step in all token columns."""
        return slice(int(self.step_start[step]), int(self.step_start[step + 1]))

    def require_choices(self, path: str | os.PathLike[str]) -> None:
        """Raises `CheckpointError` for a trace in which no token visits an expert."""
        if not self.num_tokens:
            raise CheckpointError(f"{path}: the trace holds no tokens")
        if not (self.expert_ids != self.absent).any():
            raise CheckpointError(
                f"{path}: the trace holds {self.num_tokens} tokens, but no expert of any of them "
                "was recorded"
            )

    def record(self, layer: int, expert_ids: np.ndarray, weights: np.ndarray) -> None:
        """Notes where a layer sent all tokens.

        A choice of no expert, and one whose weight is no finite number from 0 on (a model that
        diverged), was not recorded.

        Args:
            layer: index among the Mixture-of-Experts layers.
            expert_ids: ``[T, K]``, or fewer columns; -1 for a choice of no expert.
            weights: of the same shape.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            gates = weights.astype(np.float16)
            is_choice = (expert_ids >= 0) & (gates >= 0) & (gates < np.inf)
        width = expert_ids.shape[1]
        self.expert_ids[:, layer, :width] = np.where(is_choice, expert_ids, self.absent)
        self.gate_weights[:, layer, :width] = np.where(is_choice, gates, np.float16(0))

    def steps(self, first: int, stop: int) -> "Trace":
        """The steps from ``first`` up to, not including, ``stop``, as a trace of their own."""
        rows = slice(int(self.step_start[first]), int(self.step_start[stop]))
        return dataclasses.replace(
            self,
            step_phase=self.step_phase[first:stop],
            step_start=self.step_start[first : stop + 1] - self.step_start[first],
            token_request=self.token_request[rows],
            token_id=self.token_id[rows],
            token_position=self.token_position[rows],
            expert_ids=self.expert_ids[rows],
            gate_weights=self.gate_weights[rows],
            step_update=None if self.step_update is None else self.step_update[first:stop],
        )

    def accesses(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Requests to an expert store, in order of time.

        Yields:
            ``(step, layer, experts)``: the distinct experts that this layer used in this step,
            ascending. Layers that recorded nothing in a step are left out.
        """
        absent = self.absent
        for step in range(self.num_steps):
            block = self.expert_ids[self.tokens_of(step)]
            for layer in range(self.signature.num_layers):
                experts = np.unique(block[:, layer])
                experts = experts[experts != absent]
                if experts.size:
                    yield step, layer, experts


def expert_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest type that holds every expert id and one value more, for "not recorded"."""
    return np.dtype("|u1") if num_experts <= 0xFF else np.dtype("<u2")


def absent_id(dtype: np.dtype[Any]) -> int:
    """The value that means "not recorded" in a column of expert ids."""
    return int(np.iinfo(dtype).max)


def one_step(
    signature: ModelSignature,
    *,
    phase: str,
    requests: np.ndarray,
    token_ids: np.ndarray,
    positions: np.ndarray,
    update: int | None = None,
    expert_bytes: int | None = None,
) -> Trace:
    """A step of T tokens without recorded layers yet; ``update`` as ``Trace.step_update``."""
    dtype = expert_dtype(signature.num_experts)
    block = (len(token_ids), signature.num_layers, signature.top_k)
    return Trace(
        version=TRACE_VERSION if update is None else TRAINING_TRACE_VERSION,
        signature=signature,
        step_phase=np.array([PHASES.index(phase)], np.uint8),
        step_start=np.array([0, len(token_ids)], np.int64),
        token_request=requests.astype(np.int32),
        token_id=token_ids.astype(np.int32),
        token_position=positions.astype(np.int32),
        expert_ids=np.full(block, absent_id(dtype), dtype),
        gate_weights=np.zeros(block, np.float16),
        step_update=None if update is None else np.array([update], np.int32),
        expert_bytes=expert_bytes,
    )


def join_traces(parts: Sequence[Trace]) -> Trace:
    """The steps of one or more traces of one model and version, one after another."""
    lengths = np.concatenate([np.diff(part.step_start) for part in parts])
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in _column_specs(parts[0].signature, parts[0].version)
        if name != "step_start"
    }
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return dataclasses.replace(parts[0], step_start=starts, **columns)


def check_weights(weights: np.ndarray, name: str, path: Path) -> None:
    """Raises `CheckpointError` where a gate weight ``[T, L, K]`` is negative or not finite."""
    wrong = np.argwhere(~((weights >= 0) & (weights < np.inf)))
    if len(wrong):
        token, layer, choice = wrong[0].tolist()
        raise CheckpointError(
            f"{path}: {name} must be finite numbers from 0 on, got {weights[token, layer, choice]} "
            f"at token {token}, layer {layer}, choice {choice}"
        )


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Writes a trace; the file appears under its name only when it is complete.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with named_failure(path, "trace"), write_atomically(path) as file:
        save_columns(file, trace, compressed=True)


def save_columns(file: BinaryIO, trace: Trace, *, compressed: bool) -> None:
    """Writes the arrays of a trace as an ``.npz`` into an open file."""
    signature = dataclasses.asdict(trace.signature)
    header = {"format": TRACE_FORMAT, "version": trace.version, "signature": signature}
    if trace.expert_bytes is not None:
        header["expert_bytes"] = trace.expert_bytes
    columns = {name: getattr(trace, name) for name in _column_specs(trace.signature, trace.version)}
    header_bytes = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    save = np.savez_compressed if compressed else np.savez
    save(file, allow_pickle=False, header=header_bytes, **columns)


def read_trace(path: str | os.PathLike[str], *, max_bytes: int = _DEFAULT_MAX_BYTES) -> Trace:
    """Reads and verifies a trace.

    Args:
        path: a file that ``TraceRecorder`` wrote, or the journal that an interrupted one left.
        max_bytes: largest size of all columns together, unpacked, that is accepted.

    Raises:
        CheckpointError: the file is missing, unreadable, not a trace, of another version, larger
            than ``max_bytes``, or its columns contradict each other.
    """
    if is_journal(path):
        return _read_journal(path, max_bytes=max_bytes)
    try:
        return _read_columns(None, path, max_bytes=max_bytes)
    except CheckpointError as error:
        left = draft_of(path)
        if Path(path).exists() or not is_journal(left):
            raise
        raise CheckpointError(f"{error}; an interrupted recording left {left}") from error


class JournalWriter:
    """Appends blocks to a new file next to a trace; no other process can write it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with named_failure(path, "trace"):
            self._output = OutputFile(path, is_draft=True)

    def append(self, data: bytes, at: int) -> int:
        """Hands a block to the operating system; returns where the journal ends now.

        ``at`` is the result of the call for the block before, 0 for the first. A later call
        overwrites the part that a failed one has written.
        """
        frame = _FRAME.pack(len(data), zlib.crc32(data)) + data
        with named_failure(self._path, "trace"):
            return self._output.write_at(at, frame if at else _MAGIC + frame)

    def remove(self) -> None:
        self._output.discard()


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a journal does; False also if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def whole_blocks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The blocks of a journal up to the first that is not whole."""
    with Path(path).open("rb") as file:
        file.seek(len(_MAGIC))
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(frame)
            if length > _MAX_BLOCK_BYTES:
                return
            data = file.read(length)
            if len(data) < length or zlib.crc32(data) != checksum:
                return
            yield data


def _read_journal(path: str | os.PathLike[str], *, max_bytes: int) -> Trace:
    """Joins the blocks of an interrupted recording, up to the first that is not whole."""
    blocks: list[Trace] = []
    size = os.stat(path).st_size
    if size > max_bytes:
        raise CheckpointError(
            f"{path}: holds {format_bytes(size)}, expected at most {format_bytes(max_bytes)}"
        )
    for number, data in enumerate(whole_blocks(path)):
        content, name = io.BytesIO(data), f"{path}, block {number}"
        blocks.append(_read_columns(content, name, max_bytes=max_bytes))
        if (blocks[-1].signature, blocks[-1].version) != (blocks[0].signature, blocks[0].version):
            raise CheckpointError(
                f"{name}: is of {blocks[-1].signature}, but the first block of "
                f"{blocks[0].signature}"
            )
    if not blocks:
        raise CheckpointError(f"{path}: the recording was interrupted before a block was whole")
    return join_traces(blocks)


def _read_columns(
    content: BinaryIO | None, path: str | os.PathLike[str], *, max_bytes: int
) -> Trace:
    with Archive(path, max_bytes=max_bytes, content=content) as archive:
        version, signature, expert_bytes = _read_header(archive)
        specs = _column_specs(signature, version)
        columns = {name: archive.read(name, dtype) for name, (dtype, _) in specs.items()}
    sizes = {"L": signature.num_layers, "K": signature.top_k}
    sizes |= {"S": columns["step_phase"].size, "T": columns["token_id"].size}
    for name, (_, axes) in specs.items():
        expected = tuple(sizes[axis] if axis != "S+1" else sizes["S"] + 1 for axis in axes)
        if columns[name].shape != expected:
            raise CheckpointError(
                f"{archive.path}: column {name} has shape {columns[name].shape}, "
                f"expected {list(axes)} = {expected}"
            )
    trace = Trace(version=version, signature=signature, expert_bytes=expert_bytes, **columns)
    _check_values(trace, archive.path)
    return trace


def _column_specs(
    signature: ModelSignature, version: int
) -> dict[str, tuple[np.dtype[Any], tuple[str, ...]]]:
    """Type and axes of every column, in the order of the file."""
    updates = {"step_update": (np.dtype("<i4"), ("S",))}
    return {
        "step_phase": (np.dtype("|u1"), ("S",)),
        "step_start": (np.dtype("<i8"), ("S+1",)),
        "token_request": (np.dtype("<i4"), ("T",)),
        "token_id": (np.dtype("<i4"), ("T",)),
        "token_position": (np.dtype("<i4"), ("T",)),
        "expert_ids": (expert_dtype(signature.num_experts), ("T", "L", "K")),
        "gate_weights": (np.dtype("<f2"), ("T", "L", "K")),
        **(updates if version == TRAINING_TRACE_VERSION else {}),
    }


def _read_header(archive: Archive) -> tuple[int, ModelSignature, int | None]:
    """The version, what was recorded, and the bytes of an expert."""
    what = "the trace's header"
    header = archive.read_json("header", max_bytes=_MAX_HEADER_BYTES, what=what)
    if not isinstance(header, dict) or header.get("format") != TRACE_FORMAT:
        raise CheckpointError(f"{archive.path}: not a routing trace of moe-runtime")
    version = header.get("version")
    if type(version) is not int or version not in (TRACE_VERSION, TRAINING_TRACE_VERSION):
        raise CheckpointError(
            f"{archive.path}: trace version {version!r} is not known, expected {TRACE_VERSION} or "
            f"{TRAINING_TRACE_VERSION}; read it with the moe-runtime that wrote it, or record it "
            "again"
        )
    size = header.get("expert_bytes")
    if size is not None and (type(size) is not int or not 0 < size < 2**63):
        raise CheckpointError(
            f"{archive.path}: expert_bytes must be a positive number, found {size!r}"
        )
    return version, parse_signature(header.get("signature"), archive.path), size


def parse_signature(value: object, path: Path) -> ModelSignature:
    """Reads a model's signature out of a header; raises `CheckpointError` for an impossible one."""
    try:
        signature = ModelSignature.parse(value)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if signature.num_experts > 0xFFFF or signature.top_k > signature.num_experts:
        raise CheckpointError(
            f"{path}: the signature has {signature.num_experts} experts, "
            f"top {signature.top_k}; expected at most {0xFFFF} experts and no larger top"
        )
    return signature


def _check_values(trace: Trace, path: Path) -> None:
    """Verifies that the columns are consistent."""
    starts = trace.step_start
    known = trace.expert_ids[trace.expert_ids != trace.absent]
    num_phases = len(PHASES) - (trace.step_update is None)
    updates = np.ones(0, np.int32) if trace.step_update is None else trace.step_update
    problems = {
        "step_start must rise from 0 to the number of tokens": np.concatenate(
            [starts[:1] != 0, starts[-1:] != trace.num_tokens, starts[1:] < starts[:-1]]
        ),
        f"step_phase must be below {num_phases}": trace.step_phase >= num_phases,
        "step_update must rise from at least 1": np.diff(updates, prepend=1) < 0,
        "token_request must not be negative": trace.token_request < 0,
        "token_position must not be negative": trace.token_position < 0,
        "token_id must lie in [-1, vocab_size)": (trace.token_id < -1)
        | (trace.token_id >= trace.signature.vocab_size),
        "expert_ids must be below num_experts": known >= trace.signature.num_experts,
    }
    for expectation, violations in problems.items():
        if violations.any():
            raise CheckpointError(f"{path}: the trace is damaged: {expectation}")
    check_weights(trace.gate_weights, "gate_weights", path)
