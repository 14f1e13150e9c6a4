"""Where every tensor of a Hugging Face checkpoint lies, without reading a single weight.

A safetensors file is eight bytes (the header's length, little-endian), a JSON header that names
each tensor's dtype, shape and byte range, and the bytes themselves. Only headers are read here, and
a header is believed only when everything in it agrees with the rest and with the file's size.

Whatever the ``safetensors`` package refuses is refused here too. What it lets pass and this reader
refuses, because no writer produces it and it hides mistakes: a key that occurs twice in an object;
a tensor written as a list instead of an object, or a dtype as an object instead of a string; and,
so that a hostile header cannot exhaust memory or time, numbers of more than 1000 characters, fields
unknown to the format that nest more than 100 deep, and headers that are mostly brackets.
By hand, because ``safetensors.safe_open`` gives no byte ranges, and ``huggingface_hub``, whose
parser gives them, checks none of this.

Format: https://github.com/huggingface/safetensors#format
"""

import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import torch

from moe_runtime.checkpoints.strict_json import (
    MAX_UINT64,
    clipped,
    nests_deeper,
    one_line,
    parse_object,
)
from moe_runtime.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Longest header, and longest index, that is read; the limit of the format's own reader."""

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, for every dtype that the format knows."""

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types of safetensors files that dense weights may have."""

SINGLE_FILE_NAME = "model.safetensors"
INDEX_FILE_NAME = "model.safetensors.index.json"
PACKED_INDEX_NAME = "packed.safetensors.index.json"
"""The index of a packed checkpoint: who cannot read it finds no weights, and makes none up."""

_LENGTH_BYTES = 8
_MAX_EXTRA_DEPTH = 100
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_TENSOR_FIELDS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint and the bytes that hold it.

    Attributes:
        name: the tensor's key in the checkpoint.
        file: the file it lies in, as reached from the checkpoint's folder (links not resolved).
        dtype: element type by its safetensors name, such as ``"BF16"``; a key of ``DTYPE_BITS``.
        shape: sizes of the dimensions, row-major; empty for a scalar.
        offset: first byte, counted from the beginning of the file.
        num_bytes: length in bytes; the tensor is contiguous.
        convert: makes the model's values of those in the file; None where they are these.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    convert: Callable[[Any], Any] | None = None


