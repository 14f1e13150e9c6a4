"""GPTQ and AWQ: `X.qweight`, `X.qzeros` and `X.scales`, whose rows are columns of the weight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

import torch

from moe_runtime.checkpoints.formats.packed_weight import (
    SCALE_NAMES,
    Contents,
    PackedWeight,
    PartOrder,
    Settings,
    codes_of_modules,
    codes_shape,
    other_groups,
    part_of,
    require_beside,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import WeightFormat
from moe_runtime.kernels.quantized.storage_order import WORD_BITS


def gptq_weights(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """GPTQ, of which columns are in order; `X.g_idx` has the group of every column.

    Codes: I32 `[ceil(K * bits / 32), N]`, a word has those of one row and the columns that follow
    each other, the first one low. Zero points: I32 `[groups, ceil(N * bits / 32)]`; the checkpoint
    format `gptq` stores words of them less one each, `gptq_v2` as they are. Scales: `[groups, N]`.
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
            order = PartOrder("transposed", WORD_BITS // bits)
            weight = _by_columns(
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


_AWQ_BITS = 4
_IN_WORD = 8


def awq_weights(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """AWQ in its version `gemm`, of 4 bits.

    Codes: I32 `[K, N / 8]`, a word has those of eight rows in an order of its own; zero points: I32
    `[groups, N / 8]`, likewise; scales: `[groups, N]`.
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
        order, sizes = PartOrder("awq_codes"), (num_words * _IN_WORD, cols)
        weight = _by_columns(module, entries, (codes, order), sizes, group, "awq_zeros", _AWQ_BITS)
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


def _by_columns(
    module: str,
    entries: Mapping[str, TensorEntry],
    codes: tuple[TensorEntry, PartOrder],
    sizes: tuple[int, int],
    group: int,
    zeros_kind: str,
    bits: int,
    *,
    adds_one: bool = False,
) -> PackedWeight:
    """A weight in the tensors `.qweight`, `.qzeros` and `.scales`; sizes are `(N, K)`."""
    (entry, order), (rows, cols) = codes, sizes
    scales, zeros = (
        part_of(entries, module, [suffix], f"a part of {entry.name}")
        for suffix in (".scales", ".qzeros")
    )
    kind = WeightFormat(
        "uint4" if bits == 4 else "uint8", "f32", group_cols=group, has_zero_points=True
    )
    _require_rows(entry, rows, scales, zeros, bits)
    groups = kind.scales_shape(rows, cols)[1]

    def hint() -> str:  # where zero points agree with them, the configuration is wrong
        agree = zeros.shape[:1] == scales.shape[:1]
        return other_groups(kind, sizes, scales.shape[::-1]) if agree else ""

    require_beside(scales, entry, (groups, rows), ("F16", "BF16", "F32"), hint)
    require_beside(zeros, entry, (groups, _words(rows, bits)), ["I32"])
    kind = replace(kind, scales=SCALE_NAMES[scales.dtype])
    return PackedWeight(
        *(f"{module}.weight", (), rows, cols, kind, entry, scales, zeros),
        along="columns",
        orders={
            "codes": order,
            "scales": PartOrder("transposed", group),
            "zero_points": PartOrder(zeros_kind, group),
        },
        adds_one=adds_one,
    )


def _require_rows(
    codes: TensorEntry, rows: int, scales: TensorEntry, zeros: TensorEntry, bits: int
) -> None:
    """Checks the rows of codes where scales and zero points agree on another number, and bits."""
    if len(scales.shape) != 2 or len(zeros.shape) != 2:
        return
    others, num_words = scales.shape[1], zeros.shape[1]
    beside = f"{scales.name} {[*scales.shape]} and {zeros.name} {[*zeros.shape]}"
    if others == rows:
        for likely in (2, 4, 8):
            if _words(rows, likely) == num_words != _words(rows, bits):
                raise CheckpointError(
                    f"{zeros.name}: expected {_words(rows, bits)} words, {rows} zero points of "
                    f"{bits} bits, found {num_words}, as of {likely} bits; correct bits in the "
                    "quantization_config of config.json"
                )
    elif num_words == _words(others, bits) != _words(rows, bits):
        # one has a word for several rows, the other for several columns
        sizes = (others, num_words) if codes.shape[1] == rows else (num_words, others)
        method = "awq" if codes.shape[1] == rows else "gptq"
        causes = [f"as quant_method {method} has them"] if codes.shape[1] == sizes[1] else []
        causes += ["transposed"] if codes.shape[0] == sizes[0] else []
        raise CheckpointError(
            f"{codes.name}: expected codes of {others} rows, as {beside} have, found those of "
            f"{rows} in {[*codes.shape]}; {' or '.join(causes) or 'damaged'}: correct the "
            "quantization_config of config.json, or fetch the checkpoint again"
        )


def _words(count: int, bits: int) -> int:
    return -(-count * bits // WORD_BITS)
