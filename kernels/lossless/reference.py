"""The specification of the lossless code of bf16 matrices, in plain torch.

Shape suffixes: N rows, K columns, B blocks of a row, P the 64 positions of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
INDEX_BYTES = 24  # of a block's three bit planes
BOOK_SIZE = 8  # seven exponents, and the index of all others
ESCAPE = BOOK_SIZE - 1
GROUP_ROWS = 32  # rows with one recorded first escape
TAIL_BYTES = 64  # after the last escape, so that vectors may be read from any escape on

_POSITIONS = torch.arange(BLOCK)
# interleaving bytes within 16-byte lanes of vectors gives elements in their order
ELEMENT_OF_POSITION = _POSITIONS // 16 * 8 + _POSITIONS % 8 + (_POSITIONS % 16 // 8) * 32


def coded_row_bytes(num_cols: int) -> int:
    """Bytes of a row without its escapes."""
    return -(-num_cols // BLOCK) * (INDEX_BYTES + BLOCK)


def num_groups(num_rows: int) -> int:
    """Groups of rows; the last one may be short."""
    return -(-num_rows // GROUP_ROWS)


def choose_book(counts_256: Tensor) -> Tensor:
    """The seven most frequent exponents (of equal ones the smaller first), and a zero."""
    order = torch.argsort(counts_256, descending=True, stable=True)
    return torch.cat((order[:ESCAPE], order.new_zeros(1))).to(torch.uint8)


def encode_reference(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`coded`, `starts`, `escapes` and `book` of a `PlanesMatrix` for `bf16 [N, K]`."""
    rows, cols = weight_NK.shape
    bits_NK = weight_NK.contiguous().view(torch.int16).int() & 0xFFFF
    exponents_NK = bits_NK >> 7 & 255
    book = choose_book(torch.bincount(exponents_NK.flatten(), minlength=256))
    blocks = -(-cols // BLOCK)
    # padding must be finite, as it is multiplied by zeros: of two exponents the smaller one is
    padded = bits_NK.new_full((rows, blocks * BLOCK), int(book[:2].min()) << 7)
    padded[:, :cols] = bits_NK
    bits_NBP = padded.view(rows, blocks, BLOCK)[..., ELEMENT_OF_POSITION]
    exponents_NBP = bits_NBP >> 7 & 255
    index_of = torch.full((256,), ESCAPE)
    index_of[book[:ESCAPE].long()] = torch.arange(ESCAPE)
    index_NBP = index_of[exponents_NBP]
    planes = [_bits_to_bytes(index_NBP >> bit & 1) for bit in range(3)]
    indices = torch.cat(planes, dim=-1).flatten(1)
    signs = ((bits_NBP >> 8 & 0x80) | (bits_NBP & 0x7F)).to(torch.uint8).flatten(1)
    is_escape = index_NBP == ESCAPE
    ends = is_escape.flatten(1).sum(dim=1).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends[GROUP_ROWS - 1 :: GROUP_ROWS]))
    if rows % GROUP_ROWS:
        starts = torch.cat((starts, ends[-1:]))
    tail = torch.zeros(TAIL_BYTES, dtype=torch.uint8)
    escapes = torch.cat((exponents_NBP[is_escape].to(torch.uint8), tail))
    return torch.cat((indices, signs), dim=1), starts.int(), escapes, book


def decode_reference(
    coded: Tensor, starts: Tensor, escapes: Tensor, book: Tensor, num_cols: int
) -> Tensor | None:
    """The matrix `bf16 [N, K]` of the parts of a `PlanesMatrix`; None if they do not fit."""
    rows, blocks = len(coded), -(-num_cols // BLOCK)
    planes = coded[:, : blocks * INDEX_BYTES].reshape(rows, blocks, 3, 8)
    bits = [_bytes_to_bits(planes[:, :, bit]) << bit for bit in range(3)]
    index_NBP = bits[0] | bits[1] | bits[2]
    is_escape = index_NBP == ESCAPE
    padded = starts.new_zeros(num_groups(rows) * GROUP_ROWS, dtype=torch.int64)
    padded[:rows] = is_escape.flatten(1).sum(dim=1)
    fits = torch.equal(torch.diff(starts.long()), padded.view(-1, GROUP_ROWS).sum(dim=1))
    if not fits or starts[0] != 0 or int(starts[-1]) > escapes.numel() - TAIL_BYTES:
        return None
    exponents_NBP = book[index_NBP.int()]
    exponents_NBP[is_escape] = escapes[: int(starts[-1])]
    signs_NBP = coded[:, blocks * INDEX_BYTES :].reshape(rows, blocks, BLOCK)
    bits_NBP = (signs_NBP & 0x80).short() << 8 | exponents_NBP.short() << 7
    bits_NBP |= signs_NBP & 0x7F
    in_order = torch.empty_like(bits_NBP)
    in_order[..., ELEMENT_OF_POSITION.to(coded.device)] = bits_NBP
    bits_NK = in_order.flatten(1)[:, :num_cols]
    return bits_NK.contiguous().view(torch.bfloat16)


def _bits_to_bytes(bits: Tensor) -> Tensor:
    """`[..., 64]` bits as `uint8 [..., 8]`, the first bit lowest."""
    weights = 1 << torch.arange(8)
    return (bits.view(*bits.shape[:-1], 8, 8) * weights).sum(dim=-1).to(torch.uint8)


def _bytes_to_bits(packed: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten(-2)
