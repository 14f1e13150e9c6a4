"""Safetensors files: where every tensor of a checkpoint lies, and headers of new files.

``safetensors.safe_open`` verifies a file; the byte ranges, which it does not give, are taken from
the header. Refused here as well: a key that occurs twice in an object, a tensor written as a list,
a dtype as an object, and what ``strict_json`` refuses.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from moe_runtime.checkpoints.strict_json import clipped, one_line, parse_object
from moe_runtime.errors import CheckpointError
from moe_runtime.files import open_regular, read_bounded

COPY_BYTES = 2**24
MAX_HEADER_BYTES = 100_000_000
"""The longest header and index that is read, as in the official reader."""

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
"""The index of packed checkpoints; other readers do not know it and find no weights."""

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint and the bytes that hold it."""

    name: str  # the tensor's key in the checkpoint
    file: Path  # the file, as reached from the checkpoint's folder; links are not resolved
    dtype: str  # element type by its safetensors name, such as ``"BF16"``
    shape: tuple[int, ...]  # sizes of the dimensions, row-major; empty for a scalar
    offset: int  # first byte, counted from the beginning of the file
    num_bytes: int  # length in bytes; the tensor is contiguous
    convert: Callable[[Any], Any] | None = None  # values of the file to the model's


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Verifies a safetensors file; returns its tensors by name, in the order of their bytes."""
    try:
        with open_regular(path) as file, safe_open(path, framework="np"):
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length)
    except SafetensorError as error:
        fault = f"{one_line(str(error))}; the file is truncated or damaged, fetch it again"
        _refuse(path, "a safetensors file", fault)
    except (OSError, ValueError) as error:
        _refuse_unreadable(path, error)
    header = _parse_json(raw, path, "a header")
    header.pop("__metadata__", None)
    entries: list[TensorEntry] = []
    for name, fields in header.items():
        if not isinstance(fields, dict) or not isinstance(dtype := fields["dtype"], str):
            expected = f"tensor {clipped(name)} to be an object with a dtype"
            _refuse(path, expected, clipped(fields))
        begin, end = fields["data_offsets"]
        shape = tuple(fields["shape"])
        entries.append(TensorEntry(name, path, dtype, shape, 8 + length + begin, end - begin))
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    return {entry.name: entry for entry in entries}


def header_of(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], multiple_of: int = 8
) -> tuple[dict[str, int], bytes]:
    """The offset of each tensor after the header of a new file, and the header's bytes."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, dtype, shape, size in tensors:
        offsets[name] = end
        fields[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % multiple_of)
    return offsets, len(text).to_bytes(8, "little") + text


def widest_first(tensors: Iterable[TensorEntry]) -> tuple[dict[str, int], bytes, int]:
    """Lays tensors out with the widest elements first, so that all are aligned: as `header_of`, and
    the total bytes."""
    ordered = sorted(tensors, key=lambda one: -(one.num_bytes // max(1, math.prod(one.shape))))
    described = [(one.name, one.dtype, one.shape, one.num_bytes) for one in ordered]
    return *header_of(described), sum(one.num_bytes for one in ordered)


def write_index(path: Path, file_of: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    index = {"metadata": dict(metadata), "weight_map": dict(file_of)}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_at(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while len(view):
        done = os.pwrite(descriptor, view[:COPY_BYTES], offset)
        view, offset = view[done:], offset + done


def copy_tensor(entry: TensorEntry, descriptor: int, offset: int) -> None:
    """Copies the bytes of a tensor."""
    with entry.file.open("rb") as file:
        for begin in range(0, entry.num_bytes, COPY_BYTES):
            file.seek(entry.offset + begin)
            part = file.read(wanted := min(COPY_BYTES, entry.num_bytes - begin))
            if len(part) < wanted:
                _refuse(entry.file, f"all of {entry.name}", "its end; the file has changed")
            write_at(descriptor, part, offset + begin)


def read_checkpoint_index(
    folder: Path, index_name: str = INDEX_FILE_NAME
) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in a folder, in one file or in shards.

    As in ``transformers``, ``model.safetensors`` is preferred to an index, and tensors that the
    index does not list are included. If several shards have a tensor, the index decides, else the
    last one.
    """
    if not folder.is_dir():
        found = "a file" if os.path.lexists(folder) else "nothing of that name"
        _refuse(folder, "the folder of a checkpoint", found)
    index_path = folder / index_name
    if index_name == INDEX_FILE_NAME and os.path.lexists(folder / SINGLE_FILE_NAME):
        return read_header(folder / SINGLE_FILE_NAME)
    if not os.path.lexists(index_path):
        _refuse_without_safetensors(folder, index_name)
    return _read_shards(folder, read_weight_map(index_path), index_path)


def read_weight_map(index_path: Path) -> dict[str, PurePosixPath]:
    """The shard of each tensor, as paths relative to the index's folder."""
    try:
        raw = read_bounded(index_path, max_bytes=MAX_HEADER_BYTES)
    except (OSError, ValueError) as error:
        _refuse_unreadable(index_path, error)
    weight_map = _parse_json(raw, index_path, "an index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = clipped(weight_map)
        _refuse(index_path, "a weight_map object that names the shard of each tensor", found)
    return {name: _shard_path(shard, index_path) for name, shard in weight_map.items()}


def _shard_path(shard: object, index_path: Path) -> PurePosixPath:
    """Checks a shard by name only, since links of the hub's cache lead out of the folder."""
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
    missing = [str(shard) for shard, file in files.items() if not os.path.lexists(file)]
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
        _refuse_unreadable(folder, error)
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
        _refuse(path, f"{what} that is a JSON object in UTF-8", one_line(str(error)))


def _refuse_unreadable(path: Path, error: OSError | ValueError) -> NoReturn:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        reason = "a link that leads nowhere; fetch the checkpoint again"
    else:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    _refuse(path, "to read it", one_line(reason))


def _refuse(path: Path, expected: str, found: str) -> NoReturn:
    raise CheckpointError(f"{one_line(str(path))}: expected {expected}, found {found}")
