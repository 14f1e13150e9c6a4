"""The bytes of one expert in training: its weights, their two moments and their gradient.

Parameters and gradient hold the expert's tensors one after another, every tensor padded with zeros
to whole vectors. AdamW then rounds each element as inside a large tensor: other instructions
compute a last, partly filled vector. Moments may be compressed, belong to a projection of the
gradient, or be absent.

A step decodes the moments of some elements, updates them in the parameters' dtype, and encodes them
again. Missed steps that are taken later pass through the format one by one too, so tiers change no
bit.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_runtime.config import nearest
from moe_runtime.errors import CheckpointError
from moe_runtime.memory.reads import Transfer
from moe_runtime.memory.source import BLOCK_BYTES
from moe_runtime.types import ExpertKey

MomentStorage = Literal["full", "bf16", "fp8"]

CHUNK_ELEMENTS = 2**18
"""Elements decoded at once, few enough for the cache. A multiple of `GROUP_ELEMENTS`."""

GROUP_ELEMENTS = 128
"""Neighbouring elements that share an exponent and a scale in fp8."""

_E4M3_MAX = 448.0
_E4M3_RANGE = _E4M3_MAX / 2.0**-9
_MOST_EXPANSION = 16.0


class MomentCodec:
    """Moments as bytes; this class keeps them in the dtype of the parameters, in place."""

    is_exact = True

    def num_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def decode(self, stored: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Elements `[start, stop)`, in `dtype`; `start` is a multiple of `CHUNK_ELEMENTS`."""
        return stored.view(dtype)[start:stop]

    def encode(self, values: Tensor, stored: Tensor, start: int, step: int, salt: int) -> None:
        """Stores elements from `start` on; `step` and `salt` (of the moment) seed the rounding."""


