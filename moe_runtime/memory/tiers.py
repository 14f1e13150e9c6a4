"""One tier filled from another: experts copied from host slots to the slots above, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.device.cuda_device import CudaCopy, CudaDevice, Event
from moe_runtime.memory.device.device_layout import CopyPart
from moe_runtime.memory.reads import Fetcher, Monitor, OnDone, Priority, ReadQueue, Transfer
from moe_runtime.memory.store import ExpertStore, Lease, LeaseEndedError, is_resident
from moe_runtime.types import ExpertKey

W = TypeVar("W")

COPY_THREADS = 2
"""Threads for demands alone: one waits for a read while another uses the link. As many more also
read ahead."""

FORGET = 0.9
"""Decay of older copies at each new one: about the last ten count."""

MOST_AHEAD = 4
"""Experts that are read at a time without a demand, to have all in memory."""


class CopySpeed:
    """Running mean of seconds per byte on the link, by the events of copies; 0 before the first."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self._last: CudaCopy | None = None

    def ended(self, num_bytes: int, copy: CudaCopy) -> None:
        found = copy.seconds_after(self._last) / max(1, num_bytes)
        before = self.seconds_per_byte or found
        self._last, self.seconds_per_byte = copy, before + (found - before) * (1 - FORGET)


@dataclass(slots=True)
class _Copy:
    """A copy that is queued on a device; ``has_users`` once work was queued after it."""

    event: Event
    has_users: bool = False


class TierFetcher:
    """Fills the slots of a tier from the store of the tier below, which it owns.

    A lease below holds an expert during its copy, with the same priority. Demands have their own
    threads, and one slot below that no read-ahead takes.

    Copies to a device run after the work that was queued when the slot was vacated. The calling
    thread queues the copy of a demanded expert that is resident below. A thread of its own waits
    for the end: the copying threads may need the slots below that it releases. ``DeviceLease``
    queues work after the copy's event before that.

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
            device: owner of the slots, with a ``LowerStore`` below; None for slots of the host.
            moves: copies that bring an expert to a slot of the device; default: one of all bytes.
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

    def vacate(self, *slots: torch.Tensor) -> Sequence[Any]:
        """Events after which nothing uses these slots of the device."""
        assert self._device is not None
        assert isinstance(self.lower, LowerStore)
        return self._device.vacate(*slots, still=self.lower.leaving(slots))

    def promote(self, key: ExpertKey, read: Transfer) -> None:
        """Serves a copy before all read-aheads, here and below."""
        self._copies.promote(read)  # first: a thread that has begun it looks at its priority
        self.lower.promote(key)

    def cancel(self, read: Transfer) -> bool:
        return self._copies.cancel(read)

    def is_under_way(self, read: Transfer) -> bool:
        return self._copies.is_under_way(read) or self._ends.is_under_way(read)

    def can_hasten(self, read: Transfer) -> bool:
        """Whether ``promote`` has an effect: a copy of several experts is queued already."""
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
        """Waits for an expert and returns its bytes; retries if the tier below was reset."""
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
        """Keys that are resident below, without the lock: ``copy_resident`` looks again."""
        return [key for key in keys if is_resident(self.lower._entries.get(key))]

    def copy_resident(self, slots: Mapping[ExpertKey, torch.Tensor], read: Transfer) -> bool:
        """Queues one copy of experts of a layer that are resident below, in the calling thread.

        Handing the copy to a thread would take longer than the copy. After ``wake_ends`` a thread
        waits for its end.

        Args:
            slots: target of each expert.
            read: ends when all have arrived, with the mean bytes of one expert.

        Returns:
            False if an expert is absent or the device refuses.
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
                if not lease.is_open:  # the tier below was reset
                    return False
                self.queued[read] = _Copy(copied)
                finish = partial(self._finish, lease, read, copied, _num_bytes(parts), len(slots))
                lease._thread = None  # another thread ends it
                self._ends.submit([finish], read, wakes=False)
                self._has_sleeping_end = True
                undo.pop_all()
                return True
        except (MemoryError, OSError, RuntimeError):
            # if it was not queued, a thread tries again and reports the failure
            return self._ends.is_under_way(read)

    def wake_ends(self) -> None:
        """Wakes the thread that waits for queued copies.

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
        return [
            (_part(source, move.source, move.num_bytes), _part(slot, move.place, move.num_bytes))
            for move in self.moves_of(key, slot)
        ]

    def moves_of(self, key: ExpertKey, slot: torch.Tensor) -> Sequence[CopyPart]:
        """Copies that bring an expert to a slot of the device."""
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
        """Copies to the device and waits; returns the bytes."""
        assert self._device is not None
        parts = self._parts(key, source, slot)
        num_bytes, copied = _num_bytes(parts), None
        try:
            copied = self._device.copy(parts, after, read.priority)
            if not lease.is_open:  # the tier below was reset
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
        """Waits for a copy, or without one for all; keeps the error if work was queued after it."""
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
                    self._device.drain()  # it may still use slots that are given up
            finally:
                error = sys.exc_info()[1]
                with self.monitor:
                    copy = self.queued.pop(read, None)
                    if copy is not None and copy.has_users:
                        self._failure = self._failure or error
                    self.monitor.notify_all()

    def finish_used(self) -> None:
        """Waits for all copies that work was queued after; raises as ``raise_failure``."""
        self.wake_ends()
        with self.monitor:
            while any(
                copy.has_users and self.is_under_way(read) for read, copy in self.queued.items()
            ):
                self.monitor.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises MoERuntimeError, once, if a copy failed that work was queued after."""
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
    """An expert on its way back from a device; its bytes do not count as read.

    ``offer`` is its slot of the device, and the copies that brought it there; None once taken.
    """

    __slots__ = ("offer",)

    def __init__(self, on_done: OnDone, memory: torch.Tensor, moves: Sequence[CopyPart]) -> None:
        super().__init__(Priority.READAHEAD, on_done)
        self.offer: tuple[torch.Tensor, Sequence[CopyPart]] | None = (memory, moves)


