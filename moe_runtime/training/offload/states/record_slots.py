"""Slots of host memory: tiers of some experts, and a ring that the others pass through.

What is needed next is said beforehand (`expect`), so that it arrives while other experts compute.

The lock is that of the stores of `moe_runtime.memory`. Their cache is not used here: it moves whole
experts in one direction and chooses by a policy, while records come and go by sections, are changed
in their slots and written back as versions, in an order that is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from torch import Tensor

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.reads import Monitor, Priority, Read
from moe_runtime.memory.slab import Slab
from moe_runtime.training.offload.states.disk import Disk
from moe_runtime.training.offload.states.entries import ExpertState, RingEntry, Traffic, Version
from moe_runtime.training.offload.states.records import BLOCK_BYTES, RecordLayout, Sections
from moe_runtime.types import ExpertKey

MIN_RING_SLOTS = 3
"""Fewest slots between disk and computation: one in use, one being filled, one being written."""

Need = tuple[ExpertKey, Sections]


class RecordSlots:
    """Records of all experts, in host memory and on the disk, and how they come and go.

    One thread at a time may compute with records; transfers run beside it.

    Args:
        layouts: of every expert's record.
        resident: experts whose tier is host memory.
        ring_slots: slots for the others; 0 if there are none.
        disk: where the others lie; None when all are resident.
    """

    def __init__(
        self,
        layouts: Mapping[ExpertKey, RecordLayout],
        *,
        resident: Sequence[ExpertKey],
        ring_slots: int,
        disk: Disk | None,
    ) -> None:
        if len(resident) < len(layouts) and (disk is None or ring_slots < MIN_RING_SLOTS):
            raise ValueError(
                f"experts on the disk need a folder and at least {MIN_RING_SLOTS} slots, "
                f"got {ring_slots}"
            )
        self.disk = disk
        self.experts = {key: ExpertState(layout) for key, layout in layouts.items()}
        sizes = (layout.record_bytes for layout in layouts.values())
        slot_bytes = max(sizes, default=BLOCK_BYTES)
        self._slab = Slab(ring_slots + len(resident), slot_bytes)
        for slot, key in enumerate(resident, start=ring_slots):
            self.experts[key].resident_slot = slot
        self._free = list(range(ring_slots))
        self._entries: OrderedDict[ExpertKey, RingEntry] = OrderedDict()
        self._expected: deque[Need] = deque()
        self._changed = Monitor(self._mend)
        self._failure: MoERuntimeError | None = None
        self.traffic = Traffic()

    @property
    def slab(self) -> Slab:
        """All slots, for who locks them in place."""
        return self._slab

    def expect(self, needs: Iterable[Need]) -> None:
        """Says which sections will be acquired next, in order; replaces what was said before."""
        with self._changed:
            self._expected = deque(
                (key, need) for key, need in needs if self.experts[key].resident_slot is None
            )
            self._read_ahead()

    def acquire(self, key: ExpertKey, need: Sections, *, writes: bool = False) -> Tensor:
        """The record of an expert with the needed sections filled in; `release` gives it back.

        Args:
            key: the expert.
            need: sections to be read; others may hold anything.
            writes: whether STATE sections will be changed: waits until none is being written.

        Raises:
            MoERuntimeError: a transfer failed.
        """
        expert = self.experts[key]
        with self._changed:
            if expert.resident_slot is not None:
                self.traffic.needed_bytes += self._bytes(key, need)
                self.traffic.resident_bytes += self._bytes(key, need)
                self._wait_for(lambda: not (writes and expert.captures))
                return self._slab.slot(expert.resident_slot)
            while self._expected and self._expected[0][0] == key:
                self._expected.popleft()
            entry = self._entries.get(key) or self._admit(key)
            self._entries.move_to_end(key)
            entry.pins += 1
            self._start_read(key, entry, need, Priority.DEMAND)
            self._read_ahead()
            try:
                self._wait_for(
                    lambda: not (entry.arriving & need) and not (writes and entry.is_moving)
                )
            except MoERuntimeError:
                entry.pins -= 1
                raise
            self.traffic.count_use(entry, need, expert.layout)
            return self._slab.slot(entry.slot)

    def release(self, key: ExpertKey, *, has: Sections = Sections.NONE) -> None:
        """Gives a record back.

        Args:
            key: the expert.
            has: sections that were filled in by computation and are valid now.
        """
        with self._changed:
            if self.experts[key].resident_slot is None:
                entry = self._entries[key]
                entry.pins -= 1
                entry.have |= has
                self._read_ahead()

    def content_step(self, key: ExpertKey) -> int:
        """Step up to which the nearest copy of a record goes."""
        entry = self._entries.get(key)
        return self.experts[key].step if entry is None else entry.step

    def set_content_step(self, key: ExpertKey, step: int) -> None:
        """The acquired record was brought to a step; a tier in memory keeps it."""
        with self._changed:
            if (entry := self._entries.get(key)) is not None:
                entry.step = step
            else:
                self.experts[key].step = step
                self.experts[key].is_saved = False

    def wait_for_transfers(self) -> None:
        """Returns when nothing is being read or written.

        Raises:
            MoERuntimeError: a transfer failed.
        """
        with self._changed:
            self._expected.clear()
            self._wait_for(
                lambda: (
                    not any(entry.is_moving for entry in self._entries.values())
                    and not any(expert.captures for expert in self.experts.values())
                )
            )

    def close(self) -> None:
        """Ends the transfers; what was expected is not read any more."""
        with self._changed:
            self._expected.clear()
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        """Proves that every slot of memory and every byte is accounted for.

        Raises:
            AssertionError: the entries contradict each other.
        """
        with self._changed:
            used = [entry.slot for entry in self._entries.values()]
            resident = [
                expert.resident_slot
                for expert in self.experts.values()
                if expert.resident_slot is not None
            ]
            assert sorted(used + self._free + resident) == list(range(self._slab.num_slots))
            self.traffic.check(self._fresh_bytes())
            assert all(entry.pins >= 0 for entry in self._entries.values())

    # What follows is called with the lock held.

    def _mend(self) -> None:
        """After an exception: what was not started does not come, and slots of nobody are free.

        `abandon` takes pins back.
        """
        for key in [key for key in self._entries if self.experts[key].resident_slot is not None]:
            del self._entries[key]
        for entry in self._entries.values():
            for read in self._not_started(entry.reads):
                entry.forget(entry.reads[read])
                del entry.reads[read]
            entry.writes.difference_update(self._not_started(entry.writes))
        used = {entry.slot for entry in self._entries.values()}
        for expert in self.experts.values():
            expert.captures.difference_update(self._not_started(expert.captures))
            used.add(-1 if expert.resident_slot is None else expert.resident_slot)
        self._free = [slot for slot in range(self._slab.num_slots) if slot not in used]
        self.traffic.mend(self._fresh_bytes())

    def _not_started(self, transfers: Iterable[Read]) -> list[Read]:
        return [one for one in transfers if not self._on_disk.is_under_way(one)]

    def _fresh_bytes(self) -> int:
        return sum(self._bytes(key, entry.fresh) for key, entry in self._entries.items())

    @property
    def _on_disk(self) -> Disk:
        assert self.disk is not None, "there is no disk"
        return self.disk

    def _bytes(self, key: ExpertKey, sections: Sections) -> int:
        return self.experts[key].layout.bytes_of(sections)

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        started = time.perf_counter()
        while self._failure is None and not is_done():
            self._changed.wait()
        self.traffic.stall_s += time.perf_counter() - started
        if self._failure is not None:
            raise self._failure

    def _admit(self, key: ExpertKey) -> RingEntry:
        """A slot for an expert that is needed now, unless one is read ahead while this waits."""
        self._wait_for(
            lambda: (
                key in self._entries or bool(self._free) or self._make_room(may_drop_expected=True)
            )
        )
        return self._entries.get(key) or self._enter(key)

    def _enter(self, key: ExpertKey) -> RingEntry:
        entry = RingEntry(self._free.pop(), self.experts[key].step)
        self._entries[key] = entry
        return entry

    def _make_room(self, *, may_drop_expected: bool) -> bool:
        """Gives up the slot that was used longest ago, or what is expected last."""
        expected = [key for key, _ in islice(self._expected, self._slab.num_slots)]
        idle = [key for key, entry in self._entries.items() if entry.is_idle]
        victim = next((key for key in idle if key not in expected), None)
        if victim is None and may_drop_expected and idle:
            victim = max(idle, key=expected.index)
        if victim is None:
            return False
        self._drop(victim)
        return True

    def _drop(self, key: ExpertKey) -> None:
        entry = self._entries.pop(key)
        self.traffic.wasted_bytes += self._bytes(key, entry.fresh)
        self._free.append(entry.slot)

    def _read_ahead(self) -> None:
        """Starts reads of what is expected next, as far as there are slots."""
        for key, need in self._expected:
            entry = self._entries.get(key)
            if entry is None:
                if not self._free and not self._make_room(may_drop_expected=False):
                    return
                entry = self._enter(key)
            self._start_read(key, entry, need, Priority.READAHEAD)

    def _start_read(
        self, key: ExpertKey, entry: RingEntry, need: Sections, priority: Priority
    ) -> None:
        missing = need & ~entry.have
        if not missing:
            return
        expert = self.experts[key]
        if entry.have & Sections.STATE and entry.step != expert.step and missing & Sections.STATE:
            # replayed parameters would not fit the moments on the disk: take all of them anew
            missing |= Sections.STATE
            entry.step = expert.step
        read = Read(priority, partial(self._arrive, entry))
        entry.reads[read] = missing  # first: `_mend` takes back what is not started
        entry.have |= missing
        entry.fresh |= missing
        self.traffic.read_bytes += self._bytes(key, missing)
        record = self._slab.slot(entry.slot)
        self._on_disk.read(key, expert.layout, expert.version, missing, record, read)

    def _arrive(self, entry: RingEntry, read: Read) -> None:
        with self._changed:
            entry.reads.pop(read, None)
            self._end(read)

    def _write(
        self,
        key: ExpertKey,
        expert: ExpertState,
        version: Version | None,
        slot: int,
        sections: Sections,
    ) -> None:
        is_resident = expert.resident_slot is not None
        writes = expert.captures if is_resident else self._entries[key].writes
        write = Read(Priority.READAHEAD, partial(self._leave, writes, version))
        writes.add(write)
        self.traffic.written_bytes += self._bytes(key, sections)
        record = self._slab.slot(slot)
        self._on_disk.write(key, expert.layout, version, sections, record, write)

    def _leave(self, writes: set[Read], version: Version | None, write: Read) -> None:
        with self._changed:
            if version is not None:
                version.is_written = write.error is None
            writes.discard(write)
            self._end(write)

    def _end(self, transfer: Read) -> None:
        """A transfer has ended: others may begin; what fails now fails whoever waits."""
        self._failure = self._failure or transfer.error
        try:
            self._read_ahead()
        except MoERuntimeError as error:
            self._failure = self._failure or error
        self._changed.notify_all()
