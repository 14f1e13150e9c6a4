"""Leases of experts in slots of a device, for work that is queued there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from moe_runtime.memory.io_queue import Read
from moe_runtime.memory.tiers import TierLease
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.memory.device.device_store import DeviceStore

W = TypeVar("W")


class DeviceLease(TierLease[W]):
    """A hold on experts of a device, which are handed out when their copies are queued.

    The caller's current stream waits for the copies of what is handed out, the host for none. A
    policy that decides after the use whether to keep an expert is asked once it has arrived, so
    then the host waits too.
    """

    _store: DeviceStore[W]  # pyright: ignore[reportIncompatibleVariableOverride]
    _awaited: Read | None = None  # what the current stream waits for already, of this group

    def _next_group(self) -> list[ExpertKey]:
        if self._held and not self._arriving:  # the caller has queued what it does with all
            self._store.fetcher.tell_ends()
        return super()._next_group()

    @property
    def _batch_size(self) -> int:
        """Experts of one copy and of one launch."""
        return self._store.stream_batch if self._streaming else len(self._keys)

    def _admit(self) -> None:
        """What is resident below is copied together, but what only passes through the tier."""
        if self._wanted:
            self._store.fetcher.expect(frozenset(self._wanted))
        while len(self._wanted) > 1 and self._above is None:
            batch = [
                self._wanted.popleft() for _ in range(min(self._batch_size, len(self._wanted)))
            ]
            others, self._wanted = self._wanted, deque(self._start_together(batch))
            super()._admit()
            is_full = bool(self._wanted)
            self._wanted.extend(others)
            if is_full:
                return
        super()._admit()

    def _start_together(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Demands what is resident below; returns the rest."""
        store = self._store
        absent = [key for key in keys if key not in store._entries]
        started = store.start_together(absent, self._keep, passes=self._streaming)
        for key in started:
            store._entries[key].pins += 1
            self._arriving.append(key)
        return [key for key in keys if key not in set(started)]

    def _take_ready(self) -> list[ExpertKey]:
        """What is there goes first, then those whose copies are queued.

        These come together, and are computed together once they have all arrived, where a few
        tokens want few experts; of a stream those of one copy, so that the device computes them
        while the next ones are copied.
        """
        found = super()._take_ready()
        while self._streaming and self._resident and 0 < len(found) < self._batch_size:
            found.append(self._resident.popleft())
        if not found and not self._decides_later:
            found = self._take_queued()
        if not found:  # they are waited for
            self._store.fetcher.tell_ends()
        return found

    def _take_queued(self) -> list[ExpertKey]:
        queued, entries = self._store.fetcher.queued, self._store._entries
        found = [key for key in self._arriving if entries[key].read in queued]
        if self._streaming and found:
            first = entries[found[0]].read
            found = [key for key in found if entries[key].read is first]
        for key in found:
            queued[entries[key].read].has_users = True
            self._arriving.remove(key)
        return found

    def _weights(self, key: ExpertKey) -> W:
        store = self._store
        read = store._entries[key].read
        copy = store.fetcher.queued.get(read)
        if copy is not None and read is not self._awaited:
            store.device.wait_here(copy.event)
            self._awaited = read
        store.fetcher.raise_failure()
        return super()._weights(key)
