"""Experts that a device gives back to the host's memory when they leave it.

A device's experts need no second copy in the host's memory, where another expert can lie instead:
the two tiers hold as many as both have slots. What leaves the device is copied back, over the
direction of the link that is idle otherwise, rather than read from the disk anew when it is wanted
again (exclusive caching: Wong and Wilkes, "My Cache or Yours?", USENIX ATC 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import cast

import torch

from moe_runtime.memory.changes import Changes
from moe_runtime.memory.device.device import Device, Event
from moe_runtime.memory.device.device_layout import CopyPart
from moe_runtime.memory.device.residents import is_resident
from moe_runtime.memory.entries import Fetcher
from moe_runtime.memory.io_queue import OnDone, Priority, Read, ReadQueue
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.types import ExpertKey

MOST_AHEAD = 4
"""Experts that are read at a time while nobody has asked for them."""


class Return(Read):
    """An expert on its way back from a device; none of its bytes count as read.

    Attributes:
        offer: its slot of the device, which is overwritten behind ``leaving`` only, and where its
            bytes lie there, as places, and in the host's slot, as sources; None once it was taken.
    """

    __slots__ = ("offer",)

    def __init__(self, on_done: OnDone, memory: torch.Tensor, moves: Sequence[CopyPart]) -> None:
        super().__init__(Priority.READAHEAD, on_done)
        self.offer: tuple[torch.Tensor, Sequence[CopyPart]] | None = (memory, moves)


class ReturningSource:
    """Fills slots of the host from the files of a checkpoint, or with what a device gives back.

    An expert that cannot be copied back is read.

    Attributes:
        changed: as of ``Fetcher``.
        kernels: events behind which no kernel of the device reads the host's slots any more.
    """

    def __init__(self, source: Fetcher, device: Device) -> None:
        """Takes over the source."""
        self.changed = source.changed
        self._source = source
        self._device = device
        self._returns = ReadQueue(1)
        self._leaving: dict[int, Event] = {}  # by addresses of slots of the device
        self.kernels: Sequence[Event] = ()

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """As ``Fetcher.fetch``."""
        offer = None
        if isinstance(read, Return):
            offer, read.offer = read.offer, None  # the device's memory is not held by it any more
        if offer is None or not self._copy_back(*offer, slot, read):
            self._wait_for_kernels()
            self._source.fetch(key, slot, read)

    def expect_kernels(self) -> None:
        """Any that are queued may read the host's slots: who knew which was cut short."""
        self.kernels = self._device.vacate()

    def leaving(self, slots: Sequence[torch.Tensor]) -> list[Event]:
        """Behind which nobody reads these slots of the device on behalf of the host any more."""
        found = (self._leaving.get(slot.data_ptr()) for slot in slots)
        return [event for event in found if event is not None and not event.query()]

    @property
    def lock(self) -> Changes:
        """Of what comes back; who holds it waits for no tier above."""
        return self._returns._changed

    def promote(self, key: ExpertKey, read: Read) -> None:
        """As ``Fetcher.promote``."""
        if self._returns.is_under_way(read):
            self._returns.promote(read)
        else:
            self._source.promote(key, read)

    def cancel(self, read: Read) -> bool:
        """As ``Fetcher.cancel``: what comes back is on its way."""
        return not self._returns.is_under_way(read) and self._source.cancel(read)

    def is_under_way(self, read: Read) -> bool:
        """As ``Fetcher.is_under_way``."""
        return self._returns.is_under_way(read) or self._source.is_under_way(read)

    def let_go(self) -> None:
        """As ``Fetcher.let_go``."""
        self._returns.let_go()
        self._source.let_go()

    def close(self) -> None:
        """As ``Fetcher.close``."""
        if not self.changed.is_forked:
            self._wait_for_kernels()
        self._returns.close()
        self._source.close()

    def _wait_for_kernels(self) -> None:
        for event in self.kernels:
            event.synchronize()
        self.kernels = ()

    def _copy_back(
        self, memory: torch.Tensor, moves: Sequence[CopyPart], slot: torch.Tensor, read: Read
    ) -> bool:
        """Queues the copy from a slot of the device; a thread waits for its end."""
        parts = [
            (memory.narrow(0, m.place, m.num_bytes), slot.narrow(0, m.source, m.num_bytes))
            for m in moves
        ]
        is_done = False
        try:
            event = self._leaving[memory.data_ptr()] = self._device.copy_back(parts)
            self._returns.submit([partial(_wait, event)], read)
            is_done = True
            return True
        except (MemoryError, OSError, RuntimeError):
            return self._returns.is_under_way(read)
        finally:
            if not is_done:  # it may be queued nevertheless
                self._device.drain()


