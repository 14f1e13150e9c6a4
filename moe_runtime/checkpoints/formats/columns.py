"""GPTQ and AWQ: `X.qweight`, `X.qzeros` and `X.scales`, whose rows are columns of the weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from moe_runtime.checkpoints.formats.packed_weight import (
    SCALE_NAMES,
    Contents,
    PackedWeight,
    Settings,
    codes_of_modules,
    codes_shape,
    part_of,
    require_beside,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.checkpoints.strict_json import FETCH_OR_CORRECT
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import WeightFormat
from moe_runtime.kernels.quantized.storage_order import WORD_BITS


def gptq_weights(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """GPTQ whose groups are in the order of the columns; `X.g_idx` has the group of each column.

    Codes: I32 `[ceil(K * bits / 32), N]`; a word has consecutive columns of a row, the first one
    low. Zero points: I32 `[groups, ceil(N * bits / 32)]`, in the checkpoint format `gptq` less one
    each, in `gptq_v2` as they are. Scales: `[groups, N]`.
    """
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
            orders = ("transposed", "zeros_across")
            weight = _by_columns(
                *(module, entries, codes, (rows, cols), group, orders, bits),
                adds_one=layout == "gptq",
            )
            if index is None:
                if settings.get("desc_act"):
                    expected = "groups in the order of the columns"
                    settings.unsupported(f"desc_act of {codes.name}", expected)
            elif index.shape != (cols,):
                raise CheckpointError(
                    f"{index.name}: expected a group for each of {cols} columns of {codes.name} "
                    f"{[*codes.shape]}, found {index.dtype} {[*sizes]}; {FETCH_OR_CORRECT}"
                )
            else:
                _require_order(index, weight, contents.numbers(index, cols))
            yield weight


def _require_order(entry: TensorEntry, weight: PackedWeight, found: torch.Tensor) -> None:
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


_AWQ_BITS = 4
_IN_WORD = 8


def awq_weights(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """AWQ in its version `gemm`, of 4 bits.

    Codes: I32 `[K, N / 8]`; a word has those of eight rows in AWQ's order. Zero points: I32
    `[groups, N / 8]` in the same order. Scales: `[groups, N]`.
    """
    settings.choice("bits", (_AWQ_BITS,))
    version = settings.text("version") or "gemm"
    if version.lower() != "gemm":
        settings.unsupported(f"version {version!r}", "'gemm'")
    # GPTQModel says false of symmetric codes, and writes zero points all the same
    has_zeros = any(name.endswith(".qzeros") for name in entries)
    settings.choice("zero_point", (True, None, *([False] if has_zeros else [])))
    group = settings.group("group_size")
    for module, codes in codes_of_modules(entries, ".qweight", ".qzeros", ".scales"):
        cols, num_words = codes_shape(codes, ["I32"], [2])
        if cols % _IN_WORD:
            raise CheckpointError(
                f"{codes.name}: expected I32 [K, {num_words}] with K, the columns, a multiple of "
                f"{_IN_WORD}, found I32 {[*codes.shape]}; {FETCH_OR_CORRECT}"
            )
        sizes, orders = (num_words * _IN_WORD, cols), ("awq_codes", "awq_zeros")
        yield _by_columns(module, entries, codes, sizes, group, orders, _AWQ_BITS)


def _by_columns(
    module: str,
    entries: Mapping[str, TensorEntry],
    codes: TensorEntry,
    sizes: tuple[int, int],
    group: int,
    orders: tuple[str, str],
    bits: int,
    *,
    adds_one: bool = False,
) -> PackedWeight:
    """A weight `(N, K)` in `.qweight`, `.qzeros` and `.scales`; orders of codes and zero points."""
    rows, cols = sizes
    scales, zeros = (
        part_of(entries, module, [suffix], f"a part of {codes.name}")
        for suffix in (".scales", ".qzeros")
    )
    kind = WeightFormat(
        "uint4" if bits == 4 else "uint8", "f32", group_cols=group, has_zero_points=True
    )
    groups, num_words = kind.scales_shape(rows, cols)[1], -(-rows * bits // WORD_BITS)
    require_beside(scales, codes, (groups, rows), ("F16", "BF16", "F32"))
    require_beside(zeros, codes, (groups, num_words), ["I32"])
    kind = replace(kind, scales=SCALE_NAMES[scales.dtype])
    return PackedWeight(
        *(f"{module}.weight", (), rows, cols, kind, codes, scales, zeros),
        orders={"codes": orders[0], "scales": "transposed", "zero_points": orders[1]},
        adds_one=adds_one,
    )
