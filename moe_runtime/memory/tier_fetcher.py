"""One tier filled from another: experts copied from host slots to device slots."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.changes import Changes
from moe_runtime.memory.device.copy_speed import CopySpeed
from moe_runtime.memory.device.device import Copy, Device, Event
from moe_runtime.memory.device.device_layout import CopyPart
from moe_runtime.memory.device.residents import is_resident
from moe_runtime.memory.device.returning import LowerStore
from moe_runtime.memory.io_queue import Priority, Read, ReadQueue
from moe_runtime.memory.lease import Lease
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.types import ExpertKey

W = TypeVar("W")

COPY_THREADS = 2
"""Threads that only copy what is demanded: one waits for its expert to be read while another uses
the link. As many more also read ahead."""


class TierFetcher:
    """Fills the slots of a tier from the store of the tier below, which it owns.

    An expert is leased below for the time of its copy, so it cannot be evicted half-way. What is
    read ahead here is read ahead there, what only passes through here passes through there, and a
    demand waits for neither: it has threads that copy nothing else, and one slot below that no
    read-ahead takes.

    Copies to a device run behind the computation that was queued when the slot was given up, and
    beside all other. A demand for what is resident below is queued at once, by who asks. A thread
    waits for each copy, so a read has ended when its bytes are there, and with the error if there
    was one; nobody else waits. Who waits for what was queued at once waits for nothing else: the
    other threads may need the slots below that it gives back. Who computes may queue work behind a
    copy's event before that (``DeviceLease``); until then the slot is not given up.

    Attributes:
        lower: the store of the tier below.
        speed: of copies to a device.
        queued: copies that the device has not finished, as far as is known; changed with the lock
            ``changed`` held.
    """

    def __init__(
        self,
        lower: ExpertStore[torch.Tensor],
        device: Device | None = None,
        moves: Callable[[ExpertKey], Sequence[CopyPart]] | None = None,
    ) -> None:
        """Takes the tier below.

        Args:
            lower: see above.
            device: whose slots are filled; None for those of the host.
            moves: where the bytes of an expert go in a slot of the device; as they lie if omitted.
        """
        self.lower = lower
        self._moves = moves
        self.changed = Changes()
        num_ahead = max(1, min(COPY_THREADS, lower.num_slots - COPY_THREADS))
        self._copies = ReadQueue(num_ahead, num_for_demands=COPY_THREADS)
        self._ends = ReadQueue(1)
        self._device = device
        self.speed = CopySpeed()
        self.queued: dict[Read, _Copy] = {}
        self._is_untold = False
        self._failure: BaseException | None = None

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Read) -> None:
        """Starts to copy an expert into a slot; it is read first if it is not resident below."""
        is_demand = self._device and read.priority is Priority.DEMAND
        if not is_demand or not self.copy_resident({key: slot}, read):
            after = self._vacate(slot) if self._device else ()
            self._copies.submit([partial(self._copy, key, slot, read, after)], read)

    def give_back(self, key: ExpertKey, slot: torch.Tensor) -> None:
        """An expert leaves its slot of the device, and goes to the tier below if that wants it."""
        if isinstance(self.lower, LowerStore):
            self.lower.take_back(key, slot, self._moves_of(key, slot))

    def has_arrived(self, key: ExpertKey) -> None:
        """An expert is here, so that the tier below may do without it."""
        if isinstance(self.lower, LowerStore):
            self.lower.spares[key] = None

    def expect(self, keys: Collection[ExpertKey]) -> None:
        """These are about to be copied: they leave the tier below last."""
        if isinstance(self.lower, LowerStore):
            self.lower.asked = keys

    def _vacate(self, *slots: torch.Tensor) -> Sequence[Any]:
        """As ``Device.vacate``, also behind what is on its way back from these slots."""
        assert self._device is not None
        still = self.lower.leaving(slots) if isinstance(self.lower, LowerStore) else ()
        return self._device.vacate(*slots, still=still)

    def promote(self, key: ExpertKey, read: Read) -> None:
        """Serves a copy before all read-aheads, here and below."""
        self._copies.promote(read)  # first: who has begun it looks at its priority
        self.lower.promote(key)

    def cancel(self, read: Read) -> bool:
        """Takes back a read that has not begun; says whether it could be."""
        return self._copies.cancel(read)

    def is_under_way(self, read: Read) -> bool:
        """Whether a copy was started and its end is still to be told."""
        return self._copies.is_under_way(read) or self._ends.is_under_way(read)

    def can_hasten(self, read: Read) -> bool:
        """Whether a copy is one of its own, which ``promote`` reaches: not one of several experts,
        which the device does already."""
        return self._copies.is_under_way(read)

    def let_go(self) -> None:
        """Gives up what an exception left to this thread, here and below."""
        self._copies.let_go()
        self._ends.let_go()
        self.tell_ends()  # who was to call it has not come so far
        self.lower.let_go()

    def close(self) -> None:
        """Ends the tier below, and with it what waits for that; then the copies."""
        self._ends.close()  # no copy is queued at once any more
        if self._device and not self.changed.is_forked:
            self._device.drain()  # what nobody waits for yet still reads from slots below
        self.lower.close()
        self._copies.close()

    def _copy(self, key: ExpertKey, slot: torch.Tensor, read: Read, after: Sequence[Any]) -> int:
        lease, is_done = self.lower.lease([key], streaming=read.passes, above=read), False
        num_bytes = len(slot)
        try:
            with lease:
                for group in lease:
                    for key, source in group:
                        if self._device:
                            num_bytes = self._send(key, source, slot, after, read)
                        else:
                            self._move(key, source, slot)
            is_done = True
        finally:
            if not is_done:
                self.lower.give_up(lease)
        return num_bytes

    def _move(self, key: ExpertKey, source: torch.Tensor, slot: torch.Tensor) -> None:
        slot.copy_(source[: len(slot)])

    def resident_below(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Those that lie in the tier below: without its lock, so ``copy_resident`` looks again."""
        return [key for key in keys if is_resident(self.lower._entries.get(key))]

    def copy_resident(self, slots: Mapping[ExpertKey, torch.Tensor], read: Read) -> bool:
        """Queues one copy of experts that are resident below, on the thread that asks for it.

        A thread waits for its end, once `tell_ends` was called. Handing over the copy itself, or
        each expert by itself, would take longer than the link takes for it.

        Args:
            slots: where the experts of one layer go.
            read: ends when all are there; its bytes are those of one of them, on average.

        Returns:
            Whether it is queued: not where one is absent, or the device refuses.
        """
        assert self._device is not None
        lease = self.lower.lease([*slots], streaming=read.passes, above=read)
        is_done = False
        try:
            sources = _entered(lease)
            if sources is None:
                is_done = True
                return False
            after, parts = self._vacate(*slots.values()), []
            for key, source in sources.items():
                parts += self._parts(key, source, slots[key])
            copied = self._device.copy(parts, after, read.priority)
            self.queued[read] = _Copy(copied)
            num_bytes = _num_bytes(parts)
            finish = partial(self._finish, lease, read, copied, num_bytes, len(slots))
            self._ends.submit([finish], read, wakes=False)
            self._is_untold = True  # now: else another thread may tell of it before it is there
            is_done = True
            return True
        except (MemoryError, OSError, RuntimeError):
            # unless it is queued nevertheless, a thread tries again, and tells of what fails there
            return self._ends.is_under_way(read)
        finally:
            if not is_done:
                try:
                    self._device.drain()
                finally:
                    self.queued.pop(read, None)
                    self.lower.give_up(lease)

    def tell_ends(self) -> None:
        """Has a thread wait for the ends of copies that were queued by who asked for them.

        To be called when all is queued that goes on behind these copies: waking a thread takes
        longer than queueing a copy. Where nobody calls it, the thread finds them within a second.
        """
        if self._is_untold:
            self._is_untold = False
            with self._ends._changed:
                self._ends._changed.notify_all()

    def _finish(
        self, lease: Lease[torch.Tensor], read: Read, copied: Copy, num_bytes: int, count: int
    ) -> int:
        """Returns an expert's part of the bytes of a copy that was queued, when all are there."""
        is_done = False
        try:
            self._wait(read, copied, num_bytes)
            lease.__exit__()
            is_done = True
        finally:
            if not is_done:
                self.lower.give_up(lease)
        return num_bytes // count

    def _parts(
        self, key: ExpertKey, source: torch.Tensor, slot: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied where."""
        return [
            (
                _part(source, move.source, move.num_bytes),
                _part(slot, move.place, move.num_bytes),
            )
            for move in self._moves_of(key, slot)
        ]

    def _moves_of(self, key: ExpertKey, slot: torch.Tensor) -> Sequence[CopyPart]:
        return [CopyPart(0, 0, len(slot))] if self._moves is None else self._moves(key)

    def _send(
        self,
        key: ExpertKey,
        source: torch.Tensor,
        slot: torch.Tensor,
        after: Sequence[Any],
        read: Read,
    ) -> int:
        """Returns the bytes that were copied, when they are there."""
        assert self._device is not None
        parts, copied, is_done = self._parts(key, source, slot), None, False
        num_bytes = _num_bytes(parts)
        try:
            copied = self._device.copy(parts, after, read.priority)
            with self.changed:
                self.queued[read] = _Copy(copied)
                self.changed.notify_all()
            is_done = True
        finally:
            if not is_done:
                self._wait(read, None, num_bytes)
        self._wait(read, copied, num_bytes)
        return num_bytes

    def _wait(self, read: Read, copied: Copy | None, num_bytes: int) -> None:
        """Returns when a copy has ended; without one, when none writes any more."""
        assert self._device is not None
        is_done = False
        try:
            if copied is not None:
                copied.synchronize()
                is_done = True
                self.speed.ended(num_bytes, copied)
        finally:
            try:
                if not is_done:
                    # it may still read from a slot, and write to one, that are given up
                    self._device.drain()
            finally:
                self._forget(read, sys.exc_info()[1])

    def _forget(self, read: Read, error: BaseException | None) -> None:
        """A copy has ended; an error is kept if nobody who used its slot will hear of it."""
        with self.changed:
            copy = self.queued.get(read)
            if copy is not None and copy.has_users:
                self._failure = self._failure or error
            self.queued.pop(read, None)
            self.changed.notify_all()

    def finish_used(self) -> None:
        """Returns when no work is queued behind a copy that may still fail.

        Raises:
            MoERuntimeError: one has failed.
        """
        self.tell_ends()
        with self.changed:
            while any(
                copy.has_users and self.is_under_way(read) for read, copy in self.queued.items()
            ):
                self.changed.wait()
        self.raise_failure()

    def is_within_lower(self) -> bool:
        """Whether the caller runs within an operation below, where the lock above must not be
        waited for: others take the locks the other way round. Those below that an exception left
        to this thread are given up for the same reason."""
        caller = sys._getframe(1)
        locks = [self._copies._changed, self._ends._changed, self.lower._changed]
        if isinstance(self.lower, LowerStore):
            locks.append(self.lower.lock_of_returns)
        for one in locks:
            if one._lock._is_owned():
                if one._is_under_way(caller):
                    return True
                one.let_go()
        return False

    def raise_failure(self) -> None:
        """Tells once of a copy that failed behind the back of work that was queued behind it.

        Raises:
            MoERuntimeError: there was one.
        """
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
    with store._changed:
        if not all(is_resident(store._entries.get(key)) for key in lease._keys):
            return None
        lease.__enter__()
        held = lease._held = [*lease._resident]
        lease._resident.clear()
        if lease._listener is not None:
            lease._listener.given(held, waited=False)
        return {key: lease._weights(key) for key in held}


class _Copy:
    """A copy that is queued on a device, and whether a lease has handed its slot out."""

    __slots__ = ("event", "has_users")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.has_users = False
