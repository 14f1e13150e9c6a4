"""bf16 matrices as planes of signs and mantissas, and bit planes of indices into an exponent book.

Exponents of trained weights carry 2.6 bits of information in 8. Seven frequent ones have three-bit
indices; the eighth index means that the exponent is in a list of escapes. Reading may begin at
every 32nd row.

The idea is that of ZipServ's triple bitmaps (arXiv:2603.17435), laid out for vectors of bytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.lossless.reference import (
    BOOK_SIZE,
    GROUP_ROWS,
    TAIL_BYTES,
    choose_book,
    coded_row_bytes,
    decode_reference,
    encode_reference,
    num_groups,
)
from moe_runtime.kernels.native import STATUS_OK, NativeLibrary, native_library

CODE_PLANES = 5  # first word of the C struct: the number after those of quantised codes


@dataclass(frozen=True, slots=True, eq=False)
class PlanesMatrix:
    """A bf16 matrix `[N, K]` in the lossless code.

    Attributes:
        num_cols: K.
        coded: `uint8 [N, 88 * ceil(K / 64)]`, contiguous.
        starts: `int32 [ceil(N / 32) + 1]`: the first escape of every 32nd row, then their number.
        escapes: `uint8`: exponents that are not in the book, then at least 64 unused bytes.
        book: `uint8 [8]`: seven exponents and an unused byte.
    """

    num_cols: int
    coded: Tensor
    starts: Tensor
    escapes: Tensor
    book: Tensor

    def __post_init__(self) -> None:
        """Raises ValueError if the parts do not fit together."""
        rows = len(self.coded)
        expected = {
            "coded": (torch.uint8, (rows, coded_row_bytes(self.num_cols))),
            "starts": (torch.int32, (num_groups(rows) + 1,)),
            "escapes": (torch.uint8, (max(TAIL_BYTES, self.escapes.numel()),)),
            "book": (torch.uint8, (BOOK_SIZE,)),
        }
        for name, (dtype, shape) in expected.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {dtype} {list(shape)}, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        return len(self.coded), self.num_cols

    @property
    def device(self) -> torch.device:
        return self.coded.device

    @property
    def format(self) -> str:
        """The property that experts of one call must share."""
        return "planes"

    def part(self, first: int, end: int) -> PlanesMatrix:
        """Rows as views; `first` is a multiple of 32, and `end` too unless it is N."""
        starts = self.starts[first // GROUP_ROWS : num_groups(end) + 1]
        escapes = self.escapes[int(starts[0]) :]
        own = starts - starts[0]
        return PlanesMatrix(self.num_cols, self.coded[first:end], own, escapes, self.book)

    def native_struct(self) -> tuple[list[int], array[int]]:
        """The four words of the C struct `Matrix`, and the memory they point at, which must be
        kept.
        """
        places = (part.data_ptr() for part in (self.starts, self.escapes, self.book))
        num_escapes = self.escapes.numel() - TAIL_BYTES
        described = array("q", (CODE_PLANES, *places, num_escapes, self.num_cols))
        words = [self.coded.data_ptr(), self.coded.stride(0), described.buffer_info()[0], 0]
        return words, described

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values `[N, K]` in `dtype`; in bf16 the original ones."""
        return decode_planes(self).to(dtype)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.coded, self.starts, self.escapes, self.book))


def encode_planes(weight_NK: Tensor) -> PlanesMatrix:
    """Encodes a bf16 matrix, in C if possible, else in torch.

    Raises:
        ValueError: It is no bf16 matrix on the CPU with unit stride along K.
    """
    _require_bf16(weight_NK)
    library = native_library()
    parts = _encode_native(library, weight_NK) if library else encode_reference(weight_NK)
    return PlanesMatrix(weight_NK.shape[1], *parts)


