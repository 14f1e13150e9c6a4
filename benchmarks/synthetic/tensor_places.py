"""Where each tensor of a safetensors checkpoint lies, read without torch.

The benchmark's own reader: it must not share code with what it measures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_runtime.benchmarks.synthetic.checkpoint_writer import INDEX_NAME


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's file, first byte, length in bytes and shape."""

    path: Path
    offset: int
    num_bytes: int
    shape: tuple[int, ...]

    def read_bfloat16_bits(self) -> np.ndarray:
        """The tensor's bits as uint16 in its shape."""
        bits = np.fromfile(self.path, np.uint16, self.num_bytes // 2, offset=self.offset)
        return bits.reshape(self.shape)

    def read_bytes(self) -> np.ndarray:
        """A tensor of bytes, in its shape."""
        content = np.fromfile(self.path, np.uint8, self.num_bytes, offset=self.offset)
        return content.reshape(self.shape)


def locate_tensors(folder: Path) -> dict[str, TensorPlace]:
    """Maps every tensor name of the sharded checkpoint in `folder` to its place."""
    weight_map: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    places: dict[str, TensorPlace] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                places[name] = TensorPlace(path, 8 + header_bytes + begin, end - begin, shape)
    return places
