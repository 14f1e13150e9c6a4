"""Safetensors files made by hand, sound or damaged, and the message that refuses them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors

from moe_runtime.checkpoints.safetensors_index import (
    TensorEntry,
    read_checkpoint_index,
    read_header,
)
from moe_runtime.errors import CheckpointError

SOUND = '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


def write_safetensors(
    path: Path, header: str | bytes, data: bytes = b"", length: int | None = None
) -> Path:
    raw = header.encode("utf-8") if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def tensor_fields(dtype: Any = "U8", shape: Any = (2,), offsets: Any = (0, 2)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


def official_accepts(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, framework="np") as file:
            list(file.keys())
    except safetensors.SafetensorError:
        return False
    return True


def refusal(path: Path) -> str:
    """Returns the message, after checking what must hold for every message."""
    with pytest.raises(CheckpointError) as caught:
        (read_checkpoint_index if path.is_dir() else read_header)(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1500
    assert str(path) in message
    assert ": expected " in message
    assert ", found " in message
    return message


def stored_bytes(entry: TensorEntry) -> bytes:
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.num_bytes)
