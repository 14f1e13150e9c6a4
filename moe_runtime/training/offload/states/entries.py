"""What is known of every expert, of every slot in use, and of the bytes that moved."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_runtime.memory.reads import Read
from moe_runtime.training.offload.states.records import RecordLayout, Sections


@dataclass(slots=True)
class Version:
    """One state of an expert on the disk.

    Attributes:
        slot: where it lies.
        step: optimizer step up to which it goes.
        count: updates that the expert had.
        digest: checksum of its bytes.
        pending: step whose gradient is kept in it for the step after; None if there is none.
        is_written: whether all of its bytes were given to the disk.
        sections: checksum of each section, which is compared whenever the section is read.
    """

    slot: int
    step: int
    count: int
    digest: str = ""
    pending: int | None = None
    is_written: bool = False
    sections: dict[Sections, str] = field(default_factory=dict)


@dataclass(slots=True)
class ExpertState:
    """One expert.

    Attributes:
        layout: of its record.
        version: the newest on the disk; None before the first.
        previous: the one before the step under way, where that wrote a new one.
        step: step up to which its tier goes.
        count: updates that it had.
        pending: step whose gradient its tier keeps for the step after.
        resident_slot: its slot in memory; None when its tier is the disk.
        is_saved: for a tier in memory: whether `version` has the same content.
        has_gradient: whether a gradient waits in its tier.
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
    captures: set[Read] = field(default_factory=set)

    def take_over(self, version: Version) -> None:
        """Its tier has become what a version is."""
        self.step, self.count, self.pending = version.step, version.count, version.pending


@dataclass(slots=True)
class RingEntry:
    """One slot of the ring.

    Attributes:
        slot: its number.
        step: step up to which its content goes.
        have: sections that are valid or arriving.
        fresh: sections that were read and not asked for since.
        pins: acquisitions.
        reads: those that have not ended, and the sections that each brings.
        writes: those that have not ended.
    """

    slot: int
    step: int
    have: Sections = Sections.NONE
    fresh: Sections = Sections.NONE
    pins: int = 0
    reads: dict[Read, Sections] = field(default_factory=dict)
    writes: set[Read] = field(default_factory=set)

    @property
    def arriving(self) -> Sections:
        """Sections on their way."""
        sections = Sections.NONE
        for brought in self.reads.values():
            sections |= brought
        return sections

    @property
    def is_moving(self) -> bool:
        """Whether a read or a write is under way."""
        return bool(self.reads or self.writes)

    @property
    def is_idle(self) -> bool:
        """Whether the slot could be given to another expert."""
        return self.pins == 0 and not self.is_moving

    def forget(self, sections: Sections) -> None:
        """Sections of it are not valid."""
        self.have &= ~sections
        self.fresh &= ~sections


@dataclass(slots=True)
class Traffic:
    """Bytes by way, whole sections; every needed byte is resident, reused or read.

    Not `ExpertCounters`, which count requests: a record's sections come by different ways.

    Attributes:
        needed_bytes: sections that computation asked for.
        resident_bytes: of them, those whose tier is memory.
        reused_bytes: of them, those that still lay in a slot.
        useful_bytes: of them, those that were read from the disk for this use.
        read_bytes: read from the disk: useful, wasted, or not asked for yet.
        wasted_bytes: read ahead and given up without having been asked for.
        written_bytes: written to the disk.
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
        """Counts sections that are asked for now."""
        self.needed_bytes += layout.bytes_of(need)
        self.useful_bytes += layout.bytes_of(need & entry.fresh)
        self.reused_bytes += layout.bytes_of(need & ~entry.fresh)
        entry.fresh &= ~need

    def by_way(self) -> dict[str, float]:
        """Seconds of waiting, and bytes found in memory, read and written, by name."""
        return {
            "stall_s": self.stall_s,
            "memory_bytes": self.resident_bytes + self.reused_bytes,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
        }

    def mend(self, fresh_bytes: int) -> None:
        """Has the counters add up again after an exception between two of them.

        Args:
            fresh_bytes: read and neither asked for nor given up so far.
        """
        self.needed_bytes = self.resident_bytes + self.reused_bytes + self.useful_bytes
        self.read_bytes = self.useful_bytes + self.wasted_bytes + fresh_bytes

    def check(self, fresh_bytes: int) -> None:
        """Proves that the counters add up.

        Args:
            fresh_bytes: read and neither asked for nor given up so far.

        Raises:
            AssertionError: they do not.
        """
        assert self.needed_bytes == self.resident_bytes + self.reused_bytes + self.useful_bytes
        assert self.read_bytes == self.useful_bytes + self.wasted_bytes + fresh_bytes
