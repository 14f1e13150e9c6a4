"""Separate documents as token ids, several of them in a row.

A row has C + 1 tokens, each with its position in its document and its role. If several documents
share a row, attention and positions restart with each, so that none sees another.

Shapes: N rows, C tokens of context, T tokens of all documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList
from torch import Tensor

PADDING, READ, TRAINED = -1, 0, 1
"""The role of a token: none, context only, or a target too."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Documents, none longer than a row.

    Attributes:
        ids, trained: `[T]`: the documents one after another, and whether a token is a target; ids
            are uint16 if all fit, uint32 otherwise.
        ends: `[documents]`: the end of each.
        shares_rows: several documents may share a row.
        routing: `[T, layers * choices]`: the tokens' experts, -1 if unknown; None if all are.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    trained: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64]
    shares_rows: bool
    routing: npt.NDArray[np.int16] | None = None

    @classmethod
    def of(
        cls,
        documents: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]],
        *,
        shares_rows: bool,
        routings: Sequence[npt.NDArray[np.int16] | None] = (),
    ) -> Examples:
        """Joins documents: ids, whether each is a target, and routings of the first tokens."""
        empty = np.zeros(0, np.uint32), np.zeros(0, np.bool_)
        pairs = [(np.asarray(ids, np.uint32), np.asarray(own, np.bool_)) for ids, own in documents]
        ids, trained = (np.concatenate(parts) for parts in zip(empty, *pairs, strict=True))
        is_narrow = not len(ids) or ids.max() < 1 << 16
        ends = np.cumsum([len(own) for own, _ in pairs], dtype=np.int64)
        routing = None
        if (width := next((own.shape[1] for own in routings if own is not None), None)) is not None:
            routing = np.full((len(ids), width), -1, np.int16)
            for end, (own_ids, _), own in zip(ends, pairs, routings, strict=True):
                if own is not None:
                    begin = end - len(own_ids)
                    routing[begin : begin + len(own)] = own
        ids = ids.astype(np.uint16) if is_narrow else ids
        return cls(ids, trained, ends, shares_rows, routing)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def document(self, number: int) -> slice:
        return slice(int(self.ends[number] - self.lengths[number]), int(self.ends[number]))

    def digest(self) -> bytes:
        found = hashlib.sha256()
        for part in (self.ids, self.trained, self.ends, self.routing):
            found.update(b"" if part is None else part.data)
        found.update(bytes([self.shares_rows]))
        return found.digest()

    def row(self, numbers: Sequence[int], context: int) -> npt.NDArray[np.int64]:
        """Documents and then padding: `[C + 1, 3]`, ids, positions, roles, and columns of a
        routing, if there is one."""
        width = 0 if self.routing is None else self.routing.shape[1]
        row = np.zeros((context + 1, 3 + width), np.int64)
        row[:, 2:] = PADDING
        begin = 0
        for number in numbers:
            place = self.document(number)
            part = row[begin : begin + place.stop - place.start]
            part[:, 0] = self.ids[place]
            part[:, 1] = np.arange(len(part))
            part[:, 2] = np.where(self.trained[place], TRAINED, READ)
            if self.routing is not None:
                part[:, 3:] = self.routing[place]
            part[0, 2] = READ  # no token before it predicts it
            begin += len(part)
        row[begin:, 1] = np.arange(context + 1 - begin)
        return row


def ids_of(side: npt.NDArray[Any] | Examples) -> npt.NDArray[Any]:
    return side.ids if isinstance(side, Examples) else side


def packed(examples: Examples, context: int, seed: Sequence[int]) -> list[list[int]]:
    """The documents of each row: longest first, each in the fullest row that has room.

    Source: Johnson, "Near-optimal bin packing algorithms" (1973), best fit decreasing.

    Args:
        seed: orders documents of equal length.
    """
    order = np.random.default_rng(seed).permutation(len(examples.ends))
    if not examples.shares_rows:
        return [[int(number)] for number in order]
    lengths = examples.lengths
    rows: list[list[int]] = []
    room: SortedList = SortedList()  # pairs of free tokens and row
    for number in order[np.argsort(-lengths[order], kind="stable")]:
        length = int(lengths[number])
        place = room.bisect_left((length, -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = context + 1, len(rows)
            rows.append([])
        rows[row].append(int(number))
        if left > length:
            room.add((left - length, row))
    return rows


class ExampleStream:
    """Rows of documents, epoch after epoch; each epoch has its own order of all rows.

    Args:
        context: C; a row has C + 1 tokens, inputs and targets overlap.
        seed: of the orders.
    """

    def __init__(self, examples: Examples, *, context: int, seed: Sequence[int]) -> None:
        self._examples, self._context, self._seed = examples, context, tuple(seed)
        self._rows = packed(examples, context, [*seed, 0])
        self.windows_per_epoch = len(self._rows)
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def window(self, number: int) -> npt.NDArray[np.int64]:
        """The row of this number, counted over all epochs: `[C + 1, 3]`."""
        epoch, place = divmod(number, len(self._rows))
        if epoch != self._epoch:
            random = np.random.default_rng([*self._seed, 1, epoch])
            self._order, self._epoch = random.permutation(len(self._rows)), epoch
        return self._examples.row(self._rows[self._order[place]], self._context)


def trimmed(windows: Tensor) -> Tensor:
    """Windows of `Batches.draw`, without columns that are padding in all rows."""
    if windows.ndim == 2:
        return windows
    return windows[:, : int((windows[..., 2] != PADDING).sum(1).max())]


def held_out_rows(examples: Examples, *, context: int, most_tokens: int) -> npt.NDArray[np.int64]:
    """Rows of held-out documents, each document once: `[N, C + 1, 3]`; the same in every run."""
    rows = packed(examples, context, [0])
    # packed rows begin with the longest documents
    order = np.random.default_rng(0).permutation(len(rows))[: max(1, most_tokens // context)]
    if not rows:
        return np.zeros((0, context + 1, 3), np.int64)
    return np.stack([examples.row(rows[number], context) for number in order])
