"""Dense weights as they are read from files: the file's bytes, at addresses of one kind."""

import random

import pytest
import torch

from moe_runtime.checkpoints import dense_weights
from moe_runtime.checkpoints.dense_weights import DenseReader
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError
from moe_runtime.memory.source import BLOCK_BYTES, ExpertSource, TensorRange, aligned_bytes, lay_out
from moe_runtime.types import ExpertKey

READ = 2 * BLOCK_BYTES
FILE_BYTES = 5 * READ + 1234  # ends inside a block
OFFSETS = (0, 2, 24, 64, 100, BLOCK_BYTES - 4, BLOCK_BYTES, BLOCK_BYTES + 8, READ - 4, READ + 60)
SIZES = (2, 64, BLOCK_BYTES - 4, BLOCK_BYTES, READ - 24, READ, READ + 4, 3 * READ + 20)


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_weight_lies_at_an_aligned_address_wherever_it_lay_in_its_file(
    offset, tmp_path, monkeypatch
):
    """Before, at and behind the beginning of a block and of a read; the last ends with the file."""
    monkeypatch.setattr(dense_weights, "READ_BYTES", READ)
    content = random.Random(0).randbytes(FILE_BYTES)
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    whole = TensorEntry("weight", file, "U8", (FILE_BYTES,), 0, FILE_BYTES)
    reader = DenseReader([whole], torch.float32, None)
    for size in (*SIZES, FILE_BYTES - offset):
        read = reader.bytes_of("weight", file, offset, size)
        assert read.numpy().tobytes() == content[offset : offset + size]
        # what processors read and torch's libraries compute at once is at most as long
        assert read.data_ptr() % 64 == 0
    reader.close()


def test_a_file_that_gets_shorter_while_it_is_read_has_changed(tmp_path):
    """Direct I/O behind the new end says `Invalid argument`, which names no cause."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(FILE_BYTES))
    whole = TensorEntry("weight", file, "U8", (FILE_BYTES,), 0, FILE_BYTES)
    reader = DenseReader([whole], torch.float32, None)
    key = ExpertKey(0, 0)
    found = TensorRange.of(file, "expert", 0, torch.uint8, (FILE_BYTES,), (1,))
    source = ExpertSource({key: (layout := lay_out([found]))})
    file.open("r+b").truncate(FILE_BYTES - 700)
    changed = rf"{file.name} has changed .* load it again"
    with pytest.raises(CheckpointError, match=changed):
        reader.bytes_of("weight", file, 0, FILE_BYTES)
    with pytest.raises(CheckpointError, match=changed):
        source.read({key: aligned_bytes(layout.slot_bytes)})
    reader.close()
    source.close()
