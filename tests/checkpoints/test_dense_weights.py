"""Dense weights as they are read from files: the file's bytes, at addresses of one kind."""

import random

import pytest
import torch

from moe_runtime.checkpoints import dense_weights
from moe_runtime.checkpoints.dense_weights import DenseReader
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.memory.layout import BLOCK_BYTES

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
