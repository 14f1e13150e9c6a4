"""Records of all experts: in slots of host memory and on the disk, and their versions.

An expert's tier is host memory or the disk. In memory its record is changed in place. On the disk
every update makes a new version in another slot; the old version stays until the step is done, and
as long as a checkpoint names it. Experts on the disk pass through a ring of slots. `expect`
announces the next needs, so that they arrive while other experts compute.

The cache of `moe_runtime.memory` moves whole experts in one direction and chooses by a policy.
Records move in both directions, section by section, in a known order. They are changed in their
slots and written back as versions.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice

from torch import Tensor

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.reads import Monitor, Priority, Transfer
from moe_runtime.memory.source import Slab
from moe_runtime.training.offload.disk import Disk, RecordFile, RecordPart
from moe_runtime.training.offload.records import (
    BLOCK_BYTES,
    RecordLayout,
    RecordStatus,
    RingEntry,
    Sections,
    Traffic,
    Version,
    check_digest,
    records_path,
)
from moe_runtime.types import ExpertKey

MIN_RING_SLOTS = 3
"""Fewest slots between disk and computation: one in use, one being filled, one being written."""

Need = tuple[ExpertKey, Sections]


class RecordStore:
    """Records of all experts. One thread at a time computes with them; transfers run in others.

    Args:
        ring_slots: slots for experts that are not resident; 0 if all are.
        disk: None when all experts are resident.
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
        self.experts = {key: RecordStatus(layout) for key, layout in layouts.items()}
        sizes = (layout.record_bytes for layout in layouts.values())
        slot_bytes = max(sizes, default=BLOCK_BYTES)
        self.slab = Slab(ring_slots + len(resident), slot_bytes)
        for slot, key in enumerate(resident, start=ring_slots):
            self.experts[key].resident_slot = slot
        self._free = list(range(ring_slots))
        self._entries: OrderedDict[ExpertKey, RingEntry] = OrderedDict()
        self._expected: deque[Need] = deque()
        self._changed = Monitor(self._reset)
        self._failure: MoERuntimeError | None = None
        self.traffic = Traffic()

    def expect(self, needs: Iterable[Need]) -> None:
        """Replaces the list of sections that will be acquired next, and reads ahead."""
        with self._changed:
            self._expected = deque(
                (key, need) for key, need in needs if self.experts[key].resident_slot is None
            )
            self._read_ahead()

    def acquire(self, key: ExpertKey, need: Sections, *, writes: bool = False) -> Tensor:
        """The record of an expert with the needed sections filled in; `release` gives it back.

        Args:
            need: sections to read; others may hold anything.
            writes: STATE sections will be changed: waits until none is being written.
        """
        expert = self.experts[key]
        with self._changed:
            if expert.resident_slot is not None:
                self.traffic.needed_bytes += self._bytes(key, need)
                self.traffic.resident_bytes += self._bytes(key, need)
                self._wait_for(lambda: not (writes and expert.captures))
                return self.slab.slot(expert.resident_slot)
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
            return self.slab.slot(entry.slot)

    def release(self, key: ExpertKey, *, has: Sections = Sections.NONE) -> None:
        with self._changed:
            if self.experts[key].resident_slot is None:
                entry = self._entries[key]
                entry.pins -= 1
                entry.have |= has
                self._read_ahead()

    def is_resident(self, key: ExpertKey) -> bool:
        return self.experts[key].resident_slot is not None

    def content_step(self, key: ExpertKey) -> int:
        """Last optimizer step applied to the ring copy, else to the tier."""
        entry = self._entries.get(key)
        return self.experts[key].step if entry is None else entry.step

    def set_content_step(self, key: ExpertKey, step: int) -> None:
        """Notes the step of an acquired record; a tier in memory keeps it."""
        with self._changed:
            if (entry := self._entries.get(key)) is not None:
                entry.step = step
            else:
                self.experts[key].step = step
                self.experts[key].is_saved = False

    def wait_for_transfers(self) -> None:
        with self._changed:
            self._expected.clear()
            self._wait_for(
                lambda: (
                    not any(entry.is_moving for entry in self._entries.values())
                    and not any(expert.captures for expert in self.experts.values())
                )
            )

    def _fill_now(self, key: ExpertKey, version: Version, record: Tensor) -> None:
        is_done = threading.Event()

        def finish(read: Transfer) -> None:
            self._failure = self._failure or read.error
            is_done.set()

        part = RecordPart(key, self.experts[key].layout, version, Sections.STATE, record)
        self._on_disk.read(part, Transfer(Priority.DEMAND, finish))
        is_done.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        with self._changed:
            self._expected.clear()
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        with self._changed:
            used = [entry.slot for entry in self._entries.values()]
            resident = [expert.resident_slot for expert in self.experts.values()]
            slots = [slot for slot in used + self._free + resident if slot is not None]
            assert sorted(slots) == list(range(self.slab.num_slots))
            self.traffic.check(self._fresh_bytes())
            assert all(entry.pins >= 0 for entry in self._entries.values())

    def write_state(self, key: ExpertKey) -> None:
        """Writes a changed state to its tier; the old version stays until `commit`."""
        expert = self.experts[key]
        with self._changed:
            if expert.resident_slot is not None:
                return
            entry = self._entries[key]
            version = self._new_version(expert, entry.step)
            entry.have |= Sections.STATE
            expert.step = entry.step
            self._write(key, version, Sections.STATE)

    def park_gradient(self, key: ExpertKey) -> None:
        expert = self.experts[key]
        with self._changed:
            expert.has_gradient = True
            if expert.resident_slot is None:
                self._entries[key].have |= Sections.GRADIENT
                self._write(key, None, Sections.GRADIENT)

    def forget_gradient(self, key: ExpertKey) -> None:
        expert = self.experts[key]
        with self._changed:
            expert.has_gradient = False
            if (entry := self._entries.get(key)) is not None:
                entry.forget(Sections.GRADIENT)

    def commit(self) -> None:
        """The step is done: versions from before it are dropped."""
        with self._changed:
            for expert in self.experts.values():
                previous, expert.previous = expert.previous, None
                if previous is not None:
                    self._file_of(expert).drop(previous.slot)

    def roll_back(self) -> None:
        """Undoes the step: versions from before it come back."""
        self.wait_for_transfers()
        with self._changed:
            for key, expert in self.experts.items():
                if self._restore_previous(expert) and key in self._entries:
                    self._drop(key)

    def abandon(self) -> None:
        """Releases all records after a failed computation; their state is read again."""
        with self._changed:
            for key, entry in self._entries.items():
                if entry.pins:
                    entry.forget(Sections.STATE)
                    entry.step = self.experts[key].step
                    entry.pins = 0
            self.traffic.recount(self._fresh_bytes())

    def capture(self, keys: Iterable[ExpertKey]) -> None:
        """Starts to write resident records as new versions; changes wait for the writes."""
        with self._changed:
            for key in keys:
                expert = self.experts[key]
                assert expert.resident_slot is not None, "experts on the disk are saved"
                expert.is_saved = False  # if the write fails, the next checkpoint writes it again
                self._write(key, self._new_version(expert, expert.step), Sections.STATE)
                expert.is_saved = True

    def hold_versions(self) -> dict[ExpertKey, Version]:
        """Starts to save every expert as it is now; the returned versions are not overwritten."""
        with self._changed:
            self.capture(
                key
                for key, e in self.experts.items()
                if e.resident_slot is not None and not e.is_saved
            )
            held: dict[ExpertKey, Version] = {}
            with ExitStack() as stack:
                stack.callback(self.drop_versions, held)
                for key, expert in self.experts.items():
                    assert expert.version is not None, "every expert has a first version"
                    self._file_of(expert).hold(expert.version.slot)
                    held[key] = expert.version
                stack.pop_all()
            return held

    def drop_versions(self, versions: Mapping[ExpertKey, Version]) -> None:
        with self._changed:
            for key, version in versions.items():
                self._file_of(self.experts[key]).drop(version.slot)

    def wait_until_durable(self, versions: Mapping[ExpertKey, Version]) -> None:
        """Waits until versions are on the disk; may be called from any thread."""
        with self._changed:
            while not all(version.is_written for version in versions.values()):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
        self._on_disk.sync()

    def restore(self, versions: Mapping[ExpertKey, Version]) -> None:
        """Replaces first versions by saved ones, checks each and holds it once more."""
        for key, version in versions.items():
            expert = self.experts[key]
            for _ in range(2):
                self._file_of(expert).hold(version.slot)
            expert.version = version
            expert.take_over(version)
            expert.is_saved = version.is_written = True
            record = self.slab.slot(
                self._free[-1] if expert.resident_slot is None else expert.resident_slot
            )
            self._fill_now(key, version, record)
            content = record[: expert.layout.state_bytes]
            path = records_path(self._on_disk.folder, expert.layout)
            check_digest(path, key, version, content)
            _, version.sections = expert.layout.checksums(record)

    def take_in(self, key: ExpertKey, read: Callable[[Tensor], Version]) -> None:
        """Reads an expert from elsewhere, and writes it to its tier.

        Args:
            read: fills a record with the expert's state, and returns its version.
        """
        record = self.acquire(key, Sections.NONE, writes=True)
        found = read(record)
        self.experts[key].take_over(found)
        self.set_content_step(key, found.step)
        self.write_state(key)
        self.release(key)

    def drop_slots(self, slots: Iterable[tuple[RecordFile, int]]) -> None:
        with self._changed:
            for file, slot in slots:
                file.drop(slot)

    def exchange_tiers(self, arriving: ExpertKey, leaving: ExpertKey) -> None:
        """Exchanges the tiers of two experts between steps."""
        self.capture([leaving])
        record = self.acquire(arriving, Sections.STATE)
        self.wait_for_transfers()
        comes, goes = self.experts[arriving], self.experts[leaving]
        with self._changed:
            assert goes.resident_slot is not None, "the leaving expert's tier must be memory"
            entry, slot = self._entries[arriving], goes.resident_slot
            is_saved = entry.step == comes.step
            # after an exception in between, both are on the disk, and the ring has a slot more
            goes.resident_slot = None
            self.slab.slot(slot).copy_(record)
            comes.is_saved, comes.step, comes.resident_slot = is_saved, entry.step, slot
            entry.pins -= 1
            self._drop(arriving)

    # the methods below are called with the lock held

    def _reset(self) -> None:
        """After an exception: drops transfers that were not started, and recounts free slots.

        Drops new versions that were not written; `abandon` drops pins.
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
        self._free = [slot for slot in range(self.slab.num_slots) if slot not in used]
        for key, expert in self.experts.items():
            entry = self._entries.get(key)
            if expert.version is None or expert.version.is_written or (entry and entry.writes):
                continue
            if self._restore_previous(expert) and entry is not None:
                entry.forget(Sections.STATE)
                entry.step = expert.step
        self.traffic.recount(self._fresh_bytes())

    def _not_started(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        return [one for one in transfers if not self._on_disk.is_under_way(one)]

    def _fresh_bytes(self) -> int:
        return sum(self._bytes(key, entry.fresh) for key, entry in self._entries.items())

    @property
    def _on_disk(self) -> Disk:
        assert self.disk is not None, "there is no disk"
        return self.disk

    def _file_of(self, expert: RecordStatus) -> RecordFile:
        return self._on_disk.files[expert.layout.state_bytes]

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
        """The slot of an expert that is needed now; a read-ahead may take one meanwhile."""
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
        """Drops the least recently used slot that is not expected, or the one expected last."""
        expected = [key for key, _ in islice(self._expected, self.slab.num_slots)]
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
            # parameters after missed steps do not fit the moments on the disk: read all again
            missing |= Sections.STATE
            entry.step = expert.step
        read = Transfer(priority, partial(self._read_done, entry))
        entry.reads[read] = missing  # first: `_reset` drops reads that were not started
        entry.have |= missing
        entry.fresh |= missing
        self.traffic.read_bytes += self._bytes(key, missing)
        record = self.slab.slot(entry.slot)
        part = RecordPart(key, expert.layout, expert.version, missing, record)
        self._on_disk.read(part, read)

    def _read_done(self, entry: RingEntry, read: Transfer) -> None:
        with self._changed:
            entry.reads.pop(read, None)
            self._transfer_done(read)

    def _write(self, key: ExpertKey, version: Version | None, sections: Sections) -> None:
        expert, entry = self.experts[key], self._entries.get(key)
        if (slot := expert.resident_slot) is not None:
            writes = expert.captures
        else:
            assert entry is not None, "an expert on the disk is written from the ring"
            slot, writes = entry.slot, entry.writes
        write = Transfer(Priority.READAHEAD, partial(self._write_done, writes, version))
        writes.add(write)
        self.traffic.written_bytes += self._bytes(key, sections)
        part = RecordPart(key, expert.layout, version, sections, self.slab.slot(slot))
        self._on_disk.write(part, write)

    def _write_done(self, writes: set[Transfer], version: Version | None, write: Transfer) -> None:
        with self._changed:
            if version is not None:
                version.is_written = write.error is None
            writes.discard(write)
            self._transfer_done(write)

    def _transfer_done(self, transfer: Transfer) -> None:
        """Starts further reads; a failure ends the operations that wait."""
        self._failure = self._failure or transfer.error
        try:
            self._read_ahead()
        except MoERuntimeError as error:
            self._failure = self._failure or error
        self._changed.notify_all()

    def _restore_previous(self, expert: RecordStatus) -> bool:
        """Replaces an expert's version by the one from before the step, if there is one."""
        new, old = expert.version, expert.previous
        if new is None or old is None:
            return False
        expert.take_over(old)
        expert.version, expert.previous = old, None
        self._file_of(expert).drop(new.slot)
        return True

    def _new_version(self, expert: RecordStatus, step: int) -> Version:
        """A new version of an expert; keeps the version from before the step."""
        slot = self._file_of(expert).take()
        new, old = Version(slot, step, expert.count, pending=expert.pending), expert.version
        keeps_old = expert.resident_slot is None and expert.previous is None
        previous = old if keeps_old else expert.previous
        expert.version, expert.previous = new, previous
        if old is not None and not keeps_old:
            self._file_of(expert).drop(old.slot)
        return new
