"""Writes a synthetic Mixture-of-Experts checkpoint, one weight in memory at a time.

The files are laid out as Hugging Face publishes them. Weights are Gaussian numbers, stored in bf16
or quantised to FP8 or MXFP4, so that codes have the statistics of real ones.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from moe_runtime.benchmarks.synthetic.model_shapes import (
    FP8_BLOCK,
    ITEM_BYTES,
    MXFP4_GROUP,
    ModelShape,
    StoredPart,
    TensorPlan,
)
from moe_runtime.benchmarks.synthetic.texts import write_tokenizer

INDEX_NAME = "model.safetensors.index.json"


def make_parts(plan: TensorPlan, seed: int) -> list[np.ndarray]:
    """The contents of `plan.parts`; a function of seed and name only, whatever the order."""
    import torch

    # transformers is imported here: its lazy modules do not bear imports by several threads
    store = _fp8() if plan.stored == "fp8" else {"bf16": _bf16, "mxfp4": _mxfp4}[plan.stored]
    rows, cols = math.prod(plan.shape[:-1]), plan.shape[-1]

    def portion(first: int) -> tuple[Any, ...]:
        size = (min(_PORTION_ROWS, rows - first), cols)
        return store(torch.from_numpy(_values(plan, seed, first, size)))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        portions = zip(*pool.map(portion, range(0, rows, _PORTION_ROWS)), strict=True)
        whole = [torch.cat(part) for part in portions]
    bits = {1: torch.uint8, 2: torch.uint16}
    return [one.view(bits[one.element_size()]).numpy() for one in whole]


def _values(plan: TensorPlan, seed: int, first: int, size: tuple[int, int]) -> np.ndarray:
    if plan.std is None:
        return np.ones(size, dtype=np.float32)
    bits = np.random.SFC64([seed, zlib.crc32(plan.name.encode()), first])
    values = np.random.Generator(bits).standard_normal(size, dtype=np.float32)
    values *= np.float32(plan.std)
    return values


def _bf16(values: Any) -> tuple[Any]:
    return (values.bfloat16(),)


def _fp8() -> Callable[[Any], tuple[Any, Any]]:
    """The quantiser of transformers, which needs whole blocks; scales are rounded to bf16."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings: Any = SimpleNamespace(quantization_config=FineGrainedFP8Config())

    def store(values: Any) -> tuple[Any, Any]:
        parts = Fp8Quantize(settings)._quantize_one("weight", values)
        return parts["weight"], parts["weight_scale_inv"].bfloat16()

    return store


def _mxfp4(values: Any) -> tuple[Any, Any]:
    from moe_runtime.kernels.quantized import WeightFormat
    from moe_runtime.kernels.quantized.rounding import quantize

    found = quantize(values, WeightFormat("e2m1", "e8m0", group_cols=MXFP4_GROUP))
    return found.codes, found.scales


def write_checkpoint(
    shape: ModelShape,
    folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    make: Callable[[TensorPlan, int], Sequence[Any]] = make_parts,
) -> None:
    """Writes the checkpoint of `shape` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split_into_shards(list(shape.tensors()), shape.shard_bytes)
    weight_map: dict[str, str] = {}
    done = 0
    for number, plans in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, offsets = _safetensors_header([part for plan in plans for part in plan.parts])
        with (folder / file_name).open("wb") as file:
            file.write(header)
            for plan in plans:
                for part, content in zip(plan.parts, make(plan, seed), strict=True):
                    file.seek(offsets[part.name])
                    file.write(content.data)
                    weight_map[part.name] = file_name
                done += plan.num_bytes
                if progress is not None:
                    progress(done, shape.total_bytes)
    write_settings(shape, folder)
    index = {"metadata": {"total_size": shape.total_bytes, "seed": seed}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(_as_json(index))


def write_settings(shape: ModelShape, folder: Path) -> None:
    """Writes what a checkpoint has beside its weights: configuration and tokenizer."""
    write_tokenizer(folder, shape.vocab_size)
    (folder / "config.json").write_text(_as_json(shape.config()))
    (folder / "generation_config.json").write_text(_as_json({"do_sample": False}))


def _split_into_shards(plans: list[TensorPlan], shard_bytes: int) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.num_bytes
    return shards


def _safetensors_header(parts: Sequence[StoredPart]) -> tuple[bytes, dict[str, int]]:
    """The header of a file, and the first byte of each tensor in it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for part in sorted(parts, key=lambda part: -ITEM_BYTES[part.dtype]):
        begins[part.name], end = end, end + part.num_bytes
        entries[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [begins[part.name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # As the safetensors library does: pad with spaces to a multiple of eight bytes and no more,
    # so that tensors start where they start in published checkpoints, not at a disk block.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _as_json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"


_PORTION_ROWS = FP8_BLOCK


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a file, and its shape."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read_bits(self) -> np.ndarray:
        """The tensor in its shape: bf16 as uint16, codes of a byte as uint8."""
        import torch

        with safe_open(self.path, framework="pt") as file:
            tensor: Any = file.get_tensor(self.name)
        return tensor.view({1: torch.uint8, 2: torch.uint16}[tensor.element_size()]).numpy()


def locate_tensors(folder: Path) -> dict[str, TensorPlace]:
    """Maps every tensor name of the sharded checkpoint in `folder` to its place."""
    weight_map: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    places: dict[str, TensorPlace] = {}
    for path in sorted({folder / name for name in weight_map.values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it has no iteration of its own
                places[name] = TensorPlace(path, name, tuple(file.get_slice(name).get_shape()))
    return places
