"""From one set of ranks and one placement to the next, prepared while the present one serves.

ElasticMoE's steps: processes that join have loaded the dense weights; experts travel from rank to
rank; the next group connects; then the ranks switch to the new epoch, between two passes.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from moe_runtime.errors import MoERuntimeError, RankFailureError
from moe_runtime.parallel import Transport
from moe_runtime.parallel.communication.membership import Store, open_group, open_transport
from moe_runtime.parallel.remap import moves_between
from moe_runtime.policies.placement import Devices, Placement
from moe_runtime.research.elastic.paged_experts import Epoch, ExpertPages, keys_of
from moe_runtime.types import ExpertKey


@dataclass(frozen=True, kw_only=True)
class Change:
    """What all processes concerned get. A rank keeps its number from epoch to epoch.

    Attributes:
        epoch: number of the epoch that it leads to.
        num_old: ranks of the present epoch; 0 at the start.
        members: numbers of the processes: all that are in either epoch, by rank.
        slots: `[L][S]` experts of the next placement.
        transfers: `(layer, expert, from rank, to rank)` of every page that travels.
    """

    epoch: int
    num_old: int
    num_new: int
    members: tuple[int, ...]
    num_experts: int
    slots: tuple[tuple[int, ...], ...]
    transfers: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def between(
        cls, epoch: int, members: tuple[int, ...], old: Placement | None, new: Placement
    ) -> Change:
        """The change with the fewest transfers between two placements, ranks numbered alike."""
        num_old = 0 if old is None else old.num_gpus
        transfers = []
        if old is not None:
            everybody = Devices(num_nodes=1, gpus_per_node=max(num_old, new.num_gpus))
            transfers = [
                (
                    move.layer,
                    move.expert,
                    move.source_slot // old.slots_per_gpu,
                    move.target_slot // new.slots_per_gpu,
                )
                for move in moves_between(old, new, everybody)
                if not move.is_local
            ]
        return cls(
            epoch=epoch,
            num_old=num_old,
            num_new=new.num_gpus,
            members=members,
            num_experts=new.num_experts,
            slots=tuple(map(tuple, new.expert_of_slot.tolist())),
            transfers=tuple(transfers),
        )

    @property
    def placement(self) -> Placement:
        return Placement(
            expert_of_slot=np.array(self.slots), num_experts=self.num_experts, num_gpus=self.num_new
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Change:
        value = json.loads(text)
        for name in ("slots", "transfers"):
            value[name] = tuple(map(tuple, value[name]))
        return cls(**value | {"members": tuple(value["members"])})


def decide(store: Store, change: Change) -> bool:
    """Whether the ranks may switch now: all are ready; for rank 0 to call now and then."""
    prefix = f"epoch/{change.epoch}"
    if store.check([f"{prefix}/failed"]):
        store.set(f"{prefix}/abandoned", "")
        raise RankFailureError(store.get(f"{prefix}/failed").decode())
    if store.add(f"{prefix}/ready", 0) < len(change.members):
        return False
    store.set(f"{prefix}/go", "")
    return True


class ChangePreparation:
    """One rank's part of a change, up to the switch; runs in a thread of its own.

    Pages in use are only read, so the rank goes on computing with them.
    """

    def __init__(
        self, change: Change, rank: int, pages: ExpertPages, store: Store, timeout_s: float
    ) -> None:
        self.change = change
        self.rank = rank
        self.arrivals: dict[ExpertKey, torch.Tensor] = {}
        self.transport: Transport | None = None
        # Kept until all are ready: a group that is let go closes its connections, and a slower
        # rank may still be making them.
        self._pages_group: dist.ProcessGroup | None = None
        self._pages = pages
        # A connection of its own: a wait must not hold up the rank's other uses of the store.
        self._store = cast(Any, store).clone()
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._run, name="moe-prepare", daemon=True)
        self._thread.start()

    def epoch(self) -> Epoch:
        """The next epoch, for a rank that belongs to it; waits for the preparation to end."""
        self._thread.join()
        assert self.transport is not None
        return Epoch(self.change.epoch, self.transport, self.change.placement)

    def _run(self) -> None:
        epoch = self.change.epoch
        try:
            self._move_pages()
            self._read_pages()
            if self.rank < self.change.num_new:
                self.transport = open_transport(
                    self._store,
                    f"epoch/{epoch}/group",
                    self.rank,
                    self.change.num_new,
                    timeout_s=self._timeout_s,
                )
        except (MoERuntimeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            self._store.set(f"epoch/{epoch}/failed", f"rank {self.rank}: {reason}")
        else:
            self._store.add(f"epoch/{epoch}/ready", 1)

    def _move_pages(self) -> None:
        """Sends and receives pages; gloo moves them while this thread waits."""
        change, works = self.change, []
        if not change.transfers:
            return
        group = self._pages_group = open_group(
            self._store,
            f"epoch/{change.epoch}/pages",
            self.rank,
            len(change.members),
            timeout_s=self._timeout_s,
        )
        for tag, (layer, expert, source, target) in enumerate(change.transfers):
            key = ExpertKey(layer, expert)
            if target == self.rank:
                self.arrivals[key] = self._pages.allocate(key)
                works.append(group.recv([self.arrivals[key]], source, tag))
            elif source == self.rank:
                works.append(group.send([self._pages.page(key)], target, tag))
        for work in works:
            work.wait()

    def _read_pages(self) -> None:
        """Reads what no rank has yet: all of it at the start, nothing later."""
        if self.rank >= self.change.num_new:
            return
        wanted = keys_of(self.change.placement, self.rank)
        missing = [key for key in sorted(wanted - self.arrivals.keys()) if key not in self._pages]
        self.arrivals |= self._pages.read(missing)
