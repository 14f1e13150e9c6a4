"""Quantised weights whose numbers lie in files in an order that no product reads.

GPTQ and AWQ store a weight's columns one after the other, and some pack zero points in words. Such
tensors are reordered once, when an expert enters its slot (`reads.c`, by `quantized.c`) or a dense
weight is loaded. `put_in_order` is the specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

WORD_BITS = 32
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of a word's eight columns

ORDERS = MappingProxyType(
    {"transposed": 0, "awq_codes": 1, "zeros_down": 2, "zeros_across": 3, "awq_zeros": 4, "int8": 5}
)
"""The numbers of the orders in C."""


@dataclass(frozen=True, slots=True)
class StorageOrder:
    """The order in a file of numbers that belong in rows.

    Attributes:
        kind: For a result `[rows, cols]`, the file has
            `transposed`: `[cols, rows]` items of `bits`;
            `awq_codes`: words `[cols, rows / 8]` of the nibbles of eight rows, in AWQ's order;
            `zeros_down`: words `[rows * bits / 32, cols]`, each of the numbers of several rows;
            `zeros_across`: words `[cols, rows * bits / 32]`, likewise;
            `awq_zeros`: the same in AWQ's order;
            `int8`: signed bytes `[rows, cols]`, made unsigned by adding 128.
        cols: In items, or in codes of `awq_codes`, a multiple of 8. Zero points become bytes.
        bits: Of an item or a number.
        adds_one: Whether zero points in the file are less one, borrowed through each word (GPTQ
            v1).
    """

    kind: str
    rows: int
    cols: int
    bits: int
    adds_one: bool = False

    @property
    def moves(self) -> bool:
        """Whether the result needs memory of its own, as numbers become more bytes."""
        return self.kind in ("zeros_down", "zeros_across", "awq_zeros")

    @property
    def result_bytes(self) -> int:
        bits = 8 if self.moves else self.bits
        return self.rows * self.cols * bits // 8

    @property
    def stored_bytes(self) -> int:
        if not self.moves:
            return self.result_bytes
        num_words = -(-self.rows * self.bits // WORD_BITS)
        return 4 * num_words * self.cols

    @property
    def scratch_bytes(self) -> int:
        """Bytes of extra memory for reordering."""
        return 0 if self.moves or self.kind == "int8" else self.result_bytes

    def step(self, source: int, place: int) -> tuple[int, ...]:
        """The C struct `OrderStep`: from one place in a slot to another."""
        numbers = self.rows, self.cols, self.bits, int(self.adds_one)
        return ORDERS[self.kind], source, place, *numbers


def put_in_order(order: StorageOrder, stored: Tensor) -> Tensor:
    """The bytes of numbers in row order, from those of a file, aligned to words."""
    if order.kind == "int8":
        return stored ^ 128
    if order.kind == "transposed":
        size = order.bits // 8
        items = stored.view(order.cols, order.rows, size).transpose(0, 1)
        return items.contiguous().flatten()
    num_words = -(-order.rows * order.bits // WORD_BITS)
    words = stored.view(torch.int32)
    if order.kind == "zeros_down":
        found = _numbers(words.view(num_words, order.cols, 1), order)
        return found.transpose(1, 2).flatten(0, 1)[: order.rows].contiguous().flatten()
    if order.adds_one:
        ones = sum(1 << shift for shift in range(0, WORD_BITS, order.bits))
        words = words + ones
    found = _numbers(words.view(order.cols, num_words, 1), order).flatten(1)[:, : order.rows].t()
    if order.kind == "awq_codes":
        found = found[:, 0::2] | found[:, 1::2] << 4
    return found.contiguous().flatten()


def _numbers(words: Tensor, order: StorageOrder) -> Tensor:
    """The numbers of every word along a last dimension, as `uint8`."""
    shifts = torch.arange(0, WORD_BITS, order.bits)
    if order.kind in ("awq_codes", "awq_zeros"):
        shifts = shifts[list(AWQ_NIBBLES)]
    return (words >> shifts & (1 << order.bits) - 1).to(torch.uint8)