class LowerStore(ExpertStore[torch.Tensor]):
    """The store of the host's memory below a device.

    Attributes:
        is_above: whether an expert lies on the device, so that it leaves the host first.
        spares: experts that were copied there from here, some of which may have left either tier.
        asked: experts that the device is about to copy; others leave before them.
        moved_layers: those of which somebody came or went, until who keeps tables takes note.
    """

    _fetcher: ReturningSource

    def __init__(self, source: ReturningSource, *args: object, **options: object) -> None:
        """Takes what ``ExpertStore`` takes."""
        super().__init__(source, *args, **options)  # type: ignore[arg-type]
        self.is_above: Callable[[ExpertKey], bool] = lambda _: False
        self.spares: dict[ExpertKey, None] = {}
        self.asked: Collection[ExpertKey] = ()
        self.moved_layers: set[int] = set()

    def has(self, key: ExpertKey) -> bool:
        """Whether an expert is in a slot."""
        return is_resident(self._entries.get(key))

    def is_read_by(self, kernels: Sequence[Event]) -> None:
        """Slots are overwritten only behind kernels that read them; called with the lock held.

        Args:
            kernels: behind these events all have ended that were queued so far.
        """
        self._fetcher.kernels = kernels

    def has_spare(self, layer: int) -> bool:
        """Whether an expert of a layer can come without one leaving both memories."""
        return bool(self._free) or any(
            key.layer == layer and self.has(key) and self.is_above(key) and self._is_idle(key)
            for key in self.spares
        )

    def take_back(self, key: ExpertKey, memory: torch.Tensor, moves: Sequence[CopyPart]) -> None:
        """Keeps an expert that leaves the device, if it is not here and the policy has room for it.

        A policy that decides after a use is not asked: it gets nothing.

        Args:
            key: the expert.
            memory: as of ``Return.offer``.
            moves: see there.
        """
        with self._changed:
            if key in self._entries or self.is_closed or self.decides_later:
                return
            slot = self._take_slot(key, keep=True)
            if slot is not None:
                read = Return(partial(self._arrive, key), memory, moves)
                self._enter(key, slot, read, keep=True)
                self._link.beside += 1
                self._fetcher.fetch(key, self._slab.slot(slot), read)

    def read_spare(self, key: ExpertKey) -> bool:
        """Begins to read an expert behind all demands, if that takes no other one's only slot.

        Returns:
            Whether it is here or on its way.
        """
        with self._changed:
            if key in self._entries:
                return True
            if self._link.under_way >= MOST_AHEAD or not self.has_spare(key.layer):
                return False
            slot = self._take_slot(key, keep=True)
            if slot is not None:
                self._start(key, slot, keep=True, priority=Priority.READAHEAD)
            return slot is not None

    @property
    def lock_of_returns(self) -> Changes:
        """As ``ReturningSource.lock``."""
        return self._fetcher.lock

    def leaving(self, slots: Sequence[torch.Tensor]) -> list[Event]:
        """As ``ReturningSource.leaving``."""
        return self._fetcher.leaving(slots)

    def _victim(self, incoming: ExpertKey) -> ExpertKey | None:
        for key in [key for key in tuple(self.spares) if key.layer == incoming.layer]:
            if key not in self._entries or not self.is_above(key):
                self.spares.pop(key, None)
            elif self._is_idle(key):
                return key
        is_evictable = self._is_idle_and_not_asked
        return cast(ExpertKey | None, self._policy.victim(is_evictable, incoming)) or (
            super()._victim(incoming)
        )

    def _is_idle_and_not_asked(self, key: Hashable) -> bool:
        return self._is_idle(key) and key not in self.asked

    def _arrive(self, key: ExpertKey, read: Read) -> None:
        with self._changed:
            entry = self._entries.get(key)
            if isinstance(read, Return) and entry is not None and entry.read is read:
                self._link.beside -= not entry.arrived
            super()._arrive(key, read)
            self.moved_layers.add(key.layer)

    def _drop(self, key: ExpertKey) -> None:
        super()._drop(key)
        self.moved_layers.add(key.layer)

    def _mend(self) -> None:
        self.moved_layers |= {*range(len(self._policy.layers))}
        self._fetcher.expect_kernels()
        super()._mend()
        reads = (entry.read for entry in self._entries.values() if not entry.arrived)
        self._link.beside = sum(isinstance(read, Return) for read in reads)


def _wait(event: Event) -> int:
    """Returns the bytes that were read: none."""
    event.synchronize()
    return 0
