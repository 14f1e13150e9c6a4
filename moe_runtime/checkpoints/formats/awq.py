"""AWQ in its version `gemm`: `X.qweight`, `X.qzeros` and `X.scales`, of 4 bits.

Codes: I32 `[K, N / 8]`, a word has those of eight rows in an order of its own; zero points: I32
`[groups, N / 8]`, likewise; scales: `[groups, N]`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NoReturn

from moe_runtime.checkpoints.formats.packed_weight import (
    PackedWeight,
    PartOrder,
    by_columns,
    codes_of_modules,
    codes_shape,
)
from moe_runtime.checkpoints.formats.settings import Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError

BITS = 4
_IN_WORD = 8


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint."""
    settings.choice("bits", (BITS,))
    version = settings.text("version") or "gemm"
    if version.lower() != "gemm":
        settings.unsupported(f"version {version!r}", "'gemm'")
    # GPTQModel says false of symmetric codes, and writes zero points all the same
    has_zeros = any(name.endswith(".qzeros") for name in entries)
    settings.choice("zero_point", (True, None, *([False] if has_zeros else [])))
    group = settings.group("group_size")
    for module, codes in codes_of_modules(entries, ".qweight", ".qzeros", ".scales"):
        cols, num_words = codes_shape(codes, ["I32"], [2])
        order, sizes = PartOrder("awq_codes"), (num_words * _IN_WORD, cols)
        weight = by_columns(module, entries, (codes, order), sizes, group, "awq_zeros", BITS)
        if cols % _IN_WORD:
            _refuse_columns(codes, entries)
        yield weight


def _refuse_columns(codes: TensorEntry, entries: Mapping[str, TensorEntry]) -> NoReturn:
    """Raises: columns are no multiple of a word's, as in none of their kind or in this one only."""
    kind = _numberless(codes.name)
    alike = (entry.shape for name, entry in entries.items() if _numberless(name) == kind)
    usual = Counter(alike).most_common(1)[0][0]
    found = f"found I32 {[*codes.shape]}"
    if usual != codes.shape:
        raise CheckpointError(
            f"{codes.name}: expected I32 {[*usual]} as in other layers and experts, {found}; fetch "
            "the checkpoint again"
        )
    raise UnsupportedModelError(
        f"{codes.name}: expected I32 [K, {codes.shape[1]}] with K, the columns, a multiple of "
        f"{_IN_WORD}, {found}; fetch the checkpoint again if rows are missing, other columns "
        "cannot be read yet"
    )


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "0", name)
