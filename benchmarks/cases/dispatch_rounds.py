"""The case ``dispatch``: dispatch and combine between processes, beside a padded all-to-all.

The first rank runs the case and tells the others what comes next; a round begins after a barrier,
and the slowest rank's time counts. Before the first repetition both sides compute the same tokens:
where a bit differs on any rank, the peer gets no numbers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.benchmarks.cases.padded_exchange import ExchangeShape, RankExchange
from moe_runtime.benchmarks.suite.results import Metric, describe_own_systems, make_results
from moe_runtime.benchmarks.suite.runner import Number, PeerFailedError, Rules, run_in_turn

SIDES = ("moe_runtime", "padded")


@dataclass(frozen=True, kw_only=True)
class DispatchBenchPlan:
    """What is asked of both sides.

    Attributes:
        shapes: exchanges, of different loads or types.
        rounds: of each shape in a repetition.
    """

    shapes: Sequence[ExchangeShape]
    rounds: int

    def name(self, shape: ExchangeShape) -> str:
        """What its metrics are called by."""
        return f"{shape.load}_{shape.dtype}"


class RankRounds:
    """This rank's part: it makes the exchanges, and does what the first rank says."""

    def __init__(self, plan: DispatchBenchPlan) -> None:
        self.plan = plan
        self._exchanges = [RankExchange(shape) for shape in plan.shapes]

    @torch.no_grad()
    def run(self, what: str, number: int, side: str) -> list[float]:
        """Does one thing with an exchange, on all ranks at once.

        Args:
            what: ``compare``, ``bytes`` or ``time``.
            number: of the exchange.
            side: whose bytes or time.

        Returns:
            Equal tokens of all ranks; bytes that all ranks send; or seconds of each round.
        """
        exchange = self._exchanges[number]
        if what == "compare":
            return [_of_all(exchange.num_equal(), dist.ReduceOp.SUM)]
        if what == "bytes":
            return [_of_all(exchange.sent_bytes()[side], dist.ReduceOp.SUM)]
        seconds = []
        for _ in range(self.plan.rounds):
            dist.barrier()
            begin = time.perf_counter()
            exchange.sides[side]()
            seconds.append(_of_all(time.perf_counter() - begin, dist.ReduceOp.MAX))
        return seconds

    def tell(self, what: str, number: int, side: str) -> list[float]:
        """As ``run``, said to the other ranks first."""
        dist.broadcast_object_list([(what, number, side)], src=0)
        return self.run(what, number, side)

    def follow(self) -> None:
        """Does what the first rank says until it has no more."""
        while True:
            said: list[Any] = [None]
            dist.broadcast_object_list(said, src=0)
            if said[0] is None:
                return
            self.run(*said[0])


def _of_all(value: float, how: Any) -> float:
    number = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(number, how)
    return float(number)


class DispatchSide:
    """A side under test.

    Attributes:
        name: ``moe_runtime`` or ``padded``.
        compared, equal: tokens of all ranks, and those for which both give the same bits.
    """

    def __init__(self, name: str, rounds: RankRounds) -> None:
        self.name, self._rounds = name, rounds
        self.compared = self.equal = 0

    def repeat(self) -> Mapping[str, Number]:
        """Measures every shape; before the first time, compares results.

        Raises:
            PeerFailedError: they differ.
        """
        if not self.compared:
            self._compare()
        found: dict[str, Number] = {}
        for number, shape in enumerate(self._rounds.plan.shapes):
            name = self._rounds.plan.name(shape)
            found[f"{name}_s"] = self._rounds.tell("time", number, self.name)
            found[f"{name}_bytes"] = self._rounds.tell("bytes", number, self.name)[0]
        return found

    def _compare(self) -> None:
        for number, shape in enumerate(self._rounds.plan.shapes):
            self.compared += shape.num_tokens * dist.get_world_size()
            self.equal += int(self._rounds.tell("compare", number, self.name)[0])
        if self.equal < self.compared:
            raise PeerFailedError(
                f"{self.compared - self.equal} of {self.compared} tokens differ between the sides; "
                "times would be those of other work"
            )


def measure_dispatch(
    plan: DispatchBenchPlan,
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    on_repetition: Callable[[str, int], None] = lambda name, number: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Measures both sides within the default group, which every rank calls.

    Returns:
        The content of a results file on the first rank; None on the others.
    """
    rounds = RankRounds(plan)
    if dist.get_rank():
        rounds.follow()
        return None
    metrics = {}
    for shape in plan.shapes:
        metrics[f"{plan.name(shape)}_s"] = Metric("s")
        metrics[f"{plan.name(shape)}_bytes"] = Metric("bytes")
    systems = [DispatchSide(name, rounds) for name in SIDES]
    found, ended = run_in_turn(
        systems, rules, clock, on_repetition=on_repetition, is_stopping=is_stopping
    )
    dist.broadcast_object_list([None], src=0)
    return make_results(
        "dispatch",
        settings,
        ended,
        describe_own_systems(systems, found, metrics),
    )
