"""GGUF files written again with parts that are missing, of another type, or added."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind


def rewritten(
    source: Path,
    target: Path,
    *,
    without: Collection[str] = (),
    instead: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
    numbers: Mapping[str, int | float | str] | None = None,
) -> Path:
    """Writes a file again.

    Returns:
        `target`.
    """
    reader, others = gguf.GGUFReader(source), dict(instead or {})
    name = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", *(numbers or ())):
            within = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=within)
    for key, number in (numbers or {}).items():
        kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value(key, number, kinds.get(type(number), gguf.GGUFValueType.STRING))
    for tensor in reader.tensors:
        if tensor.name not in without:
            data, kind = others.pop(tensor.name, (tensor.data, tensor.tensor_type))
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for added, (data, kind) in others.items():
        writer.add_tensor(added, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def tensors_of(source: Path) -> dict[str, tuple[Any, Kind]]:
    """Bytes and types of a file's tensors."""
    return {t.name: (t.data, t.tensor_type) for t in gguf.GGUFReader(source).tensors}