class _Span(NamedTuple):
    """A tensor's byte range within the data part of its file; sorts by place."""

    begin: int
    end: int
    name: str


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Reads and verifies the header of one safetensors file.

    Reads the header only; O(n log n) in the number of tensors, memory proportional to the header.

    Args:
        path: the file; a link is followed.

    Returns:
        The tensors by name, in the order of their bytes.

    Raises:
        CheckpointError: the file cannot be read, or header and file are not consistent.
    """
    raw, file_bytes = _read_header_bytes(path)
    header = _parse_json(raw, path, "a header")
    _check_metadata(header.pop("__metadata__", None), path)
    data_begin = _LENGTH_BYTES + len(raw)
    entries: list[tuple[_Span, TensorEntry]] = []
    for name, fields in header.items():
        dtype, shape, span = _read_tensor(name, fields, path)
        place = data_begin + span.begin
        entry = TensorEntry(name, path, dtype, shape, place, span.end - span.begin)
        entries.append((span, entry))
    entries.sort(key=lambda pair: pair[0])
    _check_coverage([span for span, _ in entries], file_bytes - data_begin, path)
    return {entry.name: entry for _, entry in entries}


def read_checkpoint_index(
    folder: Path, index_name: str = INDEX_FILE_NAME
) -> dict[str, TensorEntry]:
    """Finds every tensor of the checkpoint in a folder, whether in one file or in shards.

    ``model.safetensors`` is preferred to ``model.safetensors.index.json`` where both exist, and
    tensors of a shard that the index does not list are included: as ``transformers`` does. If
    several shards have a tensor, the index decides; the last shard wins if the index names none of
    them. A tensor that no shard has is reported when the model needs it.

    Args:
        folder: a folder in Hugging Face layout; files may be links, as in the hub's cache.
        index_name: of the file that says where tensors are, where there are shards.

    Returns:
        The tensors by name, shard after shard in the order of the shards' names.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not complete and consistent.
    """
    if not _is_directory(folder):
        found = "a file" if _exists(folder) else "nothing of that name"
        _refuse(folder, "the folder of a checkpoint", found)
    index_path = folder / index_name
    if index_name == INDEX_FILE_NAME and _exists(folder / SINGLE_FILE_NAME):
        return read_header(folder / SINGLE_FILE_NAME)
    if not _exists(index_path):
        _refuse_without_safetensors(folder, index_name)
    return _read_shards(folder, read_weight_map(index_path), index_path)


def _read_header_bytes(path: Path) -> tuple[bytes, int]:
    file_bytes = _regular_file_bytes(path)
    if file_bytes < _LENGTH_BYTES:
        _refuse(path, f"at least {_LENGTH_BYTES} bytes of safetensors", f"{file_bytes} bytes")
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            _check_header_length(header_bytes, file_bytes, path)
            raw = file.read(header_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(raw) != header_bytes:
        _refuse(path, f"a header of {header_bytes} bytes", f"the end of the file after {len(raw)}")
    return raw, file_bytes


def _check_header_length(header_bytes: int, file_bytes: int, path: Path) -> None:
    if header_bytes > MAX_HEADER_BYTES:
        expected = f"a header of at most {MAX_HEADER_BYTES} bytes"
        _refuse(path, expected, f"a header length of {header_bytes}; this is no safetensors file")
    if header_bytes > file_bytes - _LENGTH_BYTES:
        found = f"a file of {file_bytes} bytes; it is truncated or damaged"
        _refuse(path, f"a header of {header_bytes} bytes", found)


def _check_metadata(metadata: object, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        _refuse(path, "__metadata__ to be an object of strings", clipped(metadata))
    for key, value in metadata.items():
        if not isinstance(value, str):
            _refuse(path, f"__metadata__[{clipped(key)}] to be a string", clipped(value))


def _read_tensor(name: str, fields: object, path: Path) -> tuple[str, tuple[int, ...], _Span]:
    if not isinstance(fields, dict):
        _refuse_tensor(path, name, "be an object", clipped(fields))
    for field in _TENSOR_FIELDS:
        if field not in fields:
            _refuse_tensor(path, name, f"have a {field}", f"only {clipped(sorted(fields))}")
    if len(fields) > len(_TENSOR_FIELDS) and nests_deeper(fields.values(), _MAX_EXTRA_DEPTH):
        _refuse_tensor(path, name, "have plain fields", f"one over {_MAX_EXTRA_DEPTH} deep")
    dtype, shape, offsets = (fields[field] for field in _TENSOR_FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        expected = f"have one of the dtypes {', '.join(DTYPE_BITS)}"
        _refuse_tensor(path, name, expected, clipped(dtype))
    if not _is_sizes(shape):
        expected = "have a shape of integers from 0 to 2**64-1"
        _refuse_tensor(path, name, expected, clipped(shape))
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse_tensor(path, name, "have data_offsets [begin, end]", clipped(offsets))
    begin, end = offsets
    num_bytes = _tensor_bytes(dtype, shape)
    if num_bytes != end - begin:
        size = "a whole number of bytes below 2**61" if num_bytes is None else f"{num_bytes} bytes"
        expected = f"take {size}, having dtype {dtype} and shape {clipped(shape)}"
        _refuse_tensor(
            path, name, expected, f"data_offsets {clipped(offsets)}: {end - begin} bytes"
        )
    return dtype, tuple(shape), _Span(begin, end, name)


def _tensor_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Returns the size in bytes, or None where 64 bits cannot count it or it ends within a byte.

    Multiplies in the order of the dimensions, so that ``[0, 2**63, 4]`` has no bytes and
    ``[2**63, 4, 0]`` overflows: the format's own reader draws the line there.
    """
    num_elements = 1
    for size in shape:
        num_elements *= size
        if num_elements > MAX_UINT64:
            return None
    num_bits = num_elements * DTYPE_BITS[dtype]
    if num_bits > MAX_UINT64 or num_bits % 8:
        return None
    return num_bits // 8


def _check_coverage(spans: Iterable[_Span], data_bytes: int, path: Path) -> None:
    """Verifies that the spans, sorted, tile the file's data from its first byte to its last."""
    end = 0
    for span in spans:
        if span.begin != end:
            fault = "tensors overlap" if span.begin < end else "bytes before it belong to no tensor"
            expected = f"begin at data byte {end}, where the one before it ends"
            _refuse_tensor(path, span.name, expected, f"data byte {span.begin}: {fault}")
        end = span.end
    if end != data_bytes:
        short = data_bytes < end
        fault = "the file is truncated, fetch it again" if short else "the rest is no tensor's"
        _refuse(path, f"{end} bytes of tensors after the header", f"{data_bytes}; {fault}")


