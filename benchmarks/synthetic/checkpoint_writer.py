"""Writes a synthetic Mixture-of-Experts checkpoint, one weight in memory at a time.

The files are laid out as Hugging Face publishes them: safetensors shards, wide elements before
narrow ones in each, `model.safetensors.index.json`, `config.json`, a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.synthetic.config_shape import ConfigShape
from moe_runtime.benchmarks.synthetic.drawn_tensors import (
    ITEM_BYTES,
    StoredPart,
    TensorPlan,
    make_parts,
)
from moe_runtime.benchmarks.synthetic.family_plans import config_of, plan_tensors
from moe_runtime.benchmarks.synthetic.gguf_shape import GgufShape
from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape
from moe_runtime.benchmarks.synthetic.texts import TOKENIZER_NAME, write_tokenizer

OwnShape = ConfigShape | GgufShape
"""Shapes that write their files themselves."""
INDEX_NAME = "model.safetensors.index.json"


def write_checkpoint(
    shape: ModelShape | OwnShape,
    folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    make: Callable[[TensorPlan, int], Sequence[Any]] = make_parts,
) -> None:
    """Writes the checkpoint of `shape` into `folder`; the index comes last, so it marks the end.

    Args:
        progress: called with bytes written and bytes in all after each weight; not by an
            `OwnShape`.
        make: gives the contents of a weight's parts as arrays, from its plan and the seed; not
            of an `OwnShape`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(shape, OwnShape):
        return shape.write(folder)
    shards = _split_into_shards(list(plan_tensors(shape)), shape.shard_bytes)
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


def write_settings(shape: ModelShape | OwnShape, folder: Path) -> None:
    """Writes what a checkpoint has beside its weights: configuration and tokenizer."""
    if isinstance(shape, OwnShape):
        return shape.write_settings(folder)
    write_tokenizer(folder, shape.vocab_size)
    for name, text in _settings_of(shape).items():
        (folder / name).write_text(text)


def is_complete(shape: ModelShape | OwnShape, folder: Path, *, seed: int = 0) -> bool:
    """Whether `folder` already holds this checkpoint, whole and made from the same seed."""
    if isinstance(shape, OwnShape):
        return shape.is_complete(folder)
    index, settings = folder / INDEX_NAME, _settings_of(shape)
    if not all((folder / name).is_file() for name in (INDEX_NAME, TOKENIZER_NAME, *settings)):
        return False
    if any((folder / name).read_bytes() != text.encode() for name, text in settings.items()):
        return False
    try:
        content = json.loads(index.read_text())
        metadata, names = content["metadata"], set(content["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    if metadata != {"total_size": shape.total_bytes, "seed": seed}:
        return False
    files = [folder / name for name in names]
    return all(file.is_file() for file in files) and (
        sum(file.stat().st_size for file in files) >= shape.total_bytes
    )


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


def _settings_of(shape: ModelShape) -> dict[str, str]:
    """Contents of files by their names."""
    files = {"config.json": config_of(shape), "generation_config.json": {"do_sample": False}}
    return {name: _as_json(content) for name, content in files.items()}


def _as_json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"