class ReturningSource:
    """Fills slots of the host from the files, or from a device. After the events ``kernels`` no
    kernel of the device reads slots of the host."""

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
            offer, read.offer = read.offer, None
        if offer is None or not self._copy_back(*offer, slot, read):
            self._wait_for_kernels()
            self._source.fetch(key, slot, read)

    def leaving(self, slots: Sequence[torch.Tensor]) -> list[Event]:
        """Events after which no copy to the host reads these slots of the device."""
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
                self._returns.submit([lambda: event.synchronize() or 0], read)
                undo.pop_all()
                return True
        except (MemoryError, OSError, RuntimeError):
            return self._returns.is_under_way(read)


class LowerStore(ExpertStore[torch.Tensor]):
    """The store of the host's memory below a device; experts evicted there return here.

    The two tiers together hold as many experts as both have slots. An expert that leaves the device
    is copied back over the idle direction of the link (exclusive caching: Wong and Wilkes, "My
    Cache or Yours?", USENIX ATC 2002).

    Attributes:
        is_above: whether an expert is on the device: it is evicted here first.
        spares: experts that were copied to the device; some may have left either tier.
        asked: experts that the device is about to copy: they are evicted here last.
        moved_layers: layers of which an expert came or went since tables were updated.
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
        """Whether an expert of a layer can be added without evicting another's only copy."""
        return bool(self._free) or any(
            key.layer == layer and self.has(key) and self.is_above(key) and self._is_idle(key)
            for key in self.spares
        )

    def take_back(self, key: ExpertKey, memory: torch.Tensor, moves: Sequence[CopyPart]) -> None:
        """Keeps an expert that leaves the device, if it is absent and the policy has room.

        Not with a policy that decides after a use. ``memory`` and ``moves`` as in ``Return.offer``.
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
        """Reads an expert after all demands, if that evicts no other's only copy; returns whether
        it is resident or on its way."""
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
        victim = self._policy.victim(
            lambda key: self._is_idle(key) and key not in self.asked, incoming
        )
        return victim or super()._victim(incoming)

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