def read_weight_map(index_path: Path) -> dict[str, PurePosixPath]:
    """Reads which shard holds which tensor, as paths relative to the index's folder.

    Raises:
        CheckpointError: the file is no index, or names what is no shard in its folder.
    """
    index_bytes = _regular_file_bytes(index_path)
    if index_bytes > MAX_HEADER_BYTES:
        _refuse(index_path, f"an index of at most {MAX_HEADER_BYTES} bytes", f"{index_bytes} bytes")
    try:
        with index_path.open("rb") as file:
            raw = file.read(index_bytes)
    except OSError as error:
        raise _unreadable(index_path, error) from error
    weight_map = _parse_json(raw, index_path, "an index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = clipped(weight_map)
        _refuse(index_path, "a weight_map object that names the shard of each tensor", found)
    return {name: _shard_path(shard, index_path) for name, shard in weight_map.items()}


def _shard_path(shard: object, index_path: Path) -> PurePosixPath:
    """Judges a shard by its name: the hub's cache is made of links that lead out of the folder."""
    shown = clipped(shard)
    if not isinstance(shard, str) or not shard.endswith(".safetensors"):
        _refuse(index_path, "shards named *.safetensors", shown)
    path = PurePosixPath(shard)
    if path.is_absolute() or ".." in path.parts or set(shard) & set("\\:\0"):
        _refuse(index_path, "shards inside the checkpoint's folder", shown)
    return path


def _read_shards(
    folder: Path, weight_map: dict[str, PurePosixPath], index_path: Path
) -> dict[str, TensorEntry]:
    files = {shard: folder / shard for shard in sorted(set(weight_map.values()))}
    missing = [str(shard) for shard, file in files.items() if not _exists(file)]
    if missing:
        found = f"{len(missing)} missing: {clipped(missing)}; fetch the checkpoint again"
        _refuse(index_path, f"its {len(files)} shards in the same folder", found)
    entries: dict[str, TensorEntry] = {}
    for file in files.values():
        for name, entry in read_header(file).items():
            shard = weight_map.get(name)
            if name not in entries or shard is None or entries[name].file != files[shard]:
                entries[name] = entry
    return entries


def _refuse_without_safetensors(folder: Path, index_name: str) -> NoReturn:
    if index_name != INDEX_FILE_NAME:
        _refuse(folder, index_name, "nothing of that name; pack the checkpoint again")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from error
    found = "neither"
    loose = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if Path(name).suffix in _PICKLE_SUFFIXES]
    if loose:
        found = f"{clipped(loose)} without an index; add it, or rename a single file"
    elif pickles:
        found = (
            f"{clipped(pickles)}, refused because reading them means unpickling, which can run any "
            "code; convert where you trust them: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER)"
        )
    _refuse(folder, f"{SINGLE_FILE_NAME} or {INDEX_FILE_NAME}", found)


def _parse_json(raw: bytes, path: Path, what: str) -> dict[str, Any]:
    try:
        return parse_object(raw)
    except ValueError as error:
        found = one_line(str(error))
        raise _refusal(path, f"{what} that is a JSON object in UTF-8", found) from error


def _is_sizes(value: object) -> bool:
    # A bool is an int to isinstance, but no size.
    return isinstance(value, list) and all(type(x) is int and 0 <= x <= MAX_UINT64 for x in value)


def _regular_file_bytes(path: Path) -> int:
    """Returns the size; refuses pipes and devices, which block or never end, before opening."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        found = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        _refuse(path, "a regular file", found)
    return status.st_size


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _exists(path: Path) -> bool:
    """Says whether there is an entry of that name, a link that leads nowhere included."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return True


def _unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        reason = "a link that leads nowhere; fetch the checkpoint again"
    else:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _refusal(path, "to read it", one_line(reason))


def _refuse(path: Path, expected: str, found: str) -> NoReturn:
    raise _refusal(path, expected, found)


def _refuse_tensor(path: Path, name: str, expected: str, found: str) -> NoReturn:
    _refuse(path, f"tensor {clipped(name)} to {expected}", found)


def _refusal(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(f"{_shown(path)}: expected {expected}, found {found}")


def _shown(path: Path) -> str:
    return one_line(str(path))
