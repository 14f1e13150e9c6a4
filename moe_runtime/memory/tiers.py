"""One tier filled from another: experts copied from host slots to the slots above, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar, cast

import torch

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.device.cuda_device import CudaCopy, CudaDevice, Event
from moe_runtime.memory.device.device_layout import CopyPart
from moe_runtime.memory.reads import Fetcher, Monitor, OnDone, Priority, ReadQueue, Transfer
from moe_runtime.memory.store import ExpertStore, Lease, LeaseEndedError, is_resident
from moe_runtime.types import ExpertKey

W = TypeVar("W")

COPY_THREADS = 2
"""Threads that only copy demands: one waits for a read while another uses the link. As many more
also read ahead."""

FORGET = 0.9
"""What a copy leaves of the weight of those before it: about the last ten count."""

MOST_AHEAD = 4
"""Experts that are read at a time without a demand."""


class CopySpeed:
    """Running mean of seconds per byte on the link alone, by the copies' own events; 0 before the
    first."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self._last: CudaCopy | None = None

    def ended(self, num_bytes: int, copy: CudaCopy) -> None:
        found = copy.seconds_after(self._last) / max(1, num_bytes)
        before = self.seconds_per_byte or found
        self._last, self.seconds_per_byte = copy, before + (found - before) * (1 - FORGET)


class _Copy:
    """A copy that is queued on a device, and whether a lease has handed its slot out."""

    __slots__ = ("event", "has_users")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.has_users = False


