"""One process of an elastic generation service, its requests, and the change of ranks or placement.

All ranks hold the dense weights; the routed experts are spread over them. A step is an exchange of
messages, then one forward pass for each request of the rank that has most of them; a rank with
fewer takes part without tokens. Rank 0 gives the orders.

A request that moves takes its keys and values along where they are plain tensors. Other caches
(windows, recurrent states) are built again on the new rank by the passes that built them. Either
way the next token has the same bits.

A change has ElasticMoE's steps: processes that join have loaded the dense weights; experts travel
from rank to rank; the next group connects; then the ranks switch to the new epoch, between two
passes.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.errors import MoERuntimeError, RankFailureError
from moe_runtime.inference.generation import check_options
from moe_runtime.parallel import Transport
from moe_runtime.parallel.communication.transport import (
    Store,
    exchange_bytes,
    open_group,
    open_transport,
)
from moe_runtime.parallel.placement_map import moves_between
from moe_runtime.policies.placement import Devices, Placement
from moe_runtime.research.elastic.paged_experts import Epoch, ExpertPages, SpreadModel, keys_of
from moe_runtime.types import ExpertKey


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of ranks or placement. A rank keeps its number from epoch to epoch.

    Attributes:
        epoch: number of the epoch that it leads to.
        num_old: ranks of the present epoch; 0 at the start.
        members: numbers of the processes in either epoch, by rank.
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
        # Kept until all are ready: a dropped group closes its connections, and a slower rank may
        # still be making them.
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
        """Reads experts that no rank has yet: all of them at the start, none later."""
        if self.rank >= self.change.num_new:
            return
        wanted = keys_of(self.change.placement, self.rank)
        missing = [key for key in sorted(wanted - self.arrivals.keys()) if key not in self._pages]
        self.arrivals |= self._pages.read(missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRequest:
    """A request for text.

    Attributes:
        prompt: token ids, at least one.
        temperature: 0 takes the most likely token.
        top_p: samples among the most likely tokens that together have this probability.
        seed: of the sampling; every request has a random state of its own.

    Raises:
        ValueError: an option is out of range, or the prompt is empty.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self.max_new_tokens, self.temperature, self.top_p, self.seed)
        if not self.prompt:
            raise ValueError("the prompt is empty, expected at least one token")


class RunningRequest:
    """A request on the rank that generates for it; `unreported` tokens are new to the service."""

    def __init__(self, number: int, request: ElasticRequest, ends: frozenset[int]) -> None:
        self.number = number
        self.request = request
        self.tokens: list[int] = []
        self.unreported = 0
        self.is_finished = False
        self._ends = ends
        self._random = torch.Generator().manual_seed(request.seed)
        self._cache: Any = None

    @torch.inference_mode()
    def advance(self, model: Any) -> None:
        """One forward pass; generates a token unless the cache is still being built again."""
        from transformers import DynamicCache

        if self._cache is None:
            self._cache = DynamicCache(config=model.config)
        known = [*self.request.prompt, *self.tokens]
        num_cached = self._cache.get_seq_length()
        # A pass is the whole prompt or a single token, also when it is done for the second time.
        new = known[num_cached : max(num_cached + 1, len(self.request.prompt))]
        outputs = model(
            input_ids=torch.tensor([new]),
            use_cache=True,
            logits_to_keep=1,
            **{cache_name(model.forward): self._cache},
        )
        if num_cached + len(new) < len(known):
            return
        token = self._choose(known, outputs.logits[0, -1:])
        self.tokens.append(token)
        self.unreported += 1
        is_full = len(self.tokens) == self.request.max_new_tokens
        self.is_finished = is_full or token in self._ends

    def _choose(self, known: list[int], logits_1V: torch.Tensor) -> int:
        logits_1V = logits_1V.float()
        if self.request.temperature == 0:
            return int(logits_1V.argmax())
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        ids: Any = torch.tensor([known])
        scores_1V: Any = TemperatureLogitsWarper(self.request.temperature)(
            ids, cast(Any, logits_1V)
        )
        if self.request.top_p < 1:
            scores_1V = TopPLogitsWarper(self.request.top_p)(ids, scores_1V)
        return int(torch.multinomial(scores_1V.softmax(-1), 1, generator=self._random))

    def take_report(self) -> list[int]:
        """The tokens that are new to the service."""
        first = len(self.tokens) - self.unreported
        self.unreported = 0
        return self.tokens[first:]

    def leave(self) -> dict[str, Any]:
        """Everything that another rank needs to go on; caches of other kinds are built again."""
        layers = [] if self._cache is None or self.is_finished else self._cache.layers
        kept = [(one.keys, one.values) for one in layers if _is_plain(one)]
        return {
            "number": self.number,
            "request": asdict(self.request),
            "tokens": self.tokens,
            "unreported": self.unreported,
            "is_finished": self.is_finished,
            "random": self._random.get_state(),
            "cache": kept if len(kept) == len(layers) else [],
        }

    @classmethod
    def arrive(cls, state: dict[str, Any], ends: frozenset[int], config: Any) -> RunningRequest:
        """The request that left, with a cache of the keys and values that came with it."""
        from transformers import DynamicCache

        found = cls(state["number"], ElasticRequest(**state["request"]), ends)
        found.tokens, found.unreported = state["tokens"], state["unreported"]
        found.is_finished = state["is_finished"]
        found._random.set_state(state["random"])
        if state["cache"]:
            found._cache = DynamicCache(config=config)
            for layer, (keys, values) in enumerate(state["cache"]):
                found._cache.update(keys, values, layer)
        return found


