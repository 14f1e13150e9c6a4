"""The case ``dispatch``: dispatch and combine between processes, and a padded all-to-all.

A round starts after a barrier, and the slowest rank's time counts. The peer works like GShard and
Tutel: every expert gets as many slots as the busiest one needs, and all messages have equal size.
If a bit of its results differs on any rank, it gets no numbers. Without torchrun the measuring
process is the first rank and starts the others.

Shape suffixes: T tokens, D model, K choices, E experts, R rows, P ranks.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from moe_runtime.benchmarks.suite import BenchSystem, Metric, Number, Rules, measure_systems
from moe_runtime.benchmarks.suite.memory_cap import interruptions_held
from moe_runtime.errors import RankFailureError
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.parallel import FlatTransport, combine, dispatch
from moe_runtime.parallel.communication.transport import Pending, Transport
from moe_runtime.routing import Routing

OURS = "moe_runtime"
SIDES = (OURS, "padded")


@dataclass(frozen=True)
class ExchangeShape:
    num_tokens: int
    dim: int
    num_experts: int
    top_k: int
    load: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.load}_{self.dtype}"

    @property
    def row_bytes(self) -> int:
        return self.dim * getattr(torch, self.dtype).itemsize

    def ids_TK(self, rank: int) -> Tensor:
        random = torch.Generator().manual_seed(17)
        order_E = torch.randperm(self.num_experts, generator=random)
        random = torch.Generator().manual_seed(rank)
        if self.load == "balanced":
            first_T = torch.arange(self.num_tokens) * self.top_k
            ids_TK = (first_T[:, None] + torch.arange(self.top_k)) % self.num_experts
            return order_E[ids_TK][torch.randperm(self.num_tokens, generator=random)]
        popularity_E = torch.ones(self.num_experts)
        if self.load == "zipf":
            popularity_E = 1 / torch.arange(1, self.num_experts + 1)
        popularity_TE = popularity_E.expand(self.num_tokens, -1)
        return order_E[popularity_TE.multinomial(self.top_k, generator=random)]


class CountingTransport:
    """A transport that counts the bytes of rows leaving this rank."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.exchange_numbers, self.routes = inner.exchange_numbers, inner.routes
        self.row_bytes = 0

    def exchange(self, rows_RD: Tensor, route: object, **options: Any) -> Pending:
        self.row_bytes += rows_RD.nbytes
        return self._inner.exchange(rows_RD, route, **options)