def encode_planes_into(weight_NK: Tensor, matrix: PlanesMatrix) -> int:
    """Encodes a bf16 matrix into existing parts, whose `escapes` may be longer than needed.

    Returns:
        Bytes that `escapes` needs; if it has fewer, the parts are invalid.

    Raises:
        ValueError: `encode_planes` cannot take the matrix, or the parts have another shape.
    """
    _require_bf16(weight_NK)
    if matrix.shape != tuple(weight_NK.shape):
        raise ValueError(f"expected parts of {list(weight_NK.shape)}, got {list(matrix.shape)}")
    room = matrix.escapes.numel()
    library = native_library()
    if library is None:
        coded, starts, escapes, book = encode_reference(weight_NK)
        if escapes.numel() <= room:
            matrix.coded.copy_(coded)
            matrix.starts.copy_(starts)
            matrix.escapes[: escapes.numel()].copy_(escapes)
            matrix.book.copy_(book)
        return escapes.numel()
    book, num_escapes = _book_of(library, weight_NK)
    if num_escapes + TAIL_BYTES <= room:
        matrix.book.copy_(book)
        parts = matrix.book, matrix.coded, matrix.starts, matrix.escapes
        found = library.planes_encode(*_source(weight_NK), *(part.data_ptr() for part in parts))
        assert found == num_escapes
    return num_escapes + TAIL_BYTES


def _require_bf16(weight_NK: Tensor) -> None:
    if weight_NK.dtype != torch.bfloat16 or weight_NK.ndim != 2 or not weight_NK.is_cpu:
        raise ValueError(
            "the lossless code is for bf16 matrices [N, K] on the CPU, got "
            f"{weight_NK.dtype} {list(weight_NK.shape)} on {weight_NK.device}"
        )
    if weight_NK.stride(-1) != 1 and weight_NK.shape[-1] > 1:
        raise ValueError(f"expected unit stride along K, got strides {weight_NK.stride()}")


def decode_planes(matrix: PlanesMatrix) -> Tensor:
    """The original matrix, `bf16 [N, K]`; in plain torch except on a CPU.

    Raises:
        CheckpointError: The parts contradict each other, so bytes were lost or changed.
    """
    library = native_library()
    if library is None or not matrix.coded.is_cpu:
        found = decode_reference(
            matrix.coded, matrix.starts, matrix.escapes, matrix.book, matrix.num_cols
        )
    else:
        found = _decode_native(library, matrix)
    if found is None:
        raise CheckpointError(
            f"a coded matrix of {len(matrix.coded)} x {matrix.num_cols} is damaged: its escapes "
            "do not fit its rows; write the packed checkpoint again"
        )
    return found


def _encode_native(library: NativeLibrary, weight_NK: Tensor) -> tuple[Tensor, ...]:
    rows, cols = weight_NK.shape
    book, room = _book_of(library, weight_NK)
    coded = torch.empty(rows, coded_row_bytes(cols), dtype=torch.uint8)
    starts = torch.empty(num_groups(rows) + 1, dtype=torch.int32)
    escapes = torch.zeros(room + TAIL_BYTES, dtype=torch.uint8)
    places = (part.data_ptr() for part in (book, coded, starts, escapes))
    found = library.planes_encode(*_source(weight_NK), *places)
    assert found == room
    return coded, starts, escapes, book


def _book_of(library: NativeLibrary, weight_NK: Tensor) -> tuple[Tensor, int]:
    """The exponents with an index, and the number of weights with another exponent."""
    counts = torch.zeros(256, dtype=torch.int64)
    library.planes_count(*_source(weight_NK), counts.data_ptr())
    book = choose_book(counts)
    return book, weight_NK.numel() - int(counts[book[: BOOK_SIZE - 1].long()].sum())


def _source(weight_NK: Tensor) -> tuple[int, int, int, int]:
    rows, cols = weight_NK.shape
    return weight_NK.data_ptr(), weight_NK.stride(0) * 2, rows, cols


def _decode_native(library: NativeLibrary, matrix: PlanesMatrix) -> Tensor | None:
    rows, cols = matrix.shape
    padded = torch.empty(rows, -(-cols // 64) * 64, dtype=torch.bfloat16)
    status = library.planes_decode(
        matrix.coded.data_ptr(), matrix.starts.data_ptr(), matrix.escapes.data_ptr(),
        matrix.escapes.numel() - TAIL_BYTES, matrix.book.data_ptr(), rows, cols,
        padded.data_ptr(), padded.stride(0) * 2, library.shares_threads(),
    )  # fmt: skip
    return padded[:, :cols] if status == STATUS_OK else None