def _is_plain(layer: Any) -> bool:
    """Whether a layer of a cache is its keys and values and nothing else."""
    from transformers.cache_utils import DynamicLayer

    return isinstance(layer, DynamicLayer) and not layer.is_sliding


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """Orders of rank 0 to all ranks in a step.

    Attributes:
        requests: new ones, with their number and the rank that generates for them.
        prepare: a change to prepare.
        switch: ranks of all requests in the prepared epoch, which begins now.
        abandon: the prepared change is given up.
        counts_loads: ranks report their counts since the last time.
        ends: the service ends.
    """

    requests: tuple[tuple[int, int, ElasticRequest], ...] = ()
    prepare: Change | None = None
    switch: Mapping[int, int] | None = None
    abandon: bool = False
    counts_loads: bool = False
    ends: bool = False

    @classmethod
    def read(cls, value: dict[str, Any]) -> Orders:
        """From parsed JSON."""
        value["requests"] = tuple(
            (number, rank, ElasticRequest(**asked | {"prompt": tuple(asked["prompt"])}))
            for number, rank, asked in value["requests"]
        )
        if value["prepare"] is not None:
            value["prepare"] = Change(**value["prepare"])
        if value["switch"] is not None:
            value["switch"] = {int(number): rank for number, rank in value["switch"].items()}
        return cls(**value)


@dataclass(kw_only=True, slots=True)
class RankReport:
    """A rank's message to rank 0: new tokens, finished requests, loads if asked for."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    loads_LE: list[list[int]] | None = None

    @classmethod
    def read(cls, value: dict[str, Any]) -> RankReport:
        """From parsed JSON."""
        value["tokens"] = {int(number): told for number, told in value["tokens"].items()}
        return cls(**value)


POLL_S = 0.02


class Reception(Protocol):
    """Rank 0's side of the messages."""

    def write(self) -> Orders: ...

    def read(self, rank: int, report: RankReport) -> None: ...


