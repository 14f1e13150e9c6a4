"""What a decode step lacks: one copy and no lease where it lies in the tier below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_runtime.memory.device.residents import Residents, is_resident
from moe_runtime.memory.io_queue import Read
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.memory.device.device_store import DeviceStore


class Planned(NamedTuple):
    """Misses of a layer whose copies may be under way still.

    Attributes:
        seconds: predicted.
        begun_s: when the copies were asked for.
        host_s: when the CPU had done its part.
        reads: the copies.
    """

    seconds: float
    begun_s: float
    host_s: float
    reads: Sequence[Read]


def use_arriving(
    store: DeviceStore[Any],
    keys: Sequence[ExpertKey],
    residents: Residents,
    launch: Callable[[Sequence[ExpertKey]], object],
) -> Sequence[ExpertKey]:
    """Copies the missing experts of a layer, and queues work on them behind the copy.

    A lease is several operations, between which other threads may take slots. Here all is one,
    which takes the host less time: who takes a slot after it fills it behind the work that is
    queued now.

    Args:
        store: of the experts; nobody listens to it.
        keys: the experts of the step, those wanted most last.
        residents: of the layer, with which work is queued already.
        launch: queues work on experts, which are in their slots by then; it must not wait.

    Returns:
        Those that are still to be leased: all where one is on its way or lies on the disk, or
        where the policy decides after the use, and those for which there are no slots now.

    Raises:
        MoERuntimeError: a copy failed that earlier work was queued behind.
    """
    fetcher = store.fetcher
    fetcher.raise_failure()
    store.device.compute_here()
    with store._changed:
        entries = store._entries  # a repair makes them anew
        missing = [key for key in keys if key.expert not in residents.experts]
        if (
            store._streamed
            or store.listener is not None
            or store.decides_later
            or any(key in entries for key in missing)
            or len(fetcher.resident_below(missing)) < len(missing)
        ):
            return keys
        used = [key for key in keys if key.expert in residents.experts]
        for key in used:
            store._count_use(key)
        if not missing:
            return ()
        held = [entries[key] for key in used if is_resident(entries.get(key))]
        for entry in held:
            entry.pins += 1  # a repair counts them anew
        fetcher.expect(frozenset(missing))
        started = store.start_together(missing, missing)
        for entry in held:
            entry.pins -= 1
        # one read, or of each its own where the device refused the copy of all
        reads = {entries[key].read: None for key in started}
        copies = [fetcher.queued[read] for read in reads if read in fetcher.queued]
        if not started or len(copies) < len(reads):  # slots are lacking, or threads copy
            return missing
        store._counters.misses += len(started)
        for copy in copies:
            copy.has_users = True
            store.device.wait_here(copy.event)
        launch(started)
    fetcher.tell_ends()
    return [key for key in missing if key not in started]