class RankExchange:
    """Both exchanges of one shape on this rank, and their bytes."""

    def __init__(self, shape: ExchangeShape) -> None:
        """Draw tokens and choices; a collective of the default group."""
        group = dist.group.WORLD
        assert group is not None
        self.shape, rank = shape, dist.get_rank()
        random = torch.Generator().manual_seed(rank)
        ids_TK = shape.ids_TK(rank)
        weights_TK = torch.rand(ids_TK.shape, generator=random)
        x_TD = torch.randn(shape.num_tokens, shape.dim, generator=random)
        self._x_TD = x_TD.to(getattr(torch, shape.dtype))
        self._routing = Routing(ids_TK, weights_TK, shape.num_experts)
        self._transport = CountingTransport(FlatTransport(group))
        padded = partial(padded_round, self._x_TD, self._routing)
        self.sides: dict[str, Callable[[], Tensor]] = {OURS: self.ours, "padded": padded}

    def ours(self) -> Tensor:
        """Dispatch and combine, ``[T, D]``."""
        dispatched = dispatch(self._x_TD, self._routing, self._transport)
        return combine(dispatched.rows_RD, dispatched)

    def num_equal(self) -> int:
        """The number of this rank's tokens for which both exchanges give the same bits."""
        ours, theirs = (side().contiguous().view(torch.uint8) for side in self.sides.values())
        return int((ours == theirs).all(-1).sum())

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that leave this rank in both directions, by exchange; a collective."""
        self._transport.row_bytes, shape = 0, self.shape
        self.ours()
        num_slots = self._routing.ids_TK.flatten().bincount(minlength=shape.num_experts).max()
        dist.all_reduce(num_slots, dist.ReduceOp.MAX)
        others = shape.num_experts - shape.num_experts // dist.get_world_size()
        padded = 2 * others * int(num_slots) * shape.row_bytes
        return {OURS: self._transport.row_bytes, "padded": padded}


def padded_round(x_TD: Tensor, routing: Routing) -> Tensor:
    """The padded exchange: every expert gets as many slots as the busiest one anywhere."""
    size, num_experts = dist.get_world_size(), routing.num_experts
    num_tokens, top_k = routing.ids_TK.shape
    by_expert = token_sort(routing.ids_TK, num_experts)
    busiest = by_expert.counts_E.max()
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    num_slots = int(busiest)
    expert_R = routing.ids_TK.flatten()
    place_R = by_expert.inverse_R - by_expert.offsets_E1[expert_R] + expert_R * num_slots
    place_TK = place_R.view(num_tokens, top_k)
    sent_RD = x_TD.new_zeros((num_experts * num_slots, x_TD.shape[1]))
    for k in range(top_k):
        sent_RD.index_copy_(0, place_TK[:, k], x_TD)
    arrived_RD = torch.empty_like(sent_RD)
    dist.all_to_all_single(arrived_RD, sent_RD)
    # Rows arrive by rank and are needed by expert.
    grid = (size, num_experts // size, num_slots, -1)
    rows = arrived_RD.view(grid).transpose(0, 1).contiguous()
    back = rows.transpose(0, 1).contiguous()
    returned_RD = torch.empty_like(sent_RD)
    dist.all_to_all_single(returned_RD, back)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for k in range(top_k):
        picked_TD = returned_RD.index_select(0, place_TK[:, k])
        out_TD.addcmul_(picked_TD.to(torch.float32), routing.weights_TK[:, k, None])
    return out_TD.to(x_TD.dtype)


@dataclass(frozen=True, kw_only=True)
class DispatchBenchPlan:
    shapes: Sequence[ExchangeShape]
    rounds: int


class RankRounds:
    """This rank's part: it builds exchanges and follows the first rank's orders."""

    def __init__(self, plan: DispatchBenchPlan) -> None:
        self.plan = plan
        self._exchanges = [RankExchange(shape) for shape in plan.shapes]

    @torch.no_grad()
    def run(self, what: str, number: int, side: str) -> list[float]:
        """Run one order on this rank."""
        exchange, seconds = self._exchanges[number], []
        if what == "compare":
            return [_of_all(exchange.num_equal(), dist.ReduceOp.SUM)]
        if what == "bytes":
            return [_of_all(exchange.sent_bytes()[side], dist.ReduceOp.SUM)]
        for _ in range(self.plan.rounds):
            dist.barrier()
            begin = time.perf_counter()
            exchange.sides[side]()
            seconds.append(_of_all(time.perf_counter() - begin, dist.ReduceOp.MAX))
        return seconds

    def tell(self, what: str, number: int, side: str) -> list[float]:
        """Send an order to the other ranks, then run it."""
        dist.broadcast_object_list([(what, number, side)], src=0)
        return self.run(what, number, side)

    def follow(self) -> None:
        """Follow the first rank's orders until the last."""
        said: list[Any] = [None]
        while dist.broadcast_object_list(said, src=0) or said[0] is not None:
            self.run(*said[0])


def _of_all(value: float, how: Any) -> float:
    number = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(number, how)
    return float(number)


