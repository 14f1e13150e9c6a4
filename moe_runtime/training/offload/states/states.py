"""What becomes of experts: new versions, steps taken back, states saved and restored.

An expert's tier is host memory, where its record is worked on in place, or the disk, where every
update makes a new version in another place; the one before stays until the step is done, and as
long as a checkpoint names it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from torch import Tensor

from moe_runtime.memory.reads import Priority, Read
from moe_runtime.training.offload.states.entries import ExpertState, Version
from moe_runtime.training.offload.states.record_slots import RecordSlots
from moe_runtime.training.offload.states.records import RecordLayout, Sections
from moe_runtime.training.offload.states.saved import check_digest, records_path
from moe_runtime.types import ExpertKey


class ExpertStates(RecordSlots):
    """Records of all experts, and the versions of those that were written."""

    def write_state(self, key: ExpertKey) -> None:
        """Sends changed parameters and moments to their tier; the old version stays until `commit`.

        The record goes up to its `content_step` then.
        """
        expert = self.experts[key]
        with self._changed:
            if expert.resident_slot is not None:
                return
            entry = self._entries[key]
            version = self._new_version(expert, entry.step)
            entry.have |= Sections.STATE
            expert.step = entry.step
            self._write(key, expert, version, entry.slot, Sections.STATE)

    def park_gradient(self, key: ExpertKey) -> None:
        """Keeps an expert's gradient in its tier until the step."""
        expert = self.experts[key]
        with self._changed:
            expert.has_gradient = True
            if expert.resident_slot is None:
                entry = self._entries[key]
                entry.have |= Sections.GRADIENT
                self._write(key, expert, None, entry.slot, Sections.GRADIENT)

    def forget_gradient(self, key: ExpertKey) -> None:
        """The gradient is not needed any more."""
        expert = self.experts[key]
        with self._changed:
            expert.has_gradient = False
            if (entry := self._entries.get(key)) is not None:
                entry.have &= ~Sections.GRADIENT
                entry.fresh &= ~Sections.GRADIENT

    def commit(self) -> None:
        """The step is done: versions from before it are let go."""
        with self._changed:
            for expert in self.experts.values():
                previous, expert.previous = expert.previous, None
                if previous is not None:
                    self._on_disk.drop(expert.layout, previous.slot)

    def roll_back(self) -> None:
        """The step is not to have happened: versions from before it come back."""
        self.wait_for_transfers()
        with self._changed:
            for key, expert in self.experts.items():
                if self._take_back(expert) and key in self._entries:
                    self._drop(key)

    def abandon(self) -> None:
        """Gives all records back, after a computation that failed half-way.

        What it had may be half changed, and is read anew.
        """
        with self._changed:
            for key, entry in self._entries.items():
                if entry.pins:
                    entry.forget(Sections.STATE)
                    entry.step = self.experts[key].step
                    entry.pins = 0
            self.traffic.mend(self._fresh_bytes())

    def capture(self, keys: Iterable[ExpertKey]) -> None:
        """Starts to write records whose tier is memory to the disk, as new versions.

        Computation may go on; who wants to change one of them waits for that one's write.
        """
        with self._changed:
            for key in keys:
                expert = self.experts[key]
                assert expert.resident_slot is not None, "what lives on the disk is saved"
                expert.is_saved = False  # until it is: or the next checkpoint names an older state
                version = self._new_version(expert, expert.step)
                self._write(key, expert, version, expert.resident_slot, Sections.STATE)
                expert.is_saved = True

    def hold_versions(self) -> dict[ExpertKey, Version]:
        """Starts to save every expert as it is now; no version that is returned is overwritten.

        Those that live in memory and changed since they were saved last are written in the
        background.
        """
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
                    self._on_disk.hold(expert.layout, expert.version.slot)
                    held[key] = expert.version
                stack.pop_all()
            return held

    def drop_versions(self, versions: Mapping[ExpertKey, Version]) -> None:
        """Lets go of what `hold_versions` held."""
        with self._changed:
            for key, version in versions.items():
                self._on_disk.drop(self.experts[key].layout, version.slot)

    def wait_until_durable(self, versions: Mapping[ExpertKey, Version]) -> None:
        """Returns when versions lie on the disk, power cut or not; may be called from any thread.

        Raises:
            MoERuntimeError: a transfer failed.
        """
        with self._changed:
            while not all(version.is_written for version in versions.values()):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
        self._on_disk.sync()

    def restore(self, versions: Mapping[ExpertKey, Version]) -> None:
        """Takes up saved versions instead of first ones, and checks each.

        The versions are held once more, as `hold_versions` holds them.

        Raises:
            CheckpointError: a record is damaged; names it.
        """
        for key, version in versions.items():
            expert = self.experts[key]
            for _ in range(2):
                self._on_disk.hold(expert.layout, version.slot)
            expert.version = version
            expert.take_over(version)
            expert.is_saved = version.is_written = True
            record = self._slab.slot(
                self._free[-1] if expert.resident_slot is None else expert.resident_slot
            )
            self._fill_now(key, expert, version, record)
            content = record[: expert.layout.state_bytes]
            path = records_path(self._on_disk.folder, expert.layout)
            check_digest(path, key, version, content)
            _, version.sections = expert.layout.checksums(record)

    def take_in(self, key: ExpertKey, read: Callable[[Tensor], Version]) -> None:
        """Takes up an expert that lies in another process's files, and writes it to its tier.

        Args:
            key: the expert.
            read: fills a record with its state, and says what version that is.
        """
        record = self.acquire(key, Sections.NONE, writes=True)
        found = read(record)
        self.experts[key].take_over(found)
        self.set_content_step(key, found.step)
        self.write_state(key)
        self.release(key)

    def drop_lent(self, slots: Iterable[tuple[RecordLayout, int]]) -> None:
        """Lets go of slots on the disk that belong to experts of other processes."""
        with self._changed:
            for layout, slot in slots:
                self._on_disk.drop(layout, slot)

    def exchange_tiers(self, arriving: ExpertKey, leaving: ExpertKey) -> None:
        """Exchanges two tiers between steps: one expert leaves the memory for another."""
        self.capture([leaving])
        record = self.acquire(arriving, Sections.STATE)
        self.wait_for_transfers()
        comes, goes = self.experts[arriving], self.experts[leaving]
        with self._changed:
            assert goes.resident_slot is not None, "the leaving expert's tier must be memory"
            entry, slot = self._entries[arriving], goes.resident_slot
            is_saved = entry.step == comes.step
            # An exception in between leaves both on the disk, and a slot more to the others.
            goes.resident_slot = None
            self._slab.slot(slot).copy_(record)
            comes.is_saved, comes.step, comes.resident_slot = is_saved, entry.step, slot
            entry.pins -= 1
            self._drop(arriving)

    def _fill_now(
        self, key: ExpertKey, expert: ExpertState, version: Version, record: Tensor
    ) -> None:
        """Reads a version into a record that nobody uses, and waits for it."""
        is_done = threading.Event()

        def finish(read: Read) -> None:
            self._failure = self._failure or read.error
            is_done.set()

        read = Read(Priority.DEMAND, finish)
        self._on_disk.read(key, expert.layout, version, Sections.STATE, record, read)
        is_done.wait()
        if self._failure is not None:
            raise self._failure

    def _mend(self) -> None:
        """Also takes back new versions that were not written."""
        super()._mend()
        for key, expert in self.experts.items():
            entry = self._entries.get(key)
            if expert.version is None or expert.version.is_written or (entry and entry.writes):
                continue
            if self._take_back(expert) and entry is not None:
                entry.forget(Sections.STATE)
                entry.step = expert.step
        self.traffic.mend(self._fresh_bytes())

    def _take_back(self, expert: ExpertState) -> bool:
        """Puts the version from before the step in the place of the one after; whether it is kept.

        Whatever strikes in between, a slot is let go of once at most.
        """
        new, old = expert.version, expert.previous
        if new is None or old is None:
            return False
        expert.step, expert.count, expert.pending = old.step, old.count, old.pending
        expert.version, expert.previous = old, None
        self._on_disk.drop(expert.layout, new.slot)
        return True

    def _new_version(self, expert: ExpertState, step: int) -> Version:
        """A place for what an expert has become; a version of the step before is kept for it.

        Raises:
            CapacityError: the disk is full; nothing is changed.
        """
        slot = self._on_disk.take(expert.layout)
        new, old = Version(slot, step, expert.count, pending=expert.pending), expert.version
        keeps_old = expert.resident_slot is None and expert.previous is None
        previous = old if keeps_old else expert.previous
        expert.version, expert.previous = new, previous
        if old is not None and not keeps_old:
            self._on_disk.drop(expert.layout, old.slot)
        return new