class Member:
    """A process with a loaded model, inside or outside of the service."""

    def __init__(self, model: SpreadModel, store: Store, *, timeout_s: float) -> None:
        self.model = model
        self._spread = model.spread
        self._store = store
        self._timeout_s = timeout_s
        self._requests: dict[int, RunningRequest] = {}
        self._preparation: ChangePreparation | None = None
        self._reports_loads = False

    def join(self, change: Change, rank: int, *, decides: bool = False) -> bool:
        """Prepares to be a rank of the next epoch, and enters it when all are ready; whether it
        did.

        `decides` on rank 0 at the start.
        """
        preparation = ChangePreparation(
            change, rank, self._spread.pages, self._store, timeout_s=self._timeout_s
        )
        go, abandoned = f"epoch/{change.epoch}/go", f"epoch/{change.epoch}/abandoned"
        while not self._store.check([go]):
            if self._store.check([abandoned]):
                return False
            if decides:
                decide(self._store, change)
            time.sleep(POLL_S)
        epoch = preparation.epoch()
        if change.num_old:
            self._take_over(epoch.transport, {})
        self._spread.enter(epoch, preparation.arrivals)
        return True

    def serve(self, front: Reception | None = None) -> None:
        """Generates until this rank has left the group or the service ends; `front` on rank 0."""
        while self._step(front):
            pass

    def _step(self, front: Reception | None) -> bool:
        """An exchange and the passes after it; False where this rank has left."""
        transport = self._spread.epoch.transport
        running = [one for one in self._requests.values() if not one.is_finished]
        messages: dict[int, dict[str, Any]] = {}
        report = self._report()
        if report.tokens or report.finished or report.loads_LE is not None:
            messages[0] = {"report": asdict(report)}
        if front is not None and (written := front.write()) != Orders():
            for rank in range(transport.size):
                messages.setdefault(rank, {})["orders"] = asdict(written)
        orders = Orders()
        packed = {rank: json.dumps(message).encode() for rank, message in messages.items()}
        arrived, passes = exchange_bytes(transport, packed, note=len(running))
        for rank, said in ((rank, json.loads(data)) for rank, data in arrived.items()):
            if "orders" in said:
                orders = Orders.read(said["orders"])
            if "report" in said and front is not None:
                front.read(rank, RankReport.read(said["report"]))
        for index in range(max(passes)):
            if index < len(running):
                running[index].advance(self.model.model)
            else:
                self.model.serve_others()
        return self._obey(orders)

    def _report(self) -> RankReport:
        requests = self._requests
        report = RankReport(
            tokens={n: one.take_report() for n, one in requests.items() if one.unreported},
            finished=[number for number, one in requests.items() if one.is_finished],
        )
        for number in report.finished:
            del requests[number]
        if self._reports_loads:
            report.loads_LE = self._spread.loads_LE.tolist()
            self._spread.loads_LE[:] = 0
            self._reports_loads = False
        return report

    def _obey(self, orders: Orders) -> bool:
        own = self._spread.epoch.transport.rank
        for number, rank, request in orders.requests:
            if rank == own:
                self._requests[number] = RunningRequest(number, request, self.model.ends)
        self._reports_loads = orders.counts_loads
        if orders.prepare is not None:
            self._preparation = ChangePreparation(
                orders.prepare, own, self._spread.pages, self._store, timeout_s=self._timeout_s
            )
        if orders.abandon:
            self._preparation = None
        if orders.switch is not None:
            return self._switch_epoch(orders.switch)
        return not orders.ends

    def _switch_epoch(self, ranks: Mapping[int, int]) -> bool:
        """Enters the prepared epoch; requests move to their new ranks. False if this one left."""
        preparation, self._preparation = self._preparation, None
        assert preparation is not None, "a switch of epochs without a preparation"
        present, change = self._spread.epoch, preparation.change
        has_left = preparation.rank >= change.num_new
        messages: dict[int, list[dict[str, Any]]] = {}
        for number, rank in ranks.items():
            if number in self._requests and rank != preparation.rank:
                messages.setdefault(rank, []).append(self._requests.pop(number).leave())
        # Of the two groups, the larger one has all ranks.
        is_shrinking = change.num_new < change.num_old
        self._take_over(
            present.transport if is_shrinking else preparation.epoch().transport, messages
        )
        if has_left:
            self._spread.leave()
        else:
            self._spread.enter(preparation.epoch(), preparation.arrivals)
        return not has_left

    def _take_over(
        self, transport: Transport, messages: Mapping[int, list[dict[str, Any]]]
    ) -> None:
        """Sends requests to other ranks, and goes on with theirs."""
        packed = {}
        for rank, leaving in messages.items():
            torch.save(leaving, buffer := io.BytesIO())
            packed[rank] = buffer.getvalue()
        arrived, _ = exchange_bytes(transport, packed)
        model = self.model
        for data in arrived.values():
            for state in torch.load(io.BytesIO(data), weights_only=True):
                one = RunningRequest.arrive(state, model.ends, model.model.config)
                self._requests[one.number] = one