class DispatchSide(BenchSystem):
    """A side under test. Tokens of all ranks must agree to the bit."""

    def __init__(self, name: str, rounds: RankRounds) -> None:
        super().__init__(name)
        self._rounds = rounds

    def repeat(self) -> Mapping[str, Number]:
        tell, shapes, found = self._rounds.tell, self._rounds.plan.shapes, dict[str, Number]()
        if not self.compared:
            compared = sum(shape.num_tokens for shape in shapes) * dist.get_world_size()
            equal = sum(tell("compare", number, self.name)[0] for number in range(len(shapes)))
            self.count(compared, int(equal), "tokens differ between the sides")
        for number, shape in enumerate(shapes):
            found[f"{shape.name}_s"] = tell("time", number, self.name)
            found[f"{shape.name}_bytes"] = tell("bytes", number, self.name)[0]
        return found


def measure_dispatch(
    plan: DispatchBenchPlan, rules: Rules, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Measure both sides in the default group; every rank calls this."""
    rounds = RankRounds(plan)
    if dist.get_rank():
        rounds.follow()
        return None
    every = [(shape.name, unit) for shape in plan.shapes for unit in ("s", "bytes")]
    metrics = {f"{name}_{unit}": Metric(unit) for name, unit in every}
    systems = [DispatchSide(name, rounds) for name in SIDES]
    results = measure_systems("dispatch", systems, metrics, rules, settings)
    dist.broadcast_object_list([None], src=0)
    return results


_JOINING_S, _LEAVING_S, _SEEN_S = 120.0, 10.0, 0.5
# A rank may compute for long between exchanges; one that ended breaks them at once.
_EXCHANGES = timedelta(hours=6)
Follow = Callable[[int, Any, int, str], None]


def follow(number: int, plan: DispatchBenchPlan, num_ranks: int, store: str) -> None:
    """The program of a child process: join the group and follow the first rank."""
    meet(number + 1, num_ranks, store, lambda: None)
    measure_dispatch(plan, Rules(judged=()), {})
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit


@contextmanager
def ranks_here(plan: Any, num_ranks: int, store: str, follow: Follow = follow) -> Iterator[None]:
    """A default group of this process, the first rank, and child processes that follow it.

    Raises:
        RankFailureError: a rank ended; the message has its last line of output.
    """
    resource_tracker.ensure_running()  # which lets interruptions through where it starts
    with interruptions_held():  # children keep them held: this process ends them
        others = start_processes(follow, (plan, num_ranks, store), num_ranks - 1, join=False)
    assert others is not None
    children: list[Any] = others.processes

    def ended(number: int, why: str) -> RankFailureError:
        said = f"rank {number + 1} of {num_ranks} ended: {why}"
        return RankFailureError(said, ranks=(number + 1,))

    def require_alive(timeout_s: float = 0.0) -> None:
        try:  # the others hold the signal that ends them
            others.join(timeout_s, grace_period=_SEEN_S)
        except ProcessRaisedException as error:
            raise ended(error.error_index, str(error).strip().splitlines()[-1]) from None
        except ProcessExitedException as error:
            raise ended(error.error_index, f"exit code {error.exit_code}") from None

    try:
        meet(0, num_ranks, store, require_alive)
        try:
            yield
        except RuntimeError:
            # Torch notices a closed connection before the kernel reports that the process has
            # ended.
            require_alive(_SEEN_S)
            raise
        for one in children:
            one.join(_LEAVING_S)
    finally:
        with interruptions_held():
            for one in children:
                one.kill()
                one.join()
        if dist.is_initialized():
            dist.destroy_process_group()


def meet(
    rank: int,
    num_ranks: int,
    store: str,
    require_alive: Callable[[], None],
    limit_s: float = _JOINING_S,
) -> None:
    """Wait for all ranks and create the default group; compute with one thread."""
    torch.set_num_threads(1)
    meeting = FileStore(store, num_ranks)
    meeting.set(f"rank {rank}", "here")
    deadline = time.monotonic() + limit_s
    while missing := [one for one in range(num_ranks) if not meeting.check([f"rank {one}"])]:
        require_alive()
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankFailureError(
                f"of {num_ranks} ranks {names} did not join within {limit_s:g} s",
                ranks=tuple(missing),
            )
        time.sleep(0.01)
    dist.init_process_group(
        "gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=_EXCHANGES
    )
