"""A fetcher whose reads end when a test says so, and that remembers who asked for what."""

from dataclasses import dataclass, field

import torch

from moe_runtime.errors import CLOSED, MoERuntimeError
from moe_runtime.memory.reads import Monitor, Priority, Transfer
from moe_runtime.types import ExpertKey


@dataclass
class SlowReader:
    """Fills a slot with ``layer * 16 + expert`` once ``finish`` is called for its key."""

    waiting: dict[ExpertKey, tuple[Transfer, torch.Tensor]] = field(default_factory=dict)
    asked: list[tuple[ExpertKey, Priority]] = field(default_factory=list)
    promoted: list[ExpertKey] = field(default_factory=list)
    begun: set[ExpertKey] = field(default_factory=set)
    is_closed: bool = False
    monitor: Monitor = field(default_factory=Monitor)

    def fetch(self, key: ExpertKey, slot: torch.Tensor, read: Transfer) -> None:
        if self.is_closed:
            raise MoERuntimeError(CLOSED)
        self.waiting[key] = (read, slot)
        self.asked.append((key, read.priority))

    def promote(self, key: ExpertKey, read: Transfer) -> None:
        read.priority = Priority.DEMAND
        self.promoted.append(key)

    def cancel(self, read: Transfer) -> bool:
        for key, (waiting, _) in list(self.waiting.items()):
            if waiting is read and key not in self.begun:
                del self.waiting[key]
                return True
        return False

    def is_under_way(self, read: Transfer) -> bool:
        return any(waiting is read for waiting, _ in self.waiting.values())

    def close(self) -> None:
        self.is_closed = True
        for key in list(self.waiting):
            self.waiting.pop(key)[0].refuse()

    def finish(self, key: ExpertKey) -> None:
        read, slot = self.waiting.pop(key)
        slot.fill_(key.layer * 16 + key.expert)
        read.num_bytes = len(slot)
        read.end()

    def finish_all(self) -> None:
        for key in list(self.waiting):
            self.finish(key)
