"""GPTQ: `X.qweight`, `X.qzeros`, `X.scales` and `X.g_idx`, of which columns are in order.

Codes: I32 `[ceil(K * bits / 32), N]`, a word has those of one row and the columns that follow each
other, the first one low. Zero points: I32 `[groups, ceil(N * bits / 32)]`; the checkpoint format
`gptq` stores words of them less one each, `gptq_v2` as they are. Scales: `[groups, N]`. `g_idx` has
the group of every column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from moe_runtime.checkpoints.formats.contents import Contents
from moe_runtime.checkpoints.formats.packed_weight import PackedWeight, codes_shape, companion
from moe_runtime.checkpoints.formats.reordered_weight import PartOrder, by_columns
from moe_runtime.checkpoints.formats.settings import Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError

_CODES, _GROUPS = ".qweight", ".g_idx"
_WORD_BITS = 32


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint.

    Raises:
        UnsupportedModelError: codes of other sizes, another layout, or permuted groups.
        CheckpointError: a part of a weight is missing or has another type or shape.
    """
    bits = settings.choice("bits", (4, 8))
    layout = settings.text("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        settings.unsupported(f"checkpoint_format {layout!r}", "'gptq' or 'gptq_v2'")
    if settings.get("dynamic") is None:
        modules: Mapping[str, Any] = {}
    else:
        modules = settings.part("dynamic").values
    if any(not name.startswith("-:") for name in modules):
        settings.unsupported("dynamic with settings of some modules", "one setting for all")
    group = settings.group("group_size")
    with ExitStack() as stack:
        contents = Contents(stack)
        for name, codes in entries.items():
            for suffix in (".qzeros", ".scales"):
                if name.endswith(suffix):
                    module = name.removesuffix(suffix)
                    companion(entries, module, [_CODES], f"the codes of {name}")
            if not name.endswith(_CODES):
                continue
            module, groups = name.removesuffix(_CODES), name.removesuffix(_CODES) + _GROUPS
            num_words, rows = codes_shape(codes, ["I32"], [2])
            cols = num_words * _WORD_BITS // bits
            if groups in entries:
                cols = _require_order(entries[groups], codes, cols, group, contents)
            elif settings.get("desc_act"):
                settings.unsupported(f"desc_act of {name}", "groups in the order of the columns")
            if -(-cols * bits // _WORD_BITS) != num_words:
                raise CheckpointError(
                    f"{groups}: expected a group of every column of {name} {list(codes.shape)} "
                    f"with {bits} bits a code, found {cols}"
                )
            yield by_columns(
                module,
                entries,
                (codes, PartOrder("transposed", _WORD_BITS // bits)),
                (rows, cols),
                group,
                "zeros_across",
                bits,
                adds_one=layout == "gptq",
            )


def _require_order(
    entry: TensorEntry, codes: TensorEntry, most: int, group: int, contents: Contents
) -> int:
    """The number of columns, each of which must be in the group that its place says.

    Raises:
        UnsupportedModelError: columns were permuted (`desc_act`).
        CheckpointError: the tensor cannot be read, or is for more columns than there are codes.
    """
    cols = entry.shape[0] if len(entry.shape) == 1 else 0
    if not 0 < cols <= most:
        raise CheckpointError(
            f"{entry.name}: expected a group of each of up to {most} columns of {codes.name} "
            f"{list(codes.shape)}, found {entry.dtype} {list(entry.shape)}"
        )
    found = contents.numbers(entry, cols)
    if not torch.equal(found, torch.arange(cols, dtype=found.dtype) // (group or cols)):
        raise UnsupportedModelError(
            f"{entry.name}: permuted groups (desc_act) cannot be read yet; expected groups of "
            f"{group or cols} in the order of the columns"
        )
    return cols
