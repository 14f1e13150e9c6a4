"""The bytes of one expert in training: its weights, their two moments and their gradient.

A record has four sections of one size: parameters, first moment, second moment, gradient. Each
holds the expert's tensors one after another, every tensor padded with zeros to whole vectors, so
that AdamW treats each element as it would inside a large tensor: the last, partly filled vector of
a tensor is computed by other instructions, and may be rounded otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

from moe_runtime.store.layout import BLOCK_BYTES

VECTOR_ELEMENTS = 16
"""Elements that tensors are padded to: the widest vector of fp32 that torch is built for."""


class Sections(IntFlag):
    """Parts of a record, in the order in which they lie."""

    NONE = 0
    PARAMETERS = 1
    MEAN = 2
    VARIANCE = 4
    STATE = 7
    """What a checkpoint holds: parameters and moments."""
    GRADIENT = 8
    ALL = 15


ORDER = (Sections.PARAMETERS, Sections.MEAN, Sections.VARIANCE, Sections.GRADIENT)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of an expert.

    Attributes:
        name: as its module calls the stack of them.
        shape: of one expert's part.
        decays: whether weight decay applies.
    """

    name: str
    shape: tuple[int, ...]
    decays: bool

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class RecordLayout:
    """Where the tensors of one kind of expert lie in a record.

    Args:
        tensors: of one expert, those that decay first.
        dtype: of parameters, moments and gradients: float32, or float64.

    Attributes:
        tensors: as given.
        dtype: as given.
        num_elements: elements of the expert, without padding.
        section_bytes: one section, whole blocks.
        decaying: elements at the beginning of a section that decay, padding included.
        used: elements of a section in use, padding between tensors included.
    """

    def __init__(self, tensors: Sequence[ExpertTensor], dtype: torch.dtype) -> None:
        self.tensors = tuple(tensors)
        self.dtype = dtype
        self.num_elements = sum(tensor.num_elements for tensor in tensors)
        self._starts: list[int] = []
        self.decaying = self.used = 0
        for tensor in tensors:
            assert not tensor.decays or self.decaying == self.used, "what decays comes first"
            self._starts.append(self.used)
            self.used += -(-tensor.num_elements // VECTOR_ELEMENTS) * VECTOR_ELEMENTS
            if tensor.decays:
                self.decaying = self.used
        self.section_bytes = -(-self.used * dtype.itemsize // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def state_bytes(self) -> int:
        """Parameters and moments: what lies on the disk."""
        return 3 * self.section_bytes

    @property
    def record_bytes(self) -> int:
        """All four sections."""
        return 4 * self.section_bytes

    def section(self, record: Tensor, section: Sections) -> Tensor:
        """The bytes of one section of a record (``uint8``)."""
        start = ORDER.index(section) * self.section_bytes
        return record[start : start + self.section_bytes]

    def flat(self, record: Tensor, section: Sections) -> Tensor:
        """One section's elements in use, padding included: ``[used]``."""
        return self.section(record, section).view(self.dtype)[: self.used]

    def views(self, record: Tensor, section: Sections) -> list[Tensor]:
        """The expert's tensors in one section, in their shapes."""
        flat = self.flat(record, section)
        return [
            flat[start : start + tensor.num_elements].view(tensor.shape)
            for start, tensor in zip(self._starts, self.tensors, strict=True)
        ]

    def clear(self, record: Tensor, sections: Sections) -> None:
        """Sets sections to zero."""
        for section in ORDER:
            if section in sections:
                self.section(record, section).zero_()

    def clear_padding(self, record: Tensor, section: Sections) -> None:
        """Sets to zero what lies between and after the tensors of a section."""
        elements = self.section(record, section).view(self.dtype)
        ends = [*self._starts[1:], elements.numel()]
        for start, tensor, end in zip(self._starts, self.tensors, ends, strict=True):
            elements[start + tensor.num_elements : end].zero_()


def checksum(content: Tensor) -> str:
    """A digest of some bytes (``uint8``, a multiple of a block): any changed word changes it.

    Words of a block are summed, modulo 2**64, and the sums hashed: as fast as memory is read, and
    blocks in another order are told apart.
    """
    import hashlib

    sums = content.view(torch.int64).view(-1, BLOCK_BYTES // 8).sum(1)
    return hashlib.blake2b(sums.numpy().tobytes(), digest_size=8).hexdigest()
