"""Numbers that lie in files in another order than products read: C and torch beside plain loops."""

import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.quantized.storage_order import StorageOrder, put_in_order

AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row of a weight that nibble 0, 1, ... of a word belongs to, as AutoAWQ packs."""


def stored(values: np.ndarray, order: StorageOrder) -> np.ndarray:
    """The words in which a file has numbers `[rows, cols]`, written number by number."""
    rows, cols = values.shape
    in_word = 32 // order.bits
    num_words = -(-rows // in_word)
    words = np.zeros((num_words, cols), np.uint64)
    for row in range(rows):
        word, place = divmod(row, in_word)
        if order.kind.startswith("awq"):
            place = AWQ_ROWS.index(place)
        for col in range(cols):
            words[word, col] += np.uint64(int(values[row, col]) << (order.bits * place))
    if order.adds_one:  # the whole word is less by one for each number, so a zero borrows
        words -= np.uint64(sum(1 << shift for shift in range(0, 32, order.bits)))
    words = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return words if order.kind == "zeros_down" else np.ascontiguousarray(words.T)


def in_order(order: StorageOrder, raw: np.ndarray) -> dict[str, Tensor]:
    """What torch and C make of a tensor's bytes."""
    flat = torch.from_numpy(raw.reshape(-1).view(np.uint8).copy())
    found = {"torch": put_in_order(order, flat)}
    library = native_library()
    if library is not None:
        place = len(flat) + 3 if order.moves else 0  # zero points may come to lie anywhere
        slot = torch.full((place + order.result_bytes + 8,), 0xA5, dtype=torch.uint8)
        slot[: len(flat)] = flat
        scratch = torch.empty(max(1, order.scratch_bytes), dtype=torch.uint8)
        step = struct.pack("7q", *order.step(0, place))
        library.put_in_order(step, 1, slot.data_ptr(), scratch.data_ptr())
        found["native"] = slot[place : place + order.result_bytes]
        assert (slot[place + order.result_bytes :] == 0xA5).all()
    assert order.stored_bytes == len(flat)
    return found


def numbers(rows: int, cols: int, bits: int) -> np.ndarray:
    """Random ones, both extremes among them."""
    values = np.random.default_rng(rows * cols).integers(0, 1 << bits, (rows, cols))
    values[0], values[-1] = 0, (1 << bits) - 1
    return values


@pytest.mark.parametrize(
    ("kind", "adds_one"), [("zeros_down", False), ("zeros_across", False), ("zeros_across", True)]
)
@pytest.mark.parametrize(("rows", "cols", "bits"), [(8, 1, 4), (37, 5, 4), (30, 3, 8), (64, 16, 8)])
def test_zero_points_become_a_byte_each_in_rows(kind, rows, cols, bits, adds_one):
    order, values = StorageOrder(kind, rows, cols, bits, adds_one), numbers(rows, cols, bits)
    for name, found in in_order(order, stored(values, order)).items():
        assert np.array_equal(found.numpy().reshape(rows, cols), values), name


@pytest.mark.parametrize(("rows", "cols"), [(8, 8), (136, 24), (264, 144)])
def test_codes_and_zero_points_of_awq_become_rows(rows, cols):
    values = numbers(rows, cols, 4)
    order = StorageOrder("awq_codes", rows, cols, 4)
    pairs = values[:, 0::2] | values[:, 1::2] << 4
    for name, found in in_order(order, stored(values, order)).items():
        assert np.array_equal(found.numpy().reshape(rows, -1), pairs), name
    order = StorageOrder("awq_zeros", rows, cols, 4)
    for name, found in in_order(order, stored(values, order)).items():
        assert np.array_equal(found.numpy().reshape(rows, cols), values), name


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (33, 65), (40, 3)])
def test_columns_become_rows(dtype, rows, cols):
    values = np.random.default_rng(0).integers(0, 2**16, (rows, cols)).astype(dtype)
    order = StorageOrder("transposed", rows, cols, 8 * values.itemsize)
    for name, found in in_order(order, np.ascontiguousarray(values.T)).items():
        assert np.array_equal(found.numpy().view(dtype).reshape(rows, cols), values), name


def test_signed_bytes_become_unsigned_ones():
    values = np.arange(-128, 128, dtype=np.int8).reshape(8, 32)
    order = StorageOrder("int8", 8, 32, 8)
    for name, found in in_order(order, values).items():
        assert np.array_equal(found.numpy().reshape(8, 32), values.astype(int) + 128), name
