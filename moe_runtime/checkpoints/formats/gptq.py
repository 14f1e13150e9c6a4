"""GPTQ: `X.qweight`, `X.qzeros`, `X.scales` and `X.g_idx`, of which columns are in order.

Codes: I32 `[ceil(K * bits / 32), N]`, a word has those of one row and the columns that follow each
other, the first one low. Zero points: I32 `[groups, ceil(N * bits / 32)]`; the checkpoint format
`gptq` stores words of them less one each, `gptq_v2` as they are. Scales: `[groups, N]`. `g_idx` has
the group of every column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from moe_runtime.checkpoints.formats.packed_weight import (
    PackedWeight,
    PartOrder,
    by_columns,
    codes_of_modules,
    codes_shape,
)
from moe_runtime.checkpoints.formats.settings import Contents, Settings
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized.storage_order import WORD_BITS


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint."""
    bits = settings.choice("bits", (4, 8))
    layout = settings.text("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        settings.unsupported(f"checkpoint_format {layout!r}", "'gptq' or 'gptq_v2'")
    is_dynamic = settings.get("dynamic") is not None
    modules = settings.part("dynamic").values if is_dynamic else {}
    if any(not name.startswith("-:") for name in modules):
        settings.unsupported("dynamic with settings of some modules", "one setting for all")
    group = settings.group("group_size")
    with Contents() as contents:
        for module, codes in codes_of_modules(entries, ".qweight", ".qzeros", ".scales"):
            num_words, rows = codes_shape(codes, ["I32"], [2])
            cols, index = num_words * WORD_BITS // bits, entries.get(f"{module}.g_idx")
            sizes = () if index is None else index.shape
            if len(sizes) == 1 and -(-sizes[0] * bits // WORD_BITS) == num_words:
                cols = sizes[0]  # the last word may have more
            order = PartOrder("transposed", WORD_BITS // bits)
            weight = by_columns(
                *(module, entries, (codes, order), (rows, cols), group, "zeros_across", bits),
                adds_one=layout == "gptq",
            )
            if index is None:
                if settings.get("desc_act"):
                    expected = "groups in the order of the columns"
                    settings.unsupported(f"desc_act of {codes.name}", expected)
            elif index.shape != (cols,):
                raise CheckpointError(
                    f"{index.name}: expected a group of each of {cols} columns of {codes.name} "
                    f"{[*codes.shape]} with {bits} bits a code, found {index.dtype} {[*sizes]}; "
                    "one of both is damaged: fetch the checkpoint again"
                )
            else:
                _require_order(index, weight, contents.numbers(index, cols))
            yield weight


def _require_order(entry: TensorEntry, weight: PackedWeight, found: torch.Tensor) -> None:
    """Checks that each column is in the group that its place says; sizes are checked already."""
    cols = weight.num_cols
    group = weight.format.group_cols or cols
    expected = torch.arange(cols, dtype=found.dtype) // group
    if torch.equal(found, expected):
        return
    if torch.equal(found.sort().values, expected):
        raise UnsupportedModelError(
            f"{entry.name}: permuted groups (desc_act) cannot be read yet; expected groups of "
            f"{group} in the order of the columns"
        )
    place = int((found != expected).nonzero()[0])
    raise CheckpointError(
        f"{entry.name}: expected groups 0 to {int(expected[-1])} of {group} columns each, as "
        f"{weight.codes.name} and the quantization_config have, found column {place} in group "
        f"{int(found[place])}; fetch the checkpoint again, or correct group_size"
    )