class TierFetcher:
    """Fills the slots of a tier from the store of the tier below, which it owns.

    An expert is leased below during its copy, so it is not evicted half-way. Read-aheads and
    streams stay such below. A demand waits for neither: it has threads of its own, and one slot
    below that no read-ahead takes.

    Copies to a device run after the work that was queued when the slot was given up. A demand for
    what is resident below is queued by the thread that asks. Another thread waits for its end
    alone, since the copying threads may need the slots below that it releases. Work may be queued
    after the copy's event before that (``DeviceLease``); until then the slot is not given up.

    Attributes:
        queued: copies to the device that have not ended; guarded by ``monitor``.
    """

    def __init__(
        self,
        lower: ExpertStore[torch.Tensor],
        device: CudaDevice | None = None,
        moves: Callable[[ExpertKey], Sequence[CopyPart]] | None = None,
    ) -> None:
        """Takes over the tier below.

        Args:
            device: whose slots are filled; None for those of the host.
            moves: where the bytes of an expert go in a slot of the device; as they lie if omitted.
        """
        self.lower = lower
        self._moves = moves
        self.monitor = Monitor()
        num_ahead = max(1, min(COPY_THREADS, lower.num_slots - COPY_THREADS))
        self._copies = ReadQueue(num_ahead, num_for_demands=COPY_THREADS)
        self._ends = ReadQueue(1)
        self._device = device
        self.speed = CopySpeed()
        self.queued: dict[Transfer, _Copy] = {}
        self._has_sleeping_end = False
        self._failure: BaseException | None = None

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Transfer) -> None:
        """Starts to copy an expert into a slot; it is read first if it is not resident below."""
        is_demand = self._device and read.priority is Priority.DEMAND
        if not is_demand or not self.copy_resident({key: slot}, read):
            after = self.vacate(slot) if self._device else ()
            self._copies.submit([partial(self._copy, key, slot, read, after)], read)

    def give_back(self, key: ExpertKey, slot: torch.Tensor) -> None:
        """An expert leaves its slot of the device: offers it to the tier below."""
        if isinstance(self.lower, LowerStore):
            self.lower.take_back(key, slot, self.moves_of(key, slot))

    def has_arrived(self, key: ExpertKey) -> None:
        """An expert is here, so that the tier below may evict it first."""
        if isinstance(self.lower, LowerStore):
            self.lower.spares[key] = None

    def expect(self, keys: Collection[ExpertKey]) -> None:
        """These are about to be copied: the tier below evicts them last."""
        if isinstance(self.lower, LowerStore):
            self.lower.asked = keys

    def vacate(self, *slots: torch.Tensor) -> Sequence[Any]:
        assert self._device is not None
        still = self.lower.leaving(slots) if isinstance(self.lower, LowerStore) else ()
        return self._device.vacate(*slots, still=still)

    def promote(self, key: ExpertKey, read: Transfer) -> None:
        """Serves a copy before all read-aheads, here and below."""
        self._copies.promote(read)  # first: the thread that has begun it looks at its priority
        self.lower.promote(key)

    def cancel(self, read: Transfer) -> bool:
        return self._copies.cancel(read)

    def is_under_way(self, read: Transfer) -> bool:
        return self._copies.is_under_way(read) or self._ends.is_under_way(read)

    def can_hasten(self, read: Transfer) -> bool:
        """Whether ``promote`` reaches a copy: not one of several experts, which is queued
        already."""
        return self._copies.is_under_way(read)

    def close(self) -> None:
        """Ends the tier below, and what waits for it; then the copies."""
        self._ends.close()  # from now on no copy is queued by its caller
        if self._device and not self.monitor.is_forked:
            self._device.drain()  # copies may still read from slots below
        self.lower.close()
        self._copies.close()

    def _copy(
        self, key: ExpertKey, slot: torch.Tensor, read: Transfer, after: Sequence[Any]
    ) -> int:
        """Waits for an expert and returns its bytes; retries where the tier below was emptied."""
        while True:
            try:
                with self.lower.lease([key], streaming=read.passes, above=read) as lease:
                    ((_, source),) = next(iter(lease))
                    if self._device:
                        return self._send(key, source, slot, after, read, lease)
                    self._move(key, source, slot)
                    if lease.is_open:
                        return len(slot)
            except LeaseEndedError:
                continue

    def _move(self, key: ExpertKey, source: torch.Tensor, slot: torch.Tensor) -> None:
        slot.copy_(source[: len(slot)])

    def resident_below(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Those that lie in the tier below, without its lock: ``copy_resident`` looks again."""
        return [key for key in keys if is_resident(self.lower._entries.get(key))]

    def copy_resident(self, slots: Mapping[ExpertKey, torch.Tensor], read: Transfer) -> bool:
        """Queues one copy of experts that are resident below, in the calling thread.

        A thread waits for its end, once ``wake_ends`` was called. Handing over the copy itself
        would take longer than the link takes for it.

        Args:
            slots: where the experts of one layer go.
            read: ends when all are there; its bytes are those of one of them, on average.

        Returns:
            Whether it is queued: not where one is absent, or the device refuses.
        """
        assert self._device is not None
        lease = self.lower.lease([*slots], streaming=read.passes, above=read)
        try:
            with ExitStack() as undo:
                undo.callback(lease.__exit__)
                sources = _entered(lease)
                if sources is None:
                    return False
                undo.callback(self._device.drain)
                undo.callback(self.queued.pop, read, None)
                after, parts = self.vacate(*slots.values()), []
                for key, source in sources.items():
                    parts += self._parts(key, source, slots[key])
                copied = self._device.copy(parts, after, read.priority)
                if not lease.is_open:  # a later reset of the tier below drains this copy
                    return False
                self.queued[read] = _Copy(copied)
                finish = partial(self._finish, lease, read, copied, _num_bytes(parts), len(slots))
                lease._thread = None  # another thread ends it
                self._ends.submit([finish], read, wakes=False)
                self._has_sleeping_end = True
                undo.pop_all()
                return True
        except (MemoryError, OSError, RuntimeError):
            # unless the copy was queued, a thread tries again and reports its failure
            return self._ends.is_under_way(read)

    def wake_ends(self) -> None:
        """Has a thread wait for the copies that were queued by the asking thread.

        Call it when all work after these copies is queued: waking a thread takes longer than
        queueing a copy. Otherwise the thread finds them within a second.
        """
        if self._has_sleeping_end:
            self._has_sleeping_end = False
            self._ends.wake()

    def _finish(
        self,
        lease: Lease[torch.Tensor],
        read: Transfer,
        copied: CudaCopy,
        num_bytes: int,
        count: int,
    ) -> int:
        """Waits for a queued copy; returns an expert's part of its bytes."""
        try:
            self._wait(read, copied, num_bytes)
        finally:
            lease.__exit__()
        return num_bytes // count

    def _parts(
        self, key: ExpertKey, source: torch.Tensor, slot: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied where."""
        return [
            (_part(source, move.source, move.num_bytes), _part(slot, move.place, move.num_bytes))
            for move in self.moves_of(key, slot)
        ]

    def moves_of(self, key: ExpertKey, slot: torch.Tensor) -> Sequence[CopyPart]:
        """Where the bytes of an expert go in a slot of the device."""
        return [CopyPart(0, 0, len(slot))] if self._moves is None else self._moves(key)

    def _send(
        self,
        key: ExpertKey,
        source: torch.Tensor,
        slot: torch.Tensor,
        after: Sequence[Any],
        read: Transfer,
        lease: Lease[torch.Tensor],
    ) -> int:
        """Copies to the device, and returns the bytes when they are there."""
        assert self._device is not None
        parts = self._parts(key, source, slot)
        num_bytes, copied = _num_bytes(parts), None
        try:
            copied = self._device.copy(parts, after, read.priority)
            if not lease.is_open:  # a later reset of the tier below drains this copy
                raise LeaseEndedError
            with self.monitor:
                self.queued[read] = _Copy(copied)
                self.monitor.notify_all()
        finally:
            if read not in self.queued:
                self._wait(read, None, num_bytes)
        self._wait(read, copied, num_bytes)
        return num_bytes

    def _wait(self, read: Transfer, copied: CudaCopy | None, num_bytes: int) -> None:
        """Waits for a copy, or without one until none writes any more."""
        assert self._device is not None
        has_ended = False
        try:
            if copied is not None:
                copied.synchronize()
                has_ended = True
                self.speed.ended(num_bytes, copied)
        finally:
            try:
                if not has_ended:
                    # it may still read or write slots that are given up
                    self._device.drain()
            finally:
                self._forget(read, sys.exc_info()[1])

    def _forget(self, read: Transfer, error: BaseException | None) -> None:
        """A copy has ended; its error is kept if its slot was handed out before."""
        with self.monitor:
            copy = self.queued.get(read)
            if copy is not None and copy.has_users:
                self._failure = self._failure or error
            self.queued.pop(read, None)
            self.monitor.notify_all()

    def finish_used(self) -> None:
        """Waits until no work is queued after a copy that may still fail. Raises MoERuntimeError:
        one has failed."""
        self.wake_ends()
        with self.monitor:
            while any(
                copy.has_users and self.is_under_way(read) for read, copy in self.queued.items()
            ):
                self.monitor.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """MoERuntimeError, once, where a copy failed that work was queued after."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise MoERuntimeError(
                f"a copy to the device failed with {reason}; what was computed meanwhile is void"
            ) from error


def _part(memory: torch.Tensor, start: int, num_bytes: int) -> torch.Tensor:
    is_all = len(memory) == num_bytes
    return memory if is_all else memory.narrow(0, start, num_bytes)


def _num_bytes(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(len(source) for source, _ in parts)


def _entered(lease: Lease[torch.Tensor]) -> dict[ExpertKey, torch.Tensor] | None:
    """Enters a lease if all its experts are resident, and returns their slots; else None."""
    store = lease._store
    with store._monitor:
        if not all(is_resident(store._entries.get(key)) for key in lease._keys):
            return None
        lease.__enter__()
        held = lease._held = [*lease._resident]
        lease._resident.clear()
        if lease._listener is not None:
            lease._listener.given(held, waited=False)
        return dict(lease._bind_held())


class TierStore(ExpertStore[W]):
    """Experts in slots that ``fetcher`` fills from the tier below."""

    def __init__(self, fetcher: TierFetcher, *args: Any, **kwargs: Any) -> None:
        super().__init__(fetcher, *args, **kwargs)
        self.fetcher = fetcher

    def end_leases(self) -> None:
        super().end_leases()
        if not self.is_forked:
            self.fetcher.wake_ends()
            self.fetcher.lower.end_leases()


class Return(Transfer):
    """An expert on its way back from a device; none of its bytes count as read.

    ``offer`` is its slot of the device and where its bytes lie there (places) and in the host's
    slot (sources); None once it was taken.
    """

    __slots__ = ("offer",)

    def __init__(self, on_done: OnDone, memory: torch.Tensor, moves: Sequence[CopyPart]) -> None:
        super().__init__(Priority.READAHEAD, on_done)
        self.offer: tuple[torch.Tensor, Sequence[CopyPart]] | None = (memory, moves)


class ReturningSource:
    """Fills slots of the host from the files, or with what a device gives back. ``kernels`` are
    events after which no kernel of the device reads the host's slots."""

    def __init__(self, source: Fetcher, device: CudaDevice) -> None:
        self.monitor = source.monitor
        self.device = device
        self._source = source
        self._returns = ReadQueue(1)
        self._leaving: dict[int, Event] = {}  # by addresses of slots of the device
        self.kernels: Sequence[Event] = ()

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Transfer) -> None:
        offer = None
        if isinstance(read, Return):
            offer, read.offer = read.offer, None  # the device's memory is not held by it any more
        if offer is None or not self._copy_back(*offer, slot, read):
            self._wait_for_kernels()
            self._source.fetch(key, slot, read)

    def leaving(self, slots: Sequence[torch.Tensor]) -> list[Event]:
        """Events after which these slots of the device are not read for the host any more."""
        found = (self._leaving.get(slot.data_ptr()) for slot in slots)
        return [event for event in found if event is not None and not event.query()]

    def promote(self, key: ExpertKey, read: Transfer) -> None:
        if self._returns.is_under_way(read):
            self._returns.promote(read)
        else:
            self._source.promote(key, read)

    def cancel(self, read: Transfer) -> bool:
        return not self._returns.is_under_way(read) and self._source.cancel(read)

    def is_under_way(self, read: Transfer) -> bool:
        return self._returns.is_under_way(read) or self._source.is_under_way(read)

    def close(self) -> None:
        if not self.monitor.is_forked:
            self._wait_for_kernels()
        self._returns.close()
        self._source.close()

    def _wait_for_kernels(self) -> None:
        for event in self.kernels:
            event.synchronize()
        self.kernels = ()

    def _copy_back(
        self, memory: torch.Tensor, moves: Sequence[CopyPart], slot: torch.Tensor, read: Transfer
    ) -> bool:
        """Queues the copy from a slot of the device; a thread waits for its end."""
        parts = [
            (memory.narrow(0, m.place, m.num_bytes), slot.narrow(0, m.source, m.num_bytes))
            for m in moves
        ]
        try:
            with ExitStack() as undo:
                undo.callback(self.device.drain)  # it may be queued nevertheless
                event = self._leaving[memory.data_ptr()] = self.device.copy_back(parts)
                self._returns.submit([partial(_wait, event)], read)
                undo.pop_all()
                return True
        except (MemoryError, OSError, RuntimeError):
            return self._returns.is_under_way(read)


class LowerStore(ExpertStore[torch.Tensor]):
    """The store of the host's memory below a device, to which evicted experts return.

    A device's experts need no second copy in host memory: the two tiers together hold as many as
    both have slots. What leaves the device is copied back over the idle direction of the link
    (exclusive caching: Wong and Wilkes, "My Cache or Yours?", USENIX ATC 2002).

    Attributes:
        is_above: whether an expert lies on the device, so that it leaves the host first.
        spares: experts that were copied to the device from here; some may have left either tier.
        asked: experts that the device is about to copy; others leave before them.
        moved_layers: those of which an expert came or went, until tables are brought up to date.
    """

    _fetcher: ReturningSource

    def __init__(self, source: ReturningSource, *args: object, **options: object) -> None:
        super().__init__(source, *args, **options)  # type: ignore[arg-type]
        self.is_above: Callable[[ExpertKey], bool] = lambda _: False
        self.spares: dict[ExpertKey, None] = {}
        self.asked: Collection[ExpertKey] = ()
        self.moved_layers: set[int] = set()

    def has(self, key: ExpertKey) -> bool:
        return is_resident(self._entries.get(key))

    def has_spare(self, layer: int) -> bool:
        """Whether an expert of a layer can come without one leaving both memories."""
        return bool(self._free) or any(
            key.layer == layer and self.has(key) and self.is_above(key) and self._is_idle(key)
            for key in self.spares
        )

    def take_back(self, key: ExpertKey, memory: torch.Tensor, moves: Sequence[CopyPart]) -> None:
        """Keeps an expert that leaves the device, if it is absent here and the policy has room.

        A policy that decides after a use gets nothing. ``memory`` and ``moves`` are as of
        ``Return.offer``.
        """
        with self._monitor:
            if key in self._entries or self.is_closed or self.decides_later:
                return
            slot = self._take_slot(key, keep=True)
            if slot is not None:
                read = Return(partial(self._arrive, key), memory, moves)
                self._enter(key, slot, read, keep=True)
                self._link.on_other_link += 1
                self._fetcher.fetch(key, self._slab.slot(slot), read)

    def read_spare(self, key: ExpertKey) -> bool:
        """Reads an expert after all demands, if that evicts no other's only copy. Returns whether
        it is here or on its way."""
        with self._monitor:
            if key in self._entries:
                return True
            if self._link.under_way >= MOST_AHEAD or not self.has_spare(key.layer):
                return False
            slot = self._take_slot(key, keep=True)
            if slot is not None:
                self._start(key, slot, keep=True, priority=Priority.READAHEAD)
            return slot is not None

    def leaving(self, slots: Sequence[torch.Tensor]) -> list[Event]:
        return self._fetcher.leaving(slots)

    def reset(self) -> None:
        self.moved_layers |= {*range(len(self._policy.layers))}
        if not self.is_closed:
            self._fetcher.kernels = self._fetcher.device.vacate()
            self._fetcher.device.drain()
        super().reset()
        reads = (entry.read for entry in self._entries.values())
        self._link.on_other_link = sum(isinstance(read, Return) for read in reads)

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

    def _arrive(self, key: ExpertKey, read: Transfer) -> None:
        with self._monitor:
            entry = self._entries.get(key)
            if isinstance(read, Return) and entry is not None and entry.read is read:
                self._link.on_other_link -= not entry.arrived
            super()._arrive(key, read)
            self.moved_layers.add(key.layer)

    def _drop(self, key: ExpertKey) -> None:
        super()._drop(key)
        self.moved_layers.add(key.layer)


def _wait(event: Event) -> int:
    event.synchronize()
    return 0