class Bf16Moments(MomentCodec):
    """bf16 with stochastic rounding, which has no bias.

    Rounding to the nearest would freeze a second moment: with `beta2 = 0.999` a step moves it by a
    thousandth, and neighbours in bf16 are up to 1/128 apart. The random numbers are a hash of the
    element's place and the step, so a run repeats to the bit.
    """

    is_exact = False

    def num_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * elements

    def decode(self, stored: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return stored.view(torch.bfloat16)[start:stop].to(dtype)

    def encode(self, values: Tensor, stored: Tensor, start: int, step: int, salt: int) -> None:
        halves = stored.view(torch.int16)
        for begin in range(0, len(values), CHUNK_ELEMENTS):
            some = values[begin : begin + CHUNK_ELEMENTS].float()
            bits = some.view(torch.int32) + _dice(step, salt, some)
            place = start + begin
            halves[place : place + len(some)] = (bits >> 16).to(torch.int16)


class Fp8Moments(MomentCodec):
    """E4M3 with COAT's dynamic range expansion, in groups of 128 elements.

    A group stores `sign(x) (|x| / max)^k`, scaled to E4M3's largest number, and `max` and `k` in
    fp32. `k` makes the group's range fill that of the format; zeros do not count, and `k` is at
    most 16. COAT never goes below `k = 1`; here a group wider than the format is compressed, since
    a second moment of zero would divide a step by `eps`.

    Source: Xi et al., "COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8
    Training" (2024).
    """

    is_exact = False
    _ROW_BYTES = GROUP_ELEMENTS + 8

    def num_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return -(-elements // GROUP_ELEMENTS) * self._ROW_BYTES

    def decode(self, stored: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        codes_GN, scales_G2 = self._rows(stored, start, stop - start)
        largest_G1, power_G1 = scales_G2[:, :1], scales_G2[:, 1:]
        codes = codes_GN.float() / _E4M3_MAX
        values = codes.abs().log2_().div_(power_G1).exp2_().mul_(largest_G1).copysign_(codes)
        return values.view(-1)[: stop - start].to(dtype)

    def encode(self, values: Tensor, stored: Tensor, start: int, step: int, salt: int) -> None:
        codes_GN, scales_G2 = self._rows(stored, start, len(values))
        padded = torch.nn.functional.pad(values.float(), (0, codes_GN.numel() - len(values)))
        x_GN = padded.view(-1, GROUP_ELEMENTS)
        sizes = x_GN.abs()
        largest_G1 = sizes.amax(1, keepdim=True)
        is_zero = sizes == 0
        smallest_G1 = sizes.masked_fill(is_zero, math.inf).amin(1, keepdim=True)
        logs = sizes.log2_().sub_(largest_G1.log2())
        power_G1 = math.log2(_E4M3_RANGE) / (largest_G1.log2() - smallest_G1.log2())
        power_G1 = power_G1.nan_to_num_(nan=1.0).clamp_(max=_MOST_EXPANSION)
        # a group of zeros has no range and no logarithm
        power_G1.masked_fill_(largest_G1 == 0, 1.0)
        expanded = logs.mul_(power_G1).exp2_().masked_fill_(is_zero, 0).mul_(_E4M3_MAX)
        codes_GN.copy_(expanded.copysign_(x_GN).to(torch.float8_e4m3fn))
        scales_G2[:, :1], scales_G2[:, 1:] = largest_G1, power_G1

    def _rows(self, stored: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Codes `[G, 128]` and scales `[G, 2]` of the groups that hold some elements."""
        first, groups = start // GROUP_ELEMENTS, -(-length // GROUP_ELEMENTS)
        rows = stored[first * self._ROW_BYTES : (first + groups) * self._ROW_BYTES]
        rows = rows.view(groups, self._ROW_BYTES)
        codes = rows[:, :GROUP_ELEMENTS].view(torch.float8_e4m3fn)
        return codes, rows[:, GROUP_ELEMENTS:].view(torch.float32)


_CODECS = {"full": MomentCodec, "bf16": Bf16Moments, "fp8": Fp8Moments}


def moment_codec(storage: MomentStorage) -> MomentCodec:
    if storage not in _CODECS:
        raise ValueError(
            f"moments is {storage!r}; {nearest(str(storage), get_args(MomentStorage))}"
        )
    return _CODECS[storage]()


def _dice(step: int, salt: int, like: Tensor) -> Tensor:
    """A number in [0, 2**16) for each element of a chunk (``int32``), on its device."""
    factor = _mix(2 * step + salt) | 1
    # torch multiplies signed numbers
    factor = factor - 2**32 if factor >= 2**31 else factor
    return (_hashed_places(like.device)[: len(like)] * factor >> 16) & 0xFFFF


@functools.cache
def _hashed_places(device: torch.device) -> Tensor:
    places = torch.arange(CHUNK_ELEMENTS, dtype=torch.int64, device=device)
    for shift in (16, 15, 16):
        places = ((places ^ (places >> shift)) * 0x45D9F3B + 0x9E3779B9) & 0xFFFFFFFF
    return torch.where(places >= 2**31, places - 2**32, places).to(torch.int32)


def _mix(number: int) -> int:
    """A hash of 32 bits (the finaliser of MurmurHash3)."""
    number = (number + 0x9E3779B9) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        number = ((number ^ (number >> shift)) * factor) & 0xFFFFFFFF
    return number


VECTOR_ELEMENTS = 16
"""Tensors are padded to multiples of it: the widest vector of fp32 that torch is built for."""


class Sections(IntFlag):
    NONE = 0
    PARAMETERS = 1
    MEAN = 2
    VARIANCE = 4
    STATE = 7
    """Parameters and moments, which a checkpoint holds."""
    GRADIENT = 8
    ALL = 15


ORDER = (Sections.PARAMETERS, Sections.MEAN, Sections.VARIANCE, Sections.GRADIENT)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of an expert, by the name of its stack in the module.

    A frozen one has neither gradient nor moments.
    """

    name: str
    shape: tuple[int, ...]
    decays: bool
    is_trained: bool = True

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """Contents of a record besides parameters.

    Attributes:
        rank: of the projection of matrices that moments belong to (GaLore); 0 without one.
        keeps_gradient: a gradient is part of the state, for the next step (delayed updates).
        trains: there are moments and a gradient.
    """

    moments: MomentStorage = "full"
    rank: int = 0
    keeps_gradient: bool = False
    trains: bool = True

    def __str__(self) -> str:
        if not self.trains:
            return "parameters alone"
        words = [f"{self.moments} moments"]
        if self.rank:
            words.append(f"of rank {self.rank}")
        if self.keeps_gradient:
            words.append("and a gradient for the next step")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class MomentSpan:
    """Elements of one tensor's moments, with padding; `shape` is that of its projection, if any."""

    shape: tuple[int, ...]
    start: int
    stop: int


class RecordLayout:
    """Where the tensors of one kind of expert lie in a record.

    Args:
        tensors: of one expert. Trained ones that decay lie first, frozen ones last.
        dtype: of parameters and gradients: float32, or float64.

    Attributes:
        num_elements: elements of the expert, without padding.
        decaying: elements at the beginning of a section that decay, with padding.
        used: elements of trained tensors, with padding.
        num_moments: elements of each moment, with padding.
        state_bytes: of parameters and moments, which lie on the disk.
    """

    def __init__(
        self, tensors: Sequence[ExpertTensor], dtype: torch.dtype, state: StateFormat | None = None
    ) -> None:
        self.tensors = tuple(tensors)
        self.trained = tuple(tensor for tensor in tensors if tensor.is_trained)
        self.dtype = dtype
        self.state = state or StateFormat()
        self.codec = moment_codec(self.state.moments)
        self.num_elements = sum(tensor.num_elements for tensor in tensors)
        self._starts: dict[str, int] = {}
        self.spans: list[MomentSpan] = []
        self.decaying = self.used = self.num_moments = end = 0
        for tensor in sorted(tensors, key=lambda t: (not t.is_trained, not t.decays)):
            self._starts[tensor.name] = end
            end += _whole_vectors(tensor.num_elements)
            if tensor.is_trained:
                self.used = end
                self.decaying = end if tensor.decays else self.decaying
        for tensor in self.trained:
            shape = projected_shape(tensor.shape, self.state.rank)
            start = self.num_moments
            self.num_moments += _whole_vectors(math.prod(shape))
            self.spans.append(MomentSpan(shape, start, self.num_moments))
        self.section_bytes = _whole_blocks(end * dtype.itemsize)
        self._sizes = self._measure()
        self.state_bytes = self.bytes_of(Sections.STATE)
        self.record_bytes = self.bytes_of(Sections.ALL)

    def _measure(self) -> dict[Sections, int]:
        if not self.state.trains:
            return dict.fromkeys(ORDER, 0) | {Sections.PARAMETERS: self.section_bytes}
        moment = _whole_blocks(self.codec.num_bytes(self.num_moments, self.dtype))
        gradient = _whole_blocks(self.used * self.dtype.itemsize)
        kept = gradient if self.state.keeps_gradient else 0
        bases = sum(math.prod(shape) for shape in self._basis_shapes() if shape)
        return {
            Sections.PARAMETERS: self.section_bytes,
            Sections.MEAN: moment + _whole_blocks(bases * self.dtype.itemsize) + kept,
            Sections.VARIANCE: moment,
            Sections.GRADIENT: gradient,
        }

    def bytes_of(self, sections: Sections) -> int:
        return sum(size for section, size in self._sizes.items() if section in sections)

    def place_of(self, section: Sections) -> tuple[int, int]:
        """First byte of a section in a record, and one past its last."""
        start = sum(self._sizes[before] for before in ORDER[: ORDER.index(section)])
        return start, start + self._sizes[section]

    def section(self, record: Tensor, section: Sections) -> Tensor:
        """The bytes of one section of a record (``uint8``)."""
        start, stop = self.place_of(section)
        return record[start:stop]

    def flat(self, record: Tensor, section: Sections) -> Tensor:
        """Trained parameters or their gradient, with padding: ``[used]``."""
        assert section in Sections.PARAMETERS | Sections.GRADIENT, "moments have a codec"
        return self.section(record, section).view(self.dtype)[: self.used]

    def views(self, record: Tensor, section: Sections) -> dict[str, Tensor]:
        """The expert's parameters, or gradients of the trained ones, in their shapes, by name."""
        tensors = self.tensors if section == Sections.PARAMETERS else self.trained
        cut = self._cut(self.section(record, section).view(self.dtype), tensors)
        return {tensor.name: view for tensor, view in zip(tensors, cut, strict=True)}

    def split(self, flat: Tensor) -> list[Tensor]:
        return self._cut(flat, self.trained)

    def _cut(self, flat: Tensor, tensors: Sequence[ExpertTensor]) -> list[Tensor]:
        starts = [self._starts[tensor.name] for tensor in tensors]
        return [
            flat[start : start + tensor.num_elements].view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def moment(self, record: Tensor, section: Sections) -> Tensor:
        return self.section(record, section)[: self._sizes[Sections.VARIANCE]]

    def bases(self, record: Tensor) -> list[Tensor | None]:
        """For each trained tensor, the basis of its gradient's subspace, or None."""
        start = self._sizes[Sections.VARIANCE]
        content = self.section(record, Sections.MEAN)[start:].view(self.dtype)
        found, first = [], 0
        for shape in self._basis_shapes():
            size = math.prod(shape)
            found.append(content[first : first + size].view(shape) if shape else None)
            first += size if shape else 0
        return found

    def kept_gradient(self, record: Tensor) -> Tensor:
        """The gradient that is part of the state: ``[used]``."""
        section = self.section(record, Sections.MEAN)
        start = len(section) - self._sizes[Sections.GRADIENT]
        return section[start:].view(self.dtype)[: self.used]

    def checksums(self, record: Tensor) -> tuple[str, dict[Sections, str]]:
        sums = _block_sums(record[: self.state_bytes])
        places = {section: self.place_of(section) for section in ORDER[:3]}
        return _hashed(sums), {
            section: _hashed(sums[start // BLOCK_BYTES : stop // BLOCK_BYTES])
            for section, (start, stop) in places.items()
        }

    def clear(self, record: Tensor, sections: Sections) -> None:
        for section in ORDER:
            if section in sections:
                self.section(record, section).zero_()

    def clear_padding(self, record: Tensor) -> None:
        """Sets the padding of the gradient to zero."""
        elements = self.section(record, Sections.GRADIENT).view(self.dtype)
        placed = sorted(self.trained, key=lambda tensor: self._starts[tensor.name])
        starts = [self._starts[tensor.name] for tensor in placed]
        for start, tensor, end in zip(starts, placed, [*starts[1:], len(elements)], strict=True):
            elements[start + tensor.num_elements : end].zero_()

    def _basis_shapes(self) -> list[tuple[int, ...]]:
        return [
            (min(tensor.shape), self.state.rank) if span.shape != tensor.shape else ()
            for tensor, span in zip(self.trained, self.spans, strict=True)
        ]


def projected_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Shape of a matrix' gradient in a subspace of its smaller side; other shapes as they are."""
    if not rank or len(shape) != 2 or rank >= min(shape):
        return shape
    return (rank, shape[1]) if shape[0] <= shape[1] else (shape[0], rank)


def _whole_vectors(elements: int) -> int:
    return -(-elements // VECTOR_ELEMENTS) * VECTOR_ELEMENTS


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def checksum(content: Tensor) -> str:
    """A digest of bytes (``uint8``, a multiple of a block): any changed word changes it.

    It hashes the sums of each block's words, modulo 2**64, as fast as memory is read.
    """
    return _hashed(_block_sums(content))


def _block_sums(content: Tensor) -> Tensor:
    return content.view(torch.int64).view(-1, BLOCK_BYTES // 8).sum(1)


def _hashed(sums: Tensor) -> str:
    return hashlib.blake2b(sums.numpy().tobytes(), digest_size=8).hexdigest()


@dataclass(slots=True)
class Version:
    """One state of an expert on the disk.

    Attributes:
        step: the last optimizer step applied to it.
        pending: step whose gradient it keeps for the next step.
        is_written: all of its bytes were given to the disk.
        sections: checksum of each section, compared whenever the section is read.
    """

    slot: int
    step: int
    count: int
    digest: str = ""
    pending: int | None = None
    is_written: bool = False
    sections: dict[Sections, str] = field(default_factory=dict)


@dataclass(slots=True)
class RecordStatus:
    """One expert.

    Attributes:
        version: the newest on the disk; None before the first.
        previous: the one before this step, if this step wrote a new one.
        step: the last optimizer step applied to its tier.
        pending: step whose gradient its tier keeps for the next step.
        resident_slot: its slot in memory; None when its tier is the disk.
        is_saved: for a tier in memory: `version` has the same content.
        has_gradient: a gradient waits in its tier.
        captures: writes of its tier in memory that have not ended.
    """

    layout: RecordLayout
    version: Version | None = None
    previous: Version | None = None
    step: int = 0
    count: int = 0
    pending: int | None = None
    resident_slot: int | None = None
    is_saved: bool = False
    has_gradient: bool = False
    captures: set[Transfer] = field(default_factory=set)

    def take_over(self, version: Version) -> None:
        self.step, self.count, self.pending = version.step, version.count, version.pending


@dataclass(slots=True)
class RingEntry:
    """One slot of the ring.

    Attributes:
        step: the last optimizer step applied to its content.
        fresh: sections that were read and not used since.
        reads: sections that each unfinished read brings.
    """

    slot: int
    step: int
    have: Sections = Sections.NONE
    fresh: Sections = Sections.NONE
    pins: int = 0
    reads: dict[Transfer, Sections] = field(default_factory=dict)
    writes: set[Transfer] = field(default_factory=set)

    @property
    def arriving(self) -> Sections:
        return functools.reduce(operator.or_, self.reads.values(), Sections.NONE)

    @property
    def is_moving(self) -> bool:
        return bool(self.reads or self.writes)

    @property
    def is_idle(self) -> bool:
        return self.pins == 0 and not self.is_moving

    def forget(self, sections: Sections) -> None:
        self.have &= ~sections
        self.fresh &= ~sections


@dataclass(slots=True)
class Traffic:
    """Bytes by route, in whole sections; every needed byte is resident, reused or read.

    Attributes:
        needed_bytes: of sections that computation used.
        resident_bytes: of them, those whose tier is memory.
        reused_bytes: of them, those still in a slot of the ring.
        useful_bytes: of them, those read from the disk for this use.
        read_bytes: read from the disk: useful, wasted, or not used yet.
        wasted_bytes: read ahead and dropped unused.
        stall_s: seconds that computation waited for a transfer.
    """

    needed_bytes: int = 0
    resident_bytes: int = 0
    reused_bytes: int = 0
    useful_bytes: int = 0
    read_bytes: int = 0
    wasted_bytes: int = 0
    written_bytes: int = 0
    stall_s: float = field(default=0.0)

    def count_use(self, entry: RingEntry, need: Sections, layout: RecordLayout) -> None:
        self.needed_bytes += layout.bytes_of(need)
        self.useful_bytes += layout.bytes_of(need & entry.fresh)
        self.reused_bytes += layout.bytes_of(need & ~entry.fresh)
        entry.fresh &= ~need

    def recount(self, fresh_bytes: int) -> None:
        """Makes the sums right again after an exception; `fresh_bytes` were read but not used."""
        self.needed_bytes = self.resident_bytes + self.reused_bytes + self.useful_bytes
        self.read_bytes = self.useful_bytes + self.wasted_bytes + fresh_bytes

    def check(self, fresh_bytes: int) -> None:
        assert self.needed_bytes == self.resident_bytes + self.reused_bytes + self.useful_bytes
        assert self.read_bytes == self.useful_bytes + self.wasted_bytes + fresh_bytes


def records_path(folder: Path, layout: RecordLayout) -> Path:
    return folder / f"experts-{layout.state_bytes}.records"


def check_digest(path: Path, key: ExpertKey, version: Version, content: Tensor) -> None:
    found = checksum(content)
    if found != version.digest:
        raise CheckpointError(
            f"{path}: expert {key.expert} of MoE layer {key.layer} is damaged: its checksum is "
            f"{found}, the checkpoint says {version.digest}"
        )
