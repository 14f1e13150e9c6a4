"""A store over a fake tier that answers when told to, and what is asked of it."""

import threading
from collections.abc import Callable

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.memory.reads import Monitor, Priority, Transfer
from moe_runtime.memory.source import Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.types import ExpertKey

SLOT_BYTES = 64
NUM_LAYERS = 3
NUM_EXPERTS = 6


def content(key: ExpertKey) -> int:
    """The byte that fills an expert of the fake tier; never that of an empty slot."""
    return 1 + key.layer * NUM_EXPERTS + key.expert


class FakeTier:
    """A tier below that answers when told to, in any order, and can be made to fail."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.monitor = Monitor()
        self.under_way: set[Transfer] = set()
        self.waiting: list[tuple[ExpertKey, Callable[[], None]]] = []
        self.fetched: list[ExpertKey] = []
        self.promoted: list[ExpertKey] = []
        self.broken: set[ExpertKey] = set()

    def fetch(self, key, slot, read: Transfer) -> None:
        self.fetched.append(key)
        self.under_way.add(read)

        def finish() -> None:
            if key in self.broken:
                read.error = CheckpointError(f"expert {key} is broken")
            else:
                slot.fill_(content(key))
                read.num_bytes = SLOT_BYTES
            read.end()
            self.under_way.discard(read)

        if self.at_once:
            threading.Thread(target=finish).start()
        else:
            self.waiting.append((key, finish))

    def promote(self, key, read) -> None:
        read.priority = Priority.DEMAND
        self.promoted.append(key)

    def cancel(self, read: Transfer) -> bool:
        return False

    def is_under_way(self, read: Transfer) -> bool:
        return read in self.under_way

    def close(self) -> None:
        pass

    def finish(self, *keys: ExpertKey) -> None:
        """Lets the named reads end, all when none is named."""
        for pair in [pair for pair in self.waiting if not keys or pair[0] in keys]:
            self.waiting.remove(pair)
            pair[1]()


def make_store(
    tier: FakeTier, num_slots: int, stream_slots: int = 2, policy: LayerShares | None = None
) -> ExpertStore[torch.Tensor]:
    slab = Slab(num_slots, SLOT_BYTES)
    for index in range(num_slots):
        slab.slot(index).fill_(255)  # poison: no expert has this content
    if policy is None:  # one that holds nothing yet is false
        policy = LayerShares(LRU, even_shares(num_slots, NUM_LAYERS))
    return ExpertStore(tier, slab, policy, lambda _, slot: slot, stream_slots=stream_slots)


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def use(store: ExpertStore[torch.Tensor], wanted, *, streaming: bool = False) -> list[ExpertKey]:
    """Leases experts, checks every byte of each, and returns them in the order they came."""
    seen = []
    with store.lease(wanted, streaming=streaming) as lease:
        for group in lease:
            for key, slot in group:
                assert (slot == content(key)).all(), f"{key} has another expert's bytes"
                seen.append(key)
            store.check()
    store.check()
    assert sorted(seen) == sorted(wanted)
    return seen


class PromptTier:
    """Fills a slot with its key at once, and says so from another thread."""

    def __init__(self) -> None:
        self.monitor = Monitor()
        self.under_way: set[Transfer] = set()
        self.threads: list[threading.Thread] = []

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Transfer) -> None:
        slot.fill_(key.layer * 16 + key.expert)
        read.num_bytes = len(slot)
        self.under_way.add(read)
        self.threads.append(threading.Thread(target=self.finish, args=(read,)))
        self.threads[-1].start()

    def finish(self, read: Transfer) -> None:
        read.end()
        self.under_way.discard(read)

    def join(self) -> None:
        """Returns once every read has told that it ended."""
        while self.threads:
            self.threads.pop().join()

    def is_under_way(self, read: Transfer) -> bool:
        return read in self.under_way

    def promote(self, key: ExpertKey, read: Transfer) -> None:
        pass

    def cancel(self, read: Transfer) -> bool:
        return False

    def close(self) -> None:
        pass


def open_store(policy: LayerShares, num_slots: int) -> ExpertStore[torch.Tensor]:
    return ExpertStore(
        PromptTier(), Slab(num_slots, 8), policy, lambda _, slot: slot, stream_slots=2
    )
